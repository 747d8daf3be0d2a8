"""A test whose needs are not installed is skipped by hand only: `make test` and CI must not lose it without a word."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
NEEDY = """
from tests.support.lacking import lacking

def test_needy():
    lacking("no such package: make setup-test installs it")
"""


def outcome(directory: pathlib.Path, environment: Mapping[str, str]) -> tuple[int, str]:
    """Exit code and summary of a pytest that runs a test which lacks something."""
    (directory / "test_needy.py").write_text(NEEDY)
    clean = {name: value for name, value in os.environ.items() if name not in ("CI", "MAKELEVEL")}
    clean["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "pytest", "-qra", "-p", "no:cacheprovider", "test_needy.py"]
    done = subprocess.run(
        command, env={**clean, **environment}, cwd=directory, capture_output=True, text=True, timeout=240, check=False
    )
    return done.returncode, done.stdout


def test_by_hand_it_is_skipped_with_its_reason(tmp_path: pathlib.Path) -> None:
    code, said = outcome(tmp_path, {})
    assert code == 0 and "1 skipped" in said and "no such package: make setup-test installs it" in said


@pytest.mark.parametrize("environment", [{"CI": "true"}, {"MAKELEVEL": "1"}], ids=lambda said: next(iter(said)))
def test_in_ci_and_under_make_it_fails_with_its_reason(tmp_path: pathlib.Path, environment: Mapping[str, str]) -> None:
    code, said = outcome(tmp_path, environment)
    assert code == 1 and "1 failed" in said and "no such package: make setup-test installs it" in said
