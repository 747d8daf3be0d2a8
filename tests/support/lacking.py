"""What a test does where something that it needs is not installed: by hand it is skipped, under `make test` and in CI it fails."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def lacking(reason: str) -> NoReturn:
    """reason: what is missing, and what installs it. `make` installs all of it first, so that a test skipped under it would be a test lost."""
    if "MAKELEVEL" in os.environ or os.environ.get("CI") == "true":
        pytest.fail(f"make test and CI run every test, and this one lacks something: {reason}", pytrace=False)
    pytest.skip(reason)
