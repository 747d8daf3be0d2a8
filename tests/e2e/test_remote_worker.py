"""Workers that attach over TCP, on loopback: whole servers and commands, their ends, and what a user is told who does it wrong."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pathlib
import re
import signal
import tempfile
import urllib.error
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from omni_bus.cli import main
from tests.support.chat_http import messages, stream
from tests.support.qwen3_omni import CASES
from tests.support.remote_worker import bringing, write_config
from tests.support.running_server import PATIENCE_S, Server, eventually, free_port, running, started
from tests.support.tcp_wire import Wire

WORDS = "!repeat:40"
SPOKEN = "".join(f"{number} " for number in range(40))


@dataclasses.dataclass(frozen=True, slots=True)
class Door:
    """A server without a relay of its own: `base` holds the keys with which one is brought to `broker`."""

    server: Server
    base: pathlib.Path
    broker: str


@pytest.fixture
def base() -> Iterator[pathlib.Path]:
    """Short: sockets lie below it."""
    with tempfile.TemporaryDirectory(prefix="ob-") as directory:
        yield pathlib.Path(directory)


def broker_of(config: pathlib.Path) -> str:
    return next(line for line in config.read_text().splitlines() if line.startswith("listen")).split('"')[1]


def new_config(base: pathlib.Path, *, relays: int = 0) -> pathlib.Path:
    return write_config(base, f"tcp://127.0.0.1:{free_port()}", relays=relays)


def replicas(server: Server, stage: str = "relay") -> list[dict[str, object]]:
    [found] = [entry for entry in server.get("/v1/status")["stages"] if entry["name"] == stage]
    return list(found["replicas"])


@pytest.fixture(scope="module")
def module_door() -> Iterator[Door]:
    with tempfile.TemporaryDirectory(prefix="ob-") as directory:
        base = pathlib.Path(directory)
        config = new_config(base)
        with started(config) as server:
            with bringing(base, broker_of(config)) as worker:
                server.wait_ready(120)
                assert worker.stop() == 0
            yield Door(server, base, broker_of(config))
            server.stop()


@pytest.fixture
def door(module_door: Door) -> Door:
    """The same for every test, which brings its own relays."""
    eventually(lambda: not replicas(module_door.server), 60, "nothing is left of the test before")
    return module_door


def speaks(server: Server) -> None:
    eventually(server.ready, 60, "the server is ready")
    assert server.answer(WORDS, audio=True) == SPOKEN


def test_a_stage_on_another_host_sounds_as_one_here(base: pathlib.Path) -> None:
    config = new_config(base)
    with started(config) as server:
        with bringing(base, broker_of(config), "--replicas", "2") as worker:
            server.wait_ready(120)
            worker.wait_said("is ready", times=2)
            far = server.chat(WORDS, audio=True)["choices"][0]["message"]
            assert far["content"] == SPOKEN
            loads = [replica["load"]["chunks"] for replica in replicas(server, "source")]
            eventually(
                lambda: replicas(server, "source")[0]["load"]["chunks"].get("source->relay|tcp", 0) >= 40,  # type: ignore[index]
                20,
                f"the tensors took the data sockets: {loads}",
            )
            assert all("@" in str(replica["worker"]) for replica in replicas(server))
            assert worker.stop() == 0
            eventually(lambda: not replicas(server), 20, "the workers are gone")
        server.stop()
    with running(config, sets=["stages.relay.replicas=1"]) as near:
        assert near.chat(WORDS, audio=True)["choices"][0]["message"]["audio"]["data"] == far["audio"]["data"]


def test_a_model_divided_over_two_hosts_says_what_it_says_on_one(base: pathlib.Path, omni_checkpoint: pathlib.Path) -> None:
    """Qwen3-Omni: processor and Thinker here, Talker and Code2Wav in one process elsewhere."""
    broker = broker_of(new_config(base))
    sets = [f"model.path={omni_checkpoint}", "model.name=omni", "stages.code2wav.dtype=float64"]
    door = [f"bus.listen={broker}", f"bus.keys={base / 'keys'}", "stages.talker.replicas=0", "stages.code2wav.replicas=0"]
    greedy = {"temperature": 0.0, "max_tokens": 12}

    def answers(server: Server) -> list[tuple[str, bytes]]:
        found = []
        for case in CASES.values():
            sampling = {"thinker": greedy, "talker": greedy}
            wanted = {"modalities": ["text", "audio"], "audio": {"voice": "ethan", "format": "pcm16"}, "sampling": sampling}
            answer = stream(server.url, {"model": "omni", "messages": messages(case), **wanted})
            assert not answer.errors and len(answer.pcm)
            found.append((answer.text, answer.pcm.tobytes()))
        return found

    with started("qwen3_omni_tiny.toml", sets=[*sets, *door]) as server:
        # Where the checkpoint lies there is this host's own affair.
        there = base / "elsewhere"
        there.symlink_to(omni_checkpoint)
        more = ("--stage", "code2wav", "--model-path", str(there))
        with bringing(base, broker, *more, stage="talker") as worker:
            server.wait_ready(120)
            divided = answers(server)
            assert worker.stop() == 0
        server.stop()
    with running("qwen3_omni_tiny.toml", sets=sets) as server:
        assert answers(server) == divided


def test_ctrl_c_lets_a_running_answer_finish_and_a_second_one_does_not(door: Door) -> None:
    server = door.server
    with ThreadPoolExecutor(1) as thread:
        slow = "!sleep:relay:300 " * 10 + "end"
        with bringing(door.base, door.broker) as worker:
            eventually(server.ready, 120, "the server is ready")
            answer = thread.submit(server.chat, slow, audio=True)
            eventually(lambda: any(replica["requests"] for replica in replicas(server)), 20, "the answer has begun")
            assert worker.stop() == 0
            assert answer.result(PATIENCE_S)["choices"][0]["message"]["content"].endswith("end ")
        with bringing(door.base, door.broker) as worker:
            worker.wait_said("is ready")
            answer = thread.submit(server.chat, "!hang:relay", audio=True)
            eventually(lambda: any(replica["requests"] for replica in replicas(server)), 20, "the answer has begun")
            worker.process.send_signal(signal.SIGINT)
            worker.wait_said("a second Ctrl-C leaves at once")
            assert worker.process.poll() is None
            assert worker.stop() == 0
            with pytest.raises(urllib.error.HTTPError):
                answer.result(60)


def test_an_operator_drains_one_of_another_host_and_it_stays_away(
    door: Door, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = door.server
    with ThreadPoolExecutor(1) as thread, bringing(door.base, door.broker, "--replicas", "2") as worker:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(server.run_base))
        monkeypatch.setenv("OMNI_BUS_URL", server.url)
        worker.wait_said("is ready", times=2)
        eventually(lambda: {replica["state"] for replica in replicas(server)} == {"ready"}, 60, "both serve")
        first, second = sorted(str(replica["worker"]) for replica in replicas(server))

        answer = thread.submit(server.chat, "!sleep:relay:300 " * 10 + "end", audio=True)
        serving: list[str] = []

        def begun() -> bool:
            serving[:] = [str(replica["worker"]) for replica in replicas(server) if replica["requests"]]
            return serving != []

        eventually(begun, 60, "the answer has begun")
        [busy] = serving
        assert main(["drain", busy]) == 0
        assert answer.result(60)["choices"][0]["message"]["content"].endswith("end ")
        assert capsys.readouterr().out.splitlines() == [f"{busy} is drained", f"{busy} has left"]
        worker.wait_said(f"{busy} was drained by the server's operator and has left")
        [left] = {first, second} - {busy}
        eventually(lambda: len(worker.workers()) == 1, 60, "its process has ended")
        assert [replica["worker"] for replica in replicas(server)] == [left]

        assert main(["drain", left]) == 2
        assert "is the only ready replica of stage relay; start another first" in capsys.readouterr().err
        assert main(["drain", f"{left[:-1]}7"]) == 2
        assert f'there is no worker "{left[:-1]}7" (did you mean "{left}"?)' in capsys.readouterr().err

        with bringing(door.base, door.broker) as another:
            another.wait_said("is ready")
            eventually(lambda: [r["state"] for r in replicas(server)] == ["ready"] * 2, 60, "another serves")
            assert main(["drain", left]) == 0
            assert worker.process.wait(PATIENCE_S) == 0, "the command has nothing left to bring"
            speaks(server)
            assert another.stop() == 0


def test_a_worker_that_is_killed_costs_its_own_requests_and_is_started_again(door: Door) -> None:
    server = door.server
    with ThreadPoolExecutor(1) as thread, bringing(door.base, door.broker) as worker:
        eventually(server.ready, 120, "the server is ready")
        answer = thread.submit(server.chat, "word !hang:relay", audio=True, stream=False)
        eventually(lambda: any(replica["requests"] for replica in replicas(server)), 20, "the answer has begun")
        [process] = worker.workers()
        process.kill()
        with pytest.raises(urllib.error.HTTPError) as refused:
            answer.result(60)
        assert json.loads(refused.value.read())["error"]["code"] in ("replica_lost", "no_ready_replica")
        worker.wait_said("is ready", times=2)
        assert "SIGKILL" in worker.said
        speaks(server)
        assert worker.stop() == 0


def test_a_worker_that_is_stopped_is_ended_by_force_and_started_again(door: Door) -> None:
    server = door.server
    with bringing(door.base, door.broker) as worker:
        worker.wait_said("is ready")
        speaks(server)
        [process] = worker.workers()
        process.send_signal(signal.SIGSTOP)

        def another_serves() -> bool:
            return [(found["state"], found["pid"] != process.pid) for found in replicas(server)] == [("ready", True)]

        eventually(another_serves, 60, "another process serves")
        assert not process.is_running()
        assert re.search(r"relay@\S+\.0 does not answer; ending it by force\n", worker.said), worker.said
        speaks(server)
        assert worker.stop() == 0


@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGSTOP])
def test_the_command_itself_killed_takes_its_workers_along_and_stopped_is_missed_by_nobody(
    door: Door, way: signal.Signals
) -> None:
    server = door.server
    with ThreadPoolExecutor(1) as thread, bringing(door.base, door.broker) as worker:
        eventually(server.ready, 120, "the server is ready")
        answer = thread.submit(server.chat, "word !sleep:relay:2000 word", audio=True, stream=False)
        eventually(lambda: any(replica["requests"] for replica in replicas(server)), 20, "the answer has begun")
        [process] = worker.workers()
        worker.process.send_signal(way)
        if way == signal.SIGSTOP:
            assert answer.result(PATIENCE_S)
            speaks(server)
            worker.process.send_signal(signal.SIGCONT)
            assert worker.stop() == 0
            return
        with pytest.raises(urllib.error.HTTPError) as refused:
            answer.result(PATIENCE_S)
        assert json.loads(refused.value.read())["error"]["code"] in ("replica_lost", "no_ready_replica")
        process.wait(PATIENCE_S)
        eventually(lambda: not replicas(server), 60, "the server has forgotten them")
        with bringing(door.base, door.broker) as another:
            speaks(server)
            assert another.stop() == 0


def test_workers_come_back_to_a_broker_that_died_and_to_another_server(base: pathlib.Path) -> None:
    config = new_config(base)
    with started(config) as server, bringing(base, broker_of(config)) as worker:
        server.wait_ready(120)
        speaks(server)
        broker = server.processes()["broker"]
        broker.kill()
        eventually(lambda: server.processes().get("broker", broker).pid != broker.pid, 20, "there is another")
        speaks(server)
        server.stop()
        with running(config) as another:
            speaks(another)
            assert worker.stop() == 0
            eventually(lambda: not replicas(another), 20, "the worker is gone")


def test_a_cut_wire_ends_its_requests_by_name_and_a_healed_one_serves(door: Door) -> None:
    server = door.server
    with ThreadPoolExecutor(1) as thread:

        async def through_a_wire() -> None:
            loop = asyncio.get_running_loop()
            async with Wire(int(door.broker.rsplit(":", 1)[1])) as line:
                port = str(free_port())
                with bringing(door.base, f"tcp://127.0.0.1:{line.port}", "--data-port", port) as worker:
                    await asyncio.to_thread(eventually, server.ready, 120, "the server is ready")
                    answer = loop.run_in_executor(thread, lambda: server.chat("word !hang:relay", audio=True))
                    await asyncio.to_thread(
                        eventually, lambda: any(r["requests"] for r in replicas(server)), 20, "the answer has begun"
                    )
                    line.cut()
                    with pytest.raises(urllib.error.HTTPError) as refused:
                        await answer
                    assert json.loads(refused.value.read())["error"]["code"] in ("replica_lost", "no_ready_replica")
                    await asyncio.to_thread(eventually, lambda: not replicas(server), 20, "the worker is given up")
                    line.heal()
                    await asyncio.to_thread(speaks, server)
                    assert worker.said.count("is ready") == 1, "it was loaded again"
                    assert await asyncio.to_thread(worker.stop) == 0

        asyncio.run(asyncio.wait_for(through_a_wire(), 240))


def listened_on(processes: Iterable[psutil.Process]) -> set[int]:
    """TCP ports."""
    found = (connection for process in processes for connection in process.net_connections("tcp"))
    return {connection.laddr.port for connection in found if connection.status == psutil.CONN_LISTEN}


def test_only_the_ports_that_the_configuration_names_are_open(base: pathlib.Path) -> None:
    config = new_config(base, relays=1)
    door = int(broker_of(config).rsplit(":", 1)[1])
    with running(config) as server:
        here = listened_on(server.processes().values())
        with bringing(base, broker_of(config), "--data-port", str(door + 1)) as worker:
            worker.wait_said("is ready")
            there = listened_on(worker.workers())
            assert worker.stop() == 0
    assert {server.port, door} < here and len(here) == 2 + 3  # a data socket for each of the three workers
    assert here | there <= {server.port, *range(door, door + 101)} and len(there) == 1
    with running("probe.toml") as server:
        assert listened_on(server.processes().values()) == {server.port}


def test_the_check_says_what_is_left_to_other_hosts(base: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(new_config(base))]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^relay +- +on other hosts$", said, re.MULTILINE)
    assert re.search(r"^source->relay +inline up to 64 KiB, else shm, or tcp between hosts ", said, re.MULTILINE)


def test_what_a_user_does_wrong_is_told_in_one_line(base: pathlib.Path) -> None:
    config = new_config(base, relays=1)
    broker = broker_of(config)
    other = base / "other"
    other.mkdir()
    write_config(other, broker)
    stranger = base / "keys" / "stranger.key_secret"
    (other / "keys" / "worker.key_secret").rename(stranger)
    ours = (base / "keys" / "server.key").read_text().split('public-key = "')[1][:40]
    theirs = (other / "keys" / "server.key").read_text().split('public-key = "')[1][:40]
    unknown = base / "unknown.key_secret"
    unknown.write_text(stranger.read_text().replace(theirs, ours))
    unknown.chmod(0o600)
    with running(config) as server:
        wrong = {
            "does not know this key": {"key": unknown},
            "does not answer in CURVE with the key that this file says": {"key": stranger},
            'has no stage "rely" (did you mean "relay"?)': {"stage": "rely"},
            'the broker has pipeline probe and the worker pipeline "cascade"': {"more": ("--pipeline", "cascade")},
            "--device: stage relay runs on the CPU only": {"more": ("--device", "cuda:0")},
        }
        for says, how in wrong.items():
            more = how.pop("more", ())
            with bringing(base, broker, *more, **how) as worker:  # type: ignore[arg-type, misc]
                assert worker.process.wait(PATIENCE_S) == 2
                assert says in worker.said and len(worker.said.splitlines()) == 1, worker.said
        with bringing(base, f"tcp://127.0.0.1:{free_port()}") as worker:
            assert worker.process.wait(PATIENCE_S) == 2
            assert "nothing answers at tcp://127.0.0.1" in worker.said
        speaks(server)
        assert "refused a connection from 127.0.0.1" in (server.run_dir / "broker.log").read_text()
