"""Two Thinkers, two Realtime conversations: each conversation's turns meet the replica that has their KV blocks."""

from __future__ import annotations

import pathlib
from typing import Any

from bench.realtime_socket import connected
from tests.support.running_server import Server, eventually, running

TURNS = 3
PATIENCE_S = 120.0


def cached(server: Server) -> dict[str, tuple[int, int]]:
    """Thinker → prompt positions that it computed, and those it had already."""
    [thinker] = [stage for stage in server.get("/v1/status")["stages"] if stage["name"] == "thinker"]
    loads = {replica["worker"]: replica["load"] or {} for replica in thinker["replicas"]}
    return {name: (load.get("prompt_computed", 0), load.get("prompt_cached", 0)) for name, load in loads.items()}


async def turn(socket: Any, text: str) -> int:
    """Prompt tokens of the answer whose KV was there already."""
    since = socket.count
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
    await socket.send("conversation.item.create", item=item)
    await socket.send("response.create")
    done = await socket.until("response.done", since=since, limit=PATIENCE_S)
    assert done["response"]["status"] in ("completed", "incomplete"), done
    return int(done["response"]["usage"]["input_token_details"]["cached_tokens"])


async def test_a_conversation_returns_to_the_replica_that_knows_it(omni_checkpoint: pathlib.Path) -> None:
    groups = {"processor": "rest", "talker": "rest", "code2wav": "rest"}
    sets = [f"model.path={omni_checkpoint}", "stages.thinker.replicas=2", "bus.heartbeat_s=0.5"]
    sets += [f"stages.{stage}.process={group}" for stage, group in groups.items()]
    sets += [f"stages.{stage}.threads=1" for stage in ("processor", "thinker", "talker", "code2wav")]
    session = {
        "type": "realtime",
        "output_modalities": ["text"],
        "max_output_tokens": 6,
        "audio": {"input": {"turn_detection": None}},
    }
    with running("qwen3_omni_tiny.toml", sets=sets, ready_s=240) as server:
        async with connected(server.url, "qwen3-omni-tiny") as one, connected(server.url, "qwen3-omni-tiny") as other:
            kept: dict[str, list[int]] = {"one": [], "other": []}
            for socket in (one, other):
                await socket.send("session.update", session=session)
                await socket.until("session.updated", limit=PATIENCE_S)
            for number in range(TURNS):
                # Different from the first word on, so that neither finds what the other has left.
                kept["one"].append(await turn(one, f"Apples and pears, said the farmer for the {number}th time, and sighed."))
                kept["other"].append(await turn(other, f"Which ships sail to Norway on day {number}, and who is the captain?"))
        assert all(tokens > 0 for tokens in (*kept["one"][1:], *kept["other"][1:])), kept
        for tokens in kept.values():
            assert tokens == sorted(tokens), "each turn finds all of the one before"
        expected = sum(map(sum, kept.values()))
        eventually(lambda: sum(had for _, had in cached(server).values()) == expected, 30, "both have told")
        assert sorted(had for _, had in cached(server).values()) == sorted(map(sum, kept.values())), "one conversation each"
