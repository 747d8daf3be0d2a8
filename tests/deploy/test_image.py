"""The Dockerfile, as far as that can be told without building it: what it copies, installs and runs, and as whom."""

from __future__ import annotations

import json
import re
import tomllib

from tests.deploy.manifests import ROOT, of_kind, pod

DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()


def instructions(name: str) -> list[str]:
    joined = re.sub(r"\\\n\s*", " ", DOCKERFILE)
    return [line.removeprefix(f"{name} ") for line in joined.splitlines() if line.startswith(f"{name} ")]


def test_all_that_it_copies_is_there_and_no_more_is_sent() -> None:
    copied = {source for line in instructions("COPY") for source in line.split()[:-1]}
    assert copied and all((ROOT / source).exists() for source in copied)
    ignored = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().split()
    assert ignored[0] == "*" and {line.removeprefix("!") for line in ignored if line.startswith("!")} == copied


def test_the_package_is_whole() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    links = {path.name for path in (ROOT / "omni_bus").iterdir() if path.is_symlink()}
    copied = {source for line in instructions("COPY") for source in line.split()[:-1]}
    assert links and {"omni_bus", *links} <= copied
    assert {name.split(".")[1] for name in packages if "." in name} - links <= {"commands"}


def test_extras_and_versions_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [extras] = [line.removeprefix("EXTRAS=") for line in instructions("ARG")]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    [pinned] = re.findall(r"silero-vad==\S+", DOCKERFILE)
    assert pinned in (ROOT / "Makefile").read_text()


def test_it_runs_our_command_as_the_user_of_the_manifests() -> None:
    [entry], [user] = instructions("ENTRYPOINT"), instructions("USER")
    assert json.loads(entry)[-1] == "omni-bus"
    for workload in of_kind("Deployment").values():
        context = pod(workload)["securityContext"]
        assert user == f"{context['runAsUser']}:{context['runAsGroup']}"
