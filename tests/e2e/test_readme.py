"""README's program for an OpenAI client, as it stands there, run against a server."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest

from tests.e2e.test_api_probe import FAULTS, SAMPLES_PER_WORD

README = pathlib.Path(__file__).parents[2] / "README.md"


def test_the_program_prints_the_answer_and_has_its_sound(shared_server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server = shared_server("probe.toml", sets=FAULTS)
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert program.count("http://127.0.0.1:8091") == 1
    names: dict[str, Any] = {}
    try:
        exec(program.replace("http://127.0.0.1:8091", server.url), names)
    finally:
        if "client" in names:
            names["client"].close()
    assert capsys.readouterr().out == "Hello! "
    assert len(names["sound"]) == SAMPLES_PER_WORD * 2
