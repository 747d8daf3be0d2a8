"""Malformed deployments: each is refused with the place, the key and what to do, and every problem of a file is told."""

from __future__ import annotations

import pathlib

import pytest

from omni_bus.cli import main
from omni_bus.config import load_deployment
from omni_bus.errors import ConfigError
from omni_bus.spec import load_pipeline

PROBE = '[model]\npipeline = "probe"\n'
OMNI = '[model]\npipeline = "qwen3_omni"\n'
CASCADE = '[model]\npipeline = "cascade"\n'
CODEC = '[edges."talker->code2wav"]\n'

TOML = {
    "unknown table": (PROBE + "[apis]\n", ":3: apis: unknown table", '(did you mean "api"?)'),
    "unknown key": (PROBE + "[api]\nprot = 1\n", ":4: api.prot: unknown key", '(did you mean "port"?)'),
    "unknown key far from all": (PROBE + "[model.zzz]\n", ":3: model.zzz: unknown key", "(valid: name, path, pipeline)"),
    "top-level key": ("port = 1\n" + PROBE, ":1: port: unknown table", "valid: api, bus"),
    "no pipeline": ("[api]\nport = 1\n", "model.pipeline: missing", "probe"),
    "empty file": ("", "model.pipeline: missing", "one of"),
    "unknown pipeline": ('[model]\npipeline = "prob"\n', ":2: model.pipeline: unknown pipeline", '(did you mean "probe"?)'),
    "pipeline of a wrong type": ("[model]\npipeline = 3\n", ":2: model.pipeline must be a string", "not 3"),
    "table that is a value": (PROBE + "[stages]\nsource = 3\n", ":4: stages.source: must be a table", "not 3"),
    "all of api a value": ("api = 3\n" + PROBE, ":1: api: must be a table", "not 3"),
    "unknown stage": (PROBE + "[stages.sourc]\n", ":3: stages.sourc: pipeline probe has no such stage", '(did you mean "source"?)'),
    "unknown edge": (PROBE + '[edges."source->sink"]\n', ':3: edges."source->sink": pipeline probe has no such edge', "did you mean"),
    "unknown stage key": (PROBE + "[stages.source]\ntensor_byte = 1\n", ":4: stages.source.tensor_byte: unknown key", '"tensor_bytes"'),
    "option of a wrong type": (PROBE + "[stages.source]\nfaults = 1\n", ":4: stages.source.faults must be true or false", "not 1"),
    "negative option": (PROBE + "[stages.source]\ntensor_bytes = -4\n", ":4: stages.source.tensor_bytes must be an integer of at least 0", "-4"),
    "port too high": (PROBE + "[api]\nport = 65536\n", ":4: api.port must be from 1 to 65535", "65536"),
    "port a string": (PROBE + '[api]\nport = "80a"\n', ":4: api.port must be an integer", 'not the string "80a"'),
    "port true": (PROBE + "[api]\nport = true\n", ":4: api.port must be an integer", "not true"),
    "no such limit": (PROBE + "[api]\nmax_requests_per_client = -1\n", ":4: api.max_requests_per_client must be from 0 (no limit)", "not -1"),
    "deadline zero": (PROBE + "[api]\ndeadline_s = 0\n", ":4: api.deadline_s must be above 0", "not 0"),
    "deadline not a number": (PROBE + "[api]\ndeadline_s = nan\n", ":4: api.deadline_s must be a number", "nan"),
    "a date": (PROBE + "[api]\nport = 2026-01-01\n", ":4: api.port must be an integer", "the date or time 2026-01-01"),
    "hosts not a list": (PROBE + '[api]\nmedia_hosts = "a"\n', ":4: api.media_hosts must be a list of strings", 'the string "a"'),
    "no replicas": (PROBE + "[stages.sink]\nreplicas = 0\n", ":4: stages.sink.replicas: 0 leaves the stage to other hosts", "bus.listen"),
    "negative replicas": (PROBE + "[stages.sink]\nreplicas = -1\n", ":4: stages.sink.replicas must be from 0", "not -1"),
    "listen without keys": (PROBE + '[bus]\nlisten = "tcp://127.0.0.1:5600"\n', ":4: bus.listen: without bus.keys anybody could attach", "omni-bus keys new"),
    "listen on no endpoint": (PROBE + '[bus]\nlisten = "0.0.0.0:5600"\nkeys = "k"\n', ":4: bus.listen: must be tcp://HOST:PORT", '"0.0.0.0:5600"'),
    "listen on no port": (PROBE + '[bus]\nlisten = "tcp://*:65536"\nkeys = "k"\n', ":4: bus.listen: must be tcp://HOST:PORT", "65536"),
    "no such keys": (PROBE + '[bus]\nlisten = "tcp://*:5600"\nkeys = "nowhere"\n', ":5: bus.keys:", "server.key_secret: cannot be read: No such file"),
    "keys without listen": (PROBE + '[bus]\nkeys = "k"\n', ":4: bus.keys: of no use without bus.listen", "leave it out"),
    "tcp without listen": (PROBE + '[edges."source->relay"]\nconnector = "tcp"\n', '"tcp" leads to other hosts', 'say "auto"'),
    "unknown loop": (PROBE + '[stages.sink]\nloop = "thread"\n', ":4: stages.sink.loop must be one of shared, own", '"thread"'),
    "loops that differ": (PROBE + '[stages.relay]\nprocess = "a"\nloop = "own"\n[stages.sink]\nprocess = "a"\n', "sink.loop: stages relay and sink share a process, so both take turns or neither does", '"own" and "shared"'),
    "a process by a thread's name": (PROBE + '[stages.relay]\nprocess = "a"\nloop = "own"\n[stages.sink]\nprocess = "relay"\n', 'sink.process: "relay" is a stage with a loop of its own', "name the process otherwise"),
    "local between threads": (PROBE + '[stages.source]\nprocess = "a"\nloop = "own"\n[stages.relay]\nprocess = "a"\nloop = "own"\n[edges."source->relay"]\nconnector = "local"\n', '"local" joins stages of one process that share its loop', 'say "shm"'),
    "cuda_ipc between threads": (PROBE + '[stages.source]\nprocess = "a"\nloop = "own"\n[stages.relay]\nprocess = "a"\nloop = "own"\n[edges."source->relay"]\nconnector = "cuda_ipc"\n', '"cuda_ipc" joins processes, and source and relay are threads of one', 'say "auto"'),
    "unknown dtype": (PROBE + '[stages.sink]\ndtype = "fp32"\n', ":4: stages.sink.dtype must be one of float32", "fp32"),
    "no devices": (PROBE + "[stages.sink]\ndevices = []\n", ":4: stages.sink.devices must be a list of at least one device", "[]"),
    "devices a string": (PROBE + '[stages.sink]\ndevices = "cpu"\n', ":4: stages.sink.devices must be a list of strings", "cpu"),
    "unknown device": (PROBE + '[stages.sink]\ndevices = ["gpu"]\n', ':4: stages.sink.devices: "gpu" is no device', '"cuda:0"'),
    "no such CUDA device": (CASCADE + '[stages.llm]\ndevices = ["cuda:99"]\n', "stage llm wants cuda:99, and this machine has", "--set"),
    "GPU for a stage of the CPU": (CASCADE + '[stages.tts]\ndevices = ["cuda:0"]\n', ":4: stages.tts.devices: stage tts runs on the CPU only", "leave it out"),
    "devices without replicas": (PROBE + '[stages.sink]\ndevices = ["cpu", "cpu"]\n', ":4: stages.sink.devices: lists 2 devices", "never be used"),
    "temperature": (PROBE + "[stages.source.sampling]\ntemperature = -1\n", ":4: stages.source.sampling.temperature: must be a number from", "100"),
    "sampling key": (PROBE + "[stages.source.sampling]\ntop_o = 1\n", ":4: stages.source.sampling.top_o: unknown key", 'did you mean "top_p"'),
    "sampling type": (PROBE + '[stages.source.sampling]\ntop_k = "x"\n', ":4: stages.source.sampling.top_k must be an integer", "x"),
    "sampling a value": (PROBE + "[stages.source]\nsampling = 3\n", ":4: stages.source.sampling: must be a table", "not 3"),
    "stage without sampling": (PROBE + "[stages.sink]\nsampling = {top_k = 1}\n", ":4: stages.sink.sampling: stage sink does not sample", "sink"),
    "unknown connector": (PROBE + '[edges."source->relay"]\nconnector = "smh"\n', "connector must be one of auto, inline, local, shm", "smh"),
    "local across processes": (PROBE + '[edges."source->relay"]\nconnector = "local"\n', "joins stages of one process", "source and relay"),
    "fences of no kind": (PROBE + '[bus]\ngpu_fences = "word"\n', ":4: bus.gpu_fences must be one of words, events", "word"),
    "cuda_ipc between CPUs": (PROBE + '[edges."source->relay"]\nconnector = "cuda_ipc"\n', '"cuda_ipc" joins stages on GPUs, and stage source is on cpu', 'stage relay is on cpu; say "auto"'),
    "cuda_ipc to the client": (PROBE + '[edges."sink->client"]\nconnector = "cuda_ipc"\n', 'an edge of the client has "auto" or "inline"', "cuda_ipc"),
    "shm to the client": (PROBE + '[edges."sink->client"]\nconnector = "shm"\n', 'an edge of the client has "auto" or "inline"', "shm"),
    "no credits": (PROBE + '[edges."source->relay"]\ncredits = 0\n', ':4: edges."source->relay".credits must be from 1', "0"),
    "edge key": (PROBE + '[edges."source->relay"]\ncredit = 1\n', ':4: edges."source->relay".credit: unknown key', '"credits"'),
    "group of unequal replicas": (
        PROBE + '[stages.source]\nprocess = "p"\n[stages.relay]\nprocess = "p"\nreplicas = 2\n',
        ":7: stages.relay.replicas: stages source and relay share a process",
        "now 1 and 2",
    ),
    "group of unequal threads": (
        PROBE + '[stages.source]\nprocess = "p"\nthreads = 1\n[stages.relay]\nprocess = "p"\nthreads = 2\n',
        ":8: stages.relay.threads: stages source and relay share a process",
        "now 1 and 2",
    ),
    "process with a taken name": (PROBE + '[stages.sink]\nprocess = "broker"\n', ":4: stages.sink.process must be lower-case", "broker"),
    "process that is a path": (PROBE + '[stages.sink]\nprocess = "../x"\n', ":4: stages.sink.process must be lower-case", "digits"),
    "lost before the heartbeat": (PROBE + "[bus]\nheartbeat_s = 5\nlost_after_s = 6\n", ":5: bus.lost_after_s: must be at least twice", "5"),
    "open to the world": (PROBE + '[api]\nhost = "0.0.0.0"\n', ":4: api.host: without api.api_keys_file", "loopback"),
    "no key file": (PROBE + '[api]\napi_keys_file = "nokeys.txt"\n', ":4: api.api_keys_file:", "cannot be read: No such file"),
    "option below its least": (OMNI + "[stages.thinker]\nblock_size = 0\n", ":4: stages.thinker.block_size must be at least 1", "1"),
    "option between its values": (OMNI + "[stages.talker]\nmax_length = 1\n", ":4: stages.talker.max_length must be 0 or at least 2", "2"),
    "no first frame": (OMNI + CODEC + "first_chunk_frames = 0\n", ".first_chunk_frames must be at least 1", ":4: edges"),
    "most below the first": (OMNI + CODEC + "first_chunk_frames = 4\nmax_chunk_frames = 3\n", ".max_chunk_frames must be at least first", ":5: edges"),
    "first above the default most": (OMNI + CODEC + "first_chunk_frames = 30\n", "max_chunk_frames must be at least", "which is 30"),
    "option of no such choice": (CASCADE + '[stages.asr]\ncompute_type = "int9"\n', ":4: stages.asr.compute_type must be one of", '(did you mean "int8"?)'),
    "option out of range": (CASCADE + "[stages.tts]\nspeed = 9\n", ":4: stages.tts.speed must be from 0.5 to 2", "2"),
    "key that a stage does not use": (CASCADE + '[stages.asr]\ndtype = "bfloat16"\n', ":4: stages.asr.dtype: stage asr has no use for it", "leave it out"),
    "duplicate key": (PROBE + "[api]\nport = 1\nport = 2\n", ":5: not valid TOML", "overwrite"),
    "duplicate table": (PROBE + "[api]\n[api]\n", ":4: not valid TOML", "twice"),
    "not TOML": (PROBE + "[api\n", ":3: not valid TOML", "Expected ']'"),
}  # fmt: skip


def refusal(file: pathlib.Path, **said: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_deployment(file, **{"environ": {}, **said})  # type: ignore[arg-type]
    return caught.value.message


@pytest.mark.parametrize("case", TOML)
def test_a_malformed_file_is_refused(case: str, tmp_path: pathlib.Path) -> None:
    text, place, advice = TOML[case]
    file = tmp_path / "bad.toml"
    file.write_text(text)
    message = refusal(file)
    assert place in message
    assert advice in message
    assert all(line.startswith(str(file)) for line in message.splitlines())
    assert main(["check", str(file)]) == 2


OUTSIDE = {
    "no value": (["api.port"], {}, "--set api.port: wants table.key=value"),
    "no table": (["port=3"], {}, "--set port=3: wants table.key=value"),
    "no key": (["=3"], {}, "--set =3: wants table.key=value"),
    "unknown key": (["api.prt=3"], {}, '--set api.prt=3: api.prt: unknown key (did you mean "port"?)'),
    "wrong type": (["api.port=many"], {}, '--set api.port=many: api.port must be an integer, not the string "many"'),
    "below a value": (["api.port.x=3"], {}, "--set api.port.x=3: api.port must be an integer, not a table"),
    "over a table": (["stages.source=3"], {}, "--set stages.source=3: stages.source: must be a table, not 3"),
    "unknown stage": (["stages.sinc.replicas=2"], {}, 'stages.sinc: pipeline probe has no such stage (did you mean "sink"?)'),
    "unknown edge": (["edges.source->sinc.credits=2"], {}, 'edges."source->sinc": pipeline probe has no such edge'),
    "pipeline": (["model.pipeline=cascad"], {}, 'unknown pipeline "cascad" (did you mean "cascade"?)'),
    "variable without a table": ([], {"OMNI_BUS_PORT": "1"}, "OMNI_BUS_PORT: names no setting"),
    "variable of an unknown key": ([], {"OMNI_BUS_API__PROT": "1"}, 'OMNI_BUS_API__PROT: api.prot: unknown key (did you mean "port"?)'),
    "variable of an unknown edge": ([], {"OMNI_BUS_EDGES__SOURCE_TO_RELAI__CREDITS": "1"}, '(did you mean "source->relay"?)'),
    "variable of a wrong type": ([], {"OMNI_BUS_BUS__RETRIES": "[1]"}, "OMNI_BUS_BUS__RETRIES: bus.retries must be an integer, not the list [1]"),
}  # fmt: skip


@pytest.mark.parametrize("case", OUTSIDE)
def test_a_malformed_override_is_refused(case: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sets, environ, fragment = OUTSIDE[case]
    file = tmp_path / "good.toml"
    file.write_text(PROBE)
    load_deployment(file, environ={})
    assert fragment in refusal(file, sets=sets, environ=environ)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert main(["check", str(file), *(part for text in sets for part in ("--set", text))]) == 2


def test_every_problem_is_told_in_the_order_of_the_file(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text('[api]\nprot = 1\n[stages.source]\nreplicas = -1\n[model]\npipeline = "probe"\npth = "x"\n')
    lines = refusal(file, sets=["bus.x=1"], port=0).splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"{file}:2", f"{file}:4", f"{file}:7", "--set bus.x=1", "--port 0"]


def test_an_unknown_pipeline_comes_first(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text('[api]\nprot = 1\n[model]\npipeline = "probes"\n')
    first, second = refusal(file).splitlines()
    assert "unknown pipeline" in first
    assert "api.prot" in second


def test_a_missing_model_says_how_to_name_one(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "tiny.toml"
    file.write_text('[model]\npipeline = "qwen3_omni"\n')
    assert "--set model.path=DIR" in refusal(file)


@pytest.mark.parametrize(
    ("name", "fragment"),
    [("probee.toml", 'no such file (did you mean "probe.toml"?)'), (".", "is a directory"), ("latin.toml", "is not UTF-8")],
)
def test_a_file_that_cannot_be_read(name: str, fragment: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "probe.toml").write_text(PROBE)
    (tmp_path / "latin.toml").write_bytes(b'[model]\nname = "\xe9"\n')
    assert fragment in refusal(tmp_path / name)


def test_a_file_that_is_no_deployment_is_not_offered(tmp_path: pathlib.Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    assert refusal(tmp_path / "myproject.toml").endswith("no such file")


def test_the_smaller_deployment_is_named_where_a_device_is_missing(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "big.toml"
    file.write_text(CASCADE + '[stages.llm]\ndevices = ["cuda:99"]\n')
    (tmp_path / "big_tiny.toml").write_text(PROBE)
    assert f"use {tmp_path / 'big_tiny.toml'} or --set" in refusal(file)


def test_a_hub_is_not_asked_for_a_deployment_that_is_refused_anyway(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "big.toml"
    file.write_text('[model]\npipeline = "qwen3_omni"\npath = "nobody/nothing"\n[stages.thinker]\ndevices = ["cuda:99"]\n')
    [only] = refusal(file).splitlines()
    assert "wants cuda:99" in only


@pytest.mark.parametrize(
    ("head", "stages"),
    [(PROBE, {"source", "relay", "sink"}), (CASCADE, {"asr", "tts"}), (OMNI, {"processor"})],
    ids=["probe", "cascade", "qwen3_omni"],
)
def test_which_stages_have_no_use_for_a_gpu(head: str, stages: set[str], tmp_path: pathlib.Path) -> None:
    file = tmp_path / "gpus.toml"
    pipeline = load_pipeline(head.split('"')[1])
    file.write_text(head + "".join(f'[stages.{stage.name}]\ndevices = ["cuda:99"]\n' for stage in pipeline.stages))
    told = refusal(file).splitlines()
    assert {line.split(".devices: stage ")[1].split()[0] for line in told if "runs on the CPU only" in line} == stages
    assert {line.split(".devices: stage ")[1].split()[0] for line in told if "wants cuda:99" in line} == {
        stage.name for stage in pipeline.stages
    } - stages
