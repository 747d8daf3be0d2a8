"""The API process starts light: nothing heavy is imported before the first request."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "transformers", "numpy", "PIL", "omni_bus.workers", "omni_bus.stages.contract")


def test_heavy_packages_stay_out() -> None:
    code = f"import sys, omni_bus.api.__main__; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
