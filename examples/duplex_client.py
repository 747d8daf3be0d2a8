"""Says a WAV file (16 bit, mono, 8, 16 or 24 kHz) to a server through /v1/duplex, and saves the answer: see docs/duplex.md."""

import argparse
import asyncio
import itertools
import json
import wave

import aiohttp

HELLO, AUDIO, TEXT, CONTROL, EVENT = range(5)  # the first byte of a message
RATE = 24_000  # of the answer


async def speak(socket: aiohttp.ClientWebSocketResponse, pcm: bytes, rate: int) -> None:
    """As a microphone would: a piece every 0.1 s, silence behind the question."""
    size = rate // 10 * 2
    for start in itertools.count(0, size):
        await socket.send_bytes(bytes([AUDIO]) + pcm[start : start + size].ljust(size, b"\0"))
        await asyncio.sleep(0.1)


async def listen(socket: aiohttp.ClientWebSocketResponse) -> bytes:
    """The audio of the first answer that is given to its end."""
    heard: dict[int, bytes] = {}
    async for message in socket:
        kind, body = message.data[0], message.data[1:]
        heard[kind] = heard.get(kind, b"") + body
        event = json.loads(body) if kind == EVENT else {"type": ""}
        if event["type"] == "transcript":
            print("you:", event["text"])
        elif event["type"] == "interrupted":
            heard.clear()
        elif event["type"] == "error":
            raise SystemExit(event["message"])
        elif event["type"] == "answer_done" and event["status"] != "cancelled":
            print("answer:", heard[TEXT].decode())
            return heard[AUDIO]
    raise SystemExit(f"the server closed the connection: {socket.close_code}")


async def main(question: str, answer: str, url: str) -> None:
    with wave.open(question) as file:
        pcm, rate = file.readframes(file.getnframes()), file.getframerate()
    async with aiohttp.ClientSession() as http, http.ws_connect(f"{url}/v1/duplex") as socket:
        hello = {"version": 1, "input_rate": rate, "output_rate": RATE, "transcripts": True}
        await socket.send_bytes(bytes([HELLO]) + json.dumps(hello).encode())
        speaking = asyncio.create_task(speak(socket, pcm, rate))
        heard = await listen(socket)
        speaking.cancel()
    with wave.open(answer, "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(heard)


parser = argparse.ArgumentParser()
parser.add_argument("question")
parser.add_argument("answer")
parser.add_argument("--url", default="http://127.0.0.1:8091")
asyncio.run(main(**vars(parser.parse_args())))
