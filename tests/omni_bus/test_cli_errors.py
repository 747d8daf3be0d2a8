"""What a user does wrong at the command line: exit code 2 (1 for what is not their doing), one line, and what to do."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable

import pytest

from omni_bus import __version__
from omni_bus.cli import main
from omni_bus.commands.check import plan
from omni_bus.deployment import ApiConfig, BusConfig, Deployment, EdgeConfig, ModelConfig, StageConfig
from omni_bus.spec import load_pipeline

PROBE = '[model]\npipeline = "probe"\n'

USES = {
    "no command": ([], "usage: omni-bus"),
    "unknown command": (["serve"], "invalid choice: 'serve'"),
    "unknown option": (["up", "good.toml", "--prot", "1"], "unrecognized arguments: --prot 1"),
    "no config": (["up"], "the following arguments are required: CONFIG.toml"),
    "missing config": (["up", "god.toml"], 'god.toml: no such file (did you mean "good.toml"?)'),
    "config is a directory": (["check", "."], ".: is a directory"),
    "bad config": (["check", "bad.toml"], 'bad.toml:4: api.prt: unknown key (did you mean "port"?)'),
    "bad set": (["check", "good.toml", "--set", "api.port"], "--set api.port: wants table.key=value"),
    "bad port": (["up", "good.toml", "--port", "0"], "--port 0: api.port must be from 1 to 65535, not 0"),
    "port no number": (["up", "good.toml", "--port", "x"], "argument --port: invalid int value: 'x'"),
    "open to the world": (["check", "good.toml", "--host", "0.0.0.0"], "--host 0.0.0.0: api.host: without api.api_keys_file"),
    "host of another machine": (["up", "keys.toml", "--host", "no.such.host.invalid"], 'api.host: "no.such.host.invalid" is no address'),
    "nothing to say": (["chat"], "nothing to say"),
    "no such sound": (["chat", "--audio", "none.wav"], "none.wav: cannot be read: No such file or directory"),
    "no such picture": (["chat", "what?", "--image", "none.png"], "none.png: cannot be read: No such file or directory"),
    "speech asked for and not": (["chat", "x", "--no-audio", "--out", "x.wav"], "--out wants the spoken answer"),
    "nowhere to write": (["chat", "x", "--out", "none/x.wav"], "none: no such directory"),
    "no url": (["chat", "x", "--url", "ftp://x"], '"ftp://x" is no http address'),
    "a port that is none": (["status", "--url", "http://x:99999"], '"http://x:99999" is no http address'),
    "concurrency": (["bench", "http://x", "--concurrency", "1,0"], 'argument --concurrency: "0" must be an integer from 1'),
    "concurrency no number": (["bench", "http://x", "--concurrency", "1,a"], '"a" must be an integer from 1'),
    "requests": (["bench", "http://x", "--requests", "-3"], '"-3" must be an integer from 1'),
    "two prompts": (["bench", "http://x", "--prompt", "a", "--prompt-words", "3"], "not allowed with argument"),
    "modality": (["bench", "http://x", "--modality", "video"], "invalid choice: 'video'"),
    "figures nowhere": (["bench", "http://x", "--json", "none/figures.json"], "none: no such directory"),
    "interval": (["top", "--interval", "0"], "--interval must be from 0.2 to 60"),
    "fixture of what": (["fixture", "gpt", "out"], "invalid choice: 'gpt'"),
    "fixture over a file": (["fixture", "qwen3-omni", "good.toml"], "good.toml: is a file; name a directory"),
    "fixture over things": (["fixture", "qwen3-omni", "."], ".: is not empty"),
    "fixture size": (["fixture", "qwen3-omni", "out", "--size", "huge"], "invalid choice: 'huge'"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def workspace(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("OMNI_BUS_")]:
        monkeypatch.delenv(name)
    (tmp_path / "good.toml").write_text(PROBE)
    (tmp_path / "bad.toml").write_text(PROBE + "[api]\nprt = 1\n")
    (tmp_path / "keys.txt").write_text("a-key\n")
    (tmp_path / "keys.toml").write_text(PROBE + '[api]\napi_keys_file = "keys.txt"\n')


def outcome(arguments: list[str]) -> int:
    try:
        return main(arguments)
    except SystemExit as ended:
        assert isinstance(ended.code, int)
        return ended.code


@pytest.mark.parametrize("case", USES)
def test_wrong_use_is_told_in_a_line(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    arguments, fragment = USES[case]
    assert outcome(arguments) == 2
    said = capfd.readouterr()
    assert fragment in said.err
    assert said.out == ""
    assert "Traceback" not in said.err
    if arguments:
        assert len(said.err.splitlines()) == 1


def test_verbose_adds_the_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    assert outcome(["check", "bad.toml", "--verbose"]) == 2
    said = capfd.readouterr().err
    assert "Traceback" in said
    assert said.splitlines()[-1].startswith("omni-bus: bad.toml:4: api.prt")


def test_every_problem_is_a_line_of_its_own(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.toml").write_text(PROBE + "[api]\nprt = 1\nhots = 2\n")
    assert outcome(["check", "bad.toml"]) == 2
    assert [line.split(": ")[1] for line in capfd.readouterr().err.splitlines()] == ["bad.toml:4", "bad.toml:5"]


def test_the_environment_counts(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OMNI_BUS_API__PROT", "1")
    assert outcome(["check", "good.toml"]) == 2
    assert "OMNI_BUS_API__PROT: api.prot: unknown key" in capfd.readouterr().err


def test_no_server_is_not_the_users_input(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        for arguments in (["status", "--url", url], ["chat", "x", "--url", url], ["bench", url]):
            assert outcome(arguments) == 1
            assert capfd.readouterr().err.startswith(f"omni-bus: no server at {url}/v1/")


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH_9.6\r\n\r\n", b"", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"])
def test_a_server_that_is_none_of_ours(answer: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def reply() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        threading.Thread(target=reply).start()
        assert outcome(["status", "--url", f"http://127.0.0.1:{listener.getsockname()[1]}"]) == 1
    said = capfd.readouterr().err
    assert said.startswith("omni-bus: ")
    assert len(said.splitlines()) == 1


def test_check_prints_the_plan(capfd: pytest.CaptureFixture[str]) -> None:
    sets = ["--set", "stages.source.process=front", "--set", "stages.relay.process=front", "--set", "stages.sink.replicas=2"]
    assert outcome(["check", "good.toml", *sets]) == 0
    said = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert ["source", "front.0", "cpu", "float32"] in [line[:4] for line in said]
    assert ["sink", "sink.1", "cpu", "float32"] in [line[:4] for line in said]
    assert ["source->relay", "local", "64"] in said


def checkpoint(directory: pathlib.Path, **tensors: tuple[str, list[int]]) -> None:
    """The header of a safetensors file; nobody reads further."""
    directory.mkdir()
    header = json.dumps(
        {name.replace("_", "."): {"dtype": kind, "shape": shape} for name, (kind, shape) in tensors.items()}
    ).encode()
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def test_check_knows_the_weights_of_a_stage(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    checkpoint(
        tmp_path / "model",
        source_a=("BF16", [1024, 1024]),
        source_b=("I64", [131072]),
        sink_a=("F32", [1024, 512]),
        x_a=("F32", [9]),
    )
    assert outcome(["check", "good.toml", "--set", "model.path=model", "--set", "stages.sink.dtype=bfloat16"]) == 0
    weights = {line[0]: " ".join(line[6:]) for line in map(str.split, capfd.readouterr().out.splitlines()) if len(line) > 6}
    assert (weights["source"], weights["relay"], weights["sink"]) == ("5.0 MiB", "-", "1.0 MiB")


def test_check_claims_no_dtype_or_batch_for_a_stage_that_has_none() -> None:
    placed = Deployment(
        model=ModelConfig(pipeline="cascade"),
        api=ApiConfig(),
        bus=BusConfig(),
        stages={name: StageConfig(devices=("cpu",)) for name in ("asr", "llm", "tts")},
        edges={edge.name: EdgeConfig(credits=1) for edge in load_pipeline("cascade").edges},
    )
    rows = [line.split() for line in plan(placed, load_pipeline("cascade"), {})]
    shown = {row[0]: (row[3], row[5]) for row in rows if row and row[0] in placed.stages}
    assert shown == {"asr": ("-", "-"), "llm": ("float32", "16"), "tts": ("-", "-")}


def test_check_says_what_will_not_fit(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    checkpoint(tmp_path / "model", source_a=("F32", [1 << 20, 1 << 20]))
    assert outcome(["check", "good.toml", "--set", "model.path=model", "--set", "stages.source.replicas=2"]) == 2
    said = capfd.readouterr()
    assert said.err.startswith("omni-bus: will not fit: the weights on cpu take 8192.0 GiB, and it has ")
    assert "source.1" in said.out


def test_the_version() -> None:
    answer = subprocess.run([sys.executable, "-m", "omni_bus", "--version"], capture_output=True, text=True, check=True)
    assert answer.stdout == f"omni-bus {__version__}\n"


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"{sys.executable} -m omni_bus check good.toml | head -c 1; exit ${{PIPESTATUS[0]}}"
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stderr, answer.stdout) == (0, "", "m")


def test_the_command_line_imports_neither_torch_nor_aiohttp() -> None:
    script = "import sys, omni_bus.cli; print([name for name in ('torch', 'aiohttp', 'numpy', 'transformers') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_fixture_tells_its_progress_without_a_terminal_too(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from omni_bus.stages.qwen3_omni import fixture

    def write(directory: pathlib.Path, *, progress: Callable[[float, str], None], **said: object) -> None:
        for shard in range(24):
            progress(shard / 24, f"writing shard {shard}")
        progress(1.0, "wrote all")

    monkeypatch.setattr(fixture, "write", write)
    assert outcome(["fixture", "qwen3-omni", "out", "--size", "full"]) == 0
    said = capfd.readouterr()
    lines = said.err.splitlines()
    assert [line.split("%")[0].rsplit(None, 1)[-1] for line in lines] == [
        "0",
        "12",
        "21",
        "33",
        "42",
        "50",
        "62",
        "71",
        "83",
        "92",
        "100",
    ]
    assert lines[0] == "omni-bus:   0%  writing shard 0" and lines[-1] == "omni-bus: 100%  wrote all"
    assert "\x1b" not in said.err and said.out.startswith("omni-bus: wrote out; serve it with:")


@pytest.mark.parametrize("command", ["status", "top", "chat", "bench"])
def test_commands_that_ask_a_server_say_where_its_key_goes(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert outcome([command, "--help"]) == 0
    assert "OMNI_BUS_API_KEY" in capfd.readouterr().out


@pytest.mark.parametrize("ignored", [False, True])
def test_an_interrupt_while_it_imports_leaves_no_traceback(ignored: bool) -> None:
    """In the middle of the commands' imports. A shell's background job ignores Ctrl-C, and goes on."""
    script = """
        import os, runpy, signal, sys
        class Interrupting:
            def find_spec(self, name, path=None, target=None):
                if name == "omni_bus.commands":
                    os.kill(os.getpid(), signal.SIGINT)
        sys.meta_path.insert(0, Interrupting())
        sys.argv = ["omni-bus", "--version"]
        runpy.run_module("omni_bus", run_name="__main__")
    """
    ignore = (lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) if ignored else None
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, preexec_fn=ignore
    )
    assert done.stderr == ""
    assert (done.returncode, bool(done.stdout)) == ((0, True) if ignored else (-signal.SIGINT, False))
