"""Workers that attach over TCP, on loopback: whole servers and commands, their ends, and what a user is told who does it wrong."""

from __future__ import annotations

import asyncio
import json
import pathlib
import signal
import tempfile
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.remote_worker import bringing, write_config
from tests.support.running_server import Server, eventually, free_port, running, started
from tests.support.tcp_wire import Wire

WORDS = "!repeat:40"
SPOKEN = "".join(f"{number} " for number in range(40))


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


def speaks(server: Server) -> None:
    eventually(server.ready, 60, "the server is ready")
    assert server.answer(WORDS, audio=True) == SPOKEN


def test_a_stage_on_another_host_sounds_as_one_here(base: pathlib.Path) -> None:
    config = new_config(base)
    with started(config) as server:
        with bringing(base, broker_of(config), "--replicas", "2") as worker:
            server.wait_ready(60)
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


def test_ctrl_c_lets_a_running_answer_finish_and_a_second_one_does_not(base: pathlib.Path) -> None:
    config = new_config(base)
    with started(config) as server, ThreadPoolExecutor(1) as thread:
        slow = "!sleep:relay:300 " * 10 + "end"
        with bringing(base, broker_of(config)) as worker:
            server.wait_ready(60)
            answer = thread.submit(server.chat, slow, audio=True)
            eventually(lambda: any(replica["requests"] for replica in replicas(server)), 20, "the answer has begun")
            assert worker.stop() == 0
            assert answer.result(30)["choices"][0]["message"]["content"].endswith("end ")
        with bringing(base, broker_of(config)) as worker:
            worker.wait_said("is ready")
            answer = thread.submit(server.chat, "!hang:relay", audio=True)
            eventually(lambda: any(replica["requests"] for replica in replicas(server)), 20, "the answer has begun")
            worker.process.send_signal(signal.SIGINT)
            worker.wait_said("a second Ctrl-C leaves at once")
            assert worker.process.poll() is None
            assert worker.stop() == 0
            with pytest.raises(urllib.error.HTTPError):
                answer.result(60)
        server.stop()


def test_a_worker_that_is_killed_costs_its_own_requests_and_is_started_again(base: pathlib.Path) -> None:
    config = new_config(base)
    with started(config) as server, ThreadPoolExecutor(1) as thread, bringing(base, broker_of(config)) as worker:
        server.wait_ready(60)
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
        server.stop()


def test_workers_come_back_to_a_broker_that_died_and_to_another_server(base: pathlib.Path) -> None:
    config = new_config(base)
    with started(config) as server, bringing(base, broker_of(config)) as worker:
        server.wait_ready(60)
        speaks(server)
        server.processes()["broker"].kill()
        eventually(lambda: not server.ready(), 20, "the server has noticed")
        speaks(server)
        server.stop()
        with running(config) as another:
            speaks(another)
            assert worker.stop() == 0
            eventually(lambda: not replicas(another), 20, "the worker is gone")


def test_a_cut_wire_ends_its_requests_by_name_and_a_healed_one_serves(base: pathlib.Path) -> None:
    config = new_config(base)
    with started(config) as server, ThreadPoolExecutor(1) as thread:

        async def through_a_wire() -> None:
            loop = asyncio.get_running_loop()
            async with Wire(int(broker_of(config).rsplit(":", 1)[1])) as line:
                port = str(free_port())
                with bringing(base, f"tcp://127.0.0.1:{line.port}", "--data-port", port) as worker:
                    await asyncio.to_thread(server.wait_ready, 60)
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
        server.stop()


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
                assert worker.process.wait(60) == 2
                assert says in worker.said and len(worker.said.splitlines()) == 1, worker.said
        with bringing(base, f"tcp://127.0.0.1:{free_port()}") as worker:
            assert worker.process.wait(60) == 2
            assert "nothing answers at tcp://127.0.0.1" in worker.said
        speaks(server)
        assert "refused a connection from 127.0.0.1" in (server.run_dir / "broker.log").read_text()
