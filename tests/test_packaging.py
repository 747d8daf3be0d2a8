"""The wheel holds every module of the five code folders, and the folders are one package in a checkout too."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ("omni_bus", "stages", "workers", "connectors", "api")
LINKS = FOLDERS[1:]


def sources() -> set[str]:
    """Every file that belongs in the wheel, by its name there."""
    return {
        (path if folder == "omni_bus" else pathlib.PurePath("omni_bus") / path).as_posix()
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("*")
        for path in [file.relative_to(ROOT)]
        if file.is_file() and file.parts[len(ROOT.parts) + 1] not in LINKS and "__pycache__" not in file.parts
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Built from a copy, so that nothing an earlier build left behind gets in."""
    copy = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(out), str(copy)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (file,) = out.glob("omni_bus-*.whl")
    return file


def test_links_are_relative() -> None:
    for name in LINKS:
        link = ROOT / "omni_bus" / name
        assert link.is_symlink() and os.readlink(link) == f"../{name}", f"{link} must be a relative link to ../{name}"


def test_every_module_is_in_the_wheel(wheel: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    wanted = sources()
    assert {"omni_bus/py.typed", "omni_bus/stages/cascade/spec.py", "omni_bus/api/__main__.py"} <= wanted
    assert sorted(wanted - names) == []


def test_the_wheel_claims_no_other_name_and_brings_the_command(wheel: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (entry_points,) = [name for name in names if name.endswith("/entry_points.txt")]
        assert "omni-bus = omni_bus.__main__:run" in archive.read(entry_points).decode()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"omni_bus"}


def test_an_installed_wheel_imports_from_any_folder(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = "import omni_bus.stages.cascade.spec as s, omni_bus.cli; from omni_bus.spec import pipeline_names; print(s.__file__, *pipeline_names())"
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    file, *names = done.stdout.split()
    assert pathlib.Path(file).is_relative_to(site) and {"cascade", "probe", "qwen3_omni"} <= set(names)
