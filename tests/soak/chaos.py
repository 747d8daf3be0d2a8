"""`make soak`: random processes of a server are killed, stopped, cut off and made to fail under 16 streams, and at the end all is as before.

    python -m tests.soak.chaos --pipeline qwen3-omni-tiny --minutes 8 --seed 1

Every request must end exactly once, whole or with an error that a fault explains. Between rounds of faults everybody must be served
again. Operators' commands run beside every other round. The same seed draws the same faults.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pathlib
import random
import sys
import tempfile
import time

from omni_bus.keys import new_certificates
from tests.soak import record
from tests.soak.crew import APIS, BACK_S, Crew, until
from tests.soak.far_worker import FarWorker
from tests.soak.held import Held
from tests.soak.judge import Watch, gaps_ms, note_service, unexplained
from tests.soak.operators import Operators
from tests.soak.speakers import PLACES, Speakers
from tests.soak.strikes import INSIDE, Strikes, trim
from tests.soak.subjects import SUBJECTS, Subject
from tests.support.running_server import SHM, Server, free_port, running
from tests.support.steady_load import SteadyLoad

LOST_AFTER_S = 3.0
HANGS_AFTER_S = 8.0  # a step
FAULTS = 8  # of a round
LONG = 5  # minutes of a soak that has time to replace every worker in order
QUIET = 3  # answers of each place before the first fault
SETS = (
    "bus.heartbeat_s=0.5",
    f"bus.lost_after_s={LOST_AFTER_S}",
    f"bus.step_s={HANGS_AFTER_S}",
    "bus.restart_backoff_s=0.1",
    "bus.drain_s=30",
    f"bus.max_requests={PLACES - 2}",  # some wait, and those of priority batch longer
    f"api.processes={APIS}",
)


async def rest(crew: Crew, what: str) -> Held:
    """What all hold once they are idle."""
    await until(lambda: crew.whole() and crew.idle(), what)
    await asyncio.sleep(LOST_AFTER_S)  # a heartbeat, with which workers let go of segments whose owners are gone
    trim(process for name, process in crew.processes().items() if name not in ("supervisor", "far command"))
    await asyncio.sleep(1.0)
    return await asyncio.to_thread(Held.of, crew)


async def soak(server: Server, subject: Subject, far: FarWorker, minutes: float, seed: int, pipeline: str) -> record.Run:
    crew = Crew(server, far, subject.stages)
    # Draws of their own: whether a command was drawn must not depend on how many faults there was time for.
    strikes, operators = Strikes(crew, random.Random(seed)), Operators(crew, random.Random(f"operators {seed}"))
    await until(crew.whole, "the worker from elsewhere is ready")
    async with subject.load(server.url) as quiet:  # what a server has after its first load is what it keeps
        for _ in range(QUIET):
            await quiet.serves(BACK_S)
    before = await rest(crew, "it is idle before the first fault")
    rounds, round_s, end = 0, [], time.monotonic() + 60 * minutes
    async with subject.load(server.url) as load, Watch(crew, strikes.faults):
        while time.monotonic() < end:
            await load.all_run()
            operating = asyncio.create_task(operators.beside()) if rounds % 2 else None
            for _ in range(FAULTS):
                await asyncio.sleep(strikes.pause_s())
                await strikes.strike()
            if operating is not None:
                await operating
            await strikes.over()
            await until(crew.settled, "all processes are back")
            await operators.as_wanted()
            await until(crew.whole, "all have their replicas")
            round_s.append(await load.serves(BACK_S))
            rounds += 1
            print(f"round {rounds}: all served again {round_s[-1]:.1f} s after all were back", flush=True)
            if rounds == 1:
                calm = time.monotonic()
                await calm_restart(crew, operators, load, "" if minutes >= LONG else operators.some_stage())
                end += time.monotonic() - calm if minutes >= LONG else 0.0  # minutes of faults
    after = await rest(crew, "it is idle after the last fault")
    note_service(strikes.faults, load.streams, PLACES)
    return record.Run(
        pipeline=pipeline,
        seed=seed,
        minutes=minutes,
        far_stage=far.stage,
        rounds=rounds,
        faults=strikes.faults,
        commands=operators.commands,
        brought=far.brought,
        ends=load.ends(),
        round_s=round_s,
        gaps_before=gaps_ms(quiet.heard) if isinstance(quiet, Speakers) else (),
        gaps=gaps_ms(load.heard) if isinstance(load, Speakers) else (),
        before=before,
        after=after,
        wrong=unexplained(load, strikes.faults) + after.left_over(before) + far.wrongs(),
    )


async def calm_restart(crew: Crew, operators: Operators, load: SteadyLoad, stage: str) -> None:
    """A rolling restart of a stage, "" of all, without faults beside it: no request may end with an error."""
    began = time.monotonic()
    await operators.restart(stage)
    await until(crew.whole, "all workers are new")
    await load.serves(BACK_S)
    hurt = [stream for stream in load.streams if stream.began > began and stream.end not in ("", "done")]
    assert not hurt, f"a rolling restart without a fault: {hurt}"


async def main_loop(server: Server, subject: Subject, base: pathlib.Path, broker: str, said: argparse.Namespace) -> record.Run:
    stage = random.Random(f"far {said.seed}").choice(subject.stages)
    print(f"{stage} is brought from elsewhere, too", flush=True)
    async with FarWorker(base, broker, stage) as far:
        return await soak(server, subject, far, said.minutes, said.seed, said.pipeline)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.chaos", description=__doc__)
    parser.add_argument("--pipeline", choices=sorted(SUBJECTS), default="qwen3-omni-tiny")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=pathlib.Path, help="directory for the record of this run")
    said = parser.parse_args()
    print(f"{said.minutes:g} minutes of faults on {said.pipeline}, seed {said.seed}", flush=True)
    if not SHM.is_dir() or not pathlib.Path("/proc/self/fd").is_dir():
        print("the soak needs Linux, with /proc and /dev/shm", file=sys.stderr)
        return 2
    os.environ["PYTHONPATH"] = str(INSIDE)  # of all that is started from here
    with tempfile.TemporaryDirectory(prefix="ob-") as directory, SUBJECTS[said.pipeline]() as subject:
        base, broker = pathlib.Path(directory), f"tcp://127.0.0.1:{free_port()}"
        new_certificates(base / "keys", "worker")
        door = (f"bus.listen={broker}", f"bus.keys={base / 'keys'}")
        with running(subject.config, sets=(*subject.sets, *SETS, *door)) as server:
            run = asyncio.run(main_loop(server, subject, base, broker, said))
            stderr = server.stderr
    errors = [line for line in stderr.splitlines() if "internal error" in line or "Traceback" in line]
    fields = {**run.fields(), "wrong": [*run.wrong, *(f"the supervisor said: {line}" for line in errors)]}
    print("\n".join(record.table(fields)))
    if said.out is not None:
        record.write(said.out, fields)
    return 1 if fields["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
