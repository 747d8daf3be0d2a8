"""docs/failures.md: each row is held by a test that exists, and each code and key in it is one of ours."""

from __future__ import annotations

import pathlib
import re

from omni_bus import errors
from omni_bus.deployment import ApiConfig, BusConfig

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "failures.md").read_text()
TESTS = "".join(
    (ROOT / "tests" / "e2e" / name).read_text()
    for name in ("test_failures.py", "test_failures_own_code.py", "test_up_lifecycle.py")
)


def test_every_row_names_a_test_that_exists() -> None:
    named = set(re.findall(r"`(test_\w+?)_…`", PAGE))
    assert len(named) >= 8
    for name in named:
        assert re.search(rf"^(async )?def {name}", TESTS, re.M), name
    for path in re.findall(r"`(tests/[\w/]+\.py)`", PAGE):
        assert (ROOT / path).exists(), path
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and line.count("|") == 7 and "---" not in line]
    assert len(rows) >= 18
    for row in rows:
        last = row.rstrip("| ").rpartition("|")[2]
        assert "test" in last, f"no test holds: {row}"


def test_its_codes_and_keys_are_ours() -> None:
    codes = {each.code: each.status for each in vars(errors).values() if hasattr(each, "code") and hasattr(each, "status")}
    said = re.findall(r"`([a-z_]+)` \((\d{3})\)", PAGE)
    assert len(said) >= 6
    for code, status in said:
        assert codes.get(code) == int(status), code
    keys = {f"bus.{key}" for key in BusConfig.__struct_fields__} | {f"api.{key}" for key in ApiConfig.__struct_fields__}
    assert set(re.findall(r"`((?:bus|api)\.[a-z_]+)", PAGE)) <= keys
