"""The arguments that every client script takes, and the one function that an answer may call."""

from __future__ import annotations

import argparse
import json
import pathlib

MINIMUM_PLAYED_S = 0.6  # of an answer, before a user speaks into it

WEATHER = {"name": "get_weather", "description": "Tells the weather in a city."}
CITY = {"type": "string", "description": "The city's name."}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("url", help="http://host:port of the server")
    parser.add_argument("scenario", choices=("turn", "tool", "barge"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--voice", required=True)
    parser.add_argument("--instructions", default="")
    parser.add_argument(
        "--say", action="append", default=[], help="WAV file (PCM16, 24 kHz) that the user says; `barge` takes two"
    )
    parser.add_argument("--typed", help="what the user types instead")
    parser.add_argument("--history", type=json.loads, default=[], help="JSON: items that are put into the conversation first")
    parser.add_argument("--weather", default="It is sunny and 21 degrees.", help="what the function answers")
    parser.add_argument("--max-tokens", type=int, default=60)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="directory for what was heard")
    return parser.parse_args()
