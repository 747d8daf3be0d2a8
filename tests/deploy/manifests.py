"""The manifests of deploy/kubernetes as Python objects, and the deployment that each server of them is given."""

from __future__ import annotations

import pathlib
import tomllib
from collections.abc import Iterator
from typing import Any

import yaml

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
NO_MANIFEST = ("kustomization.yaml", "prometheus-adapter.yaml")

Object = dict[str, Any]


def files() -> list[pathlib.Path]:
    return sorted(path for path in FOLDER.rglob("*.yaml") if path.name not in NO_MANIFEST)


def objects() -> Iterator[tuple[pathlib.Path, Object]]:
    for path in files():
        for found in yaml.safe_load_all(path.read_text()):
            yield path, found


def of_kind(kind: str) -> dict[str, Object]:
    """Name → object."""
    return {found["metadata"]["name"]: found for _, found in objects() if found["kind"] == kind}


def pod(workload: Object) -> Object:
    found: Object = workload["spec"]["template"]["spec"]
    return found


def container(workload: Object) -> Object:
    [only] = pod(workload)["containers"]
    return only


def servers() -> dict[str, Object]:
    """Those that run `omni-bus up`."""
    return {name: found for name, found in of_kind("Deployment").items() if container(found)["args"][0] == "up"}


def volumes(workload: Object) -> dict[str, Object]:
    """Where it is mounted → the volume."""
    named = {volume["name"]: volume for volume in pod(workload)["volumes"]}
    return {mount["mountPath"]: named[mount["name"]] for mount in container(workload)["volumeMounts"]}


def server_toml(workload: Object) -> str:
    """The file that its `omni-bus up` reads."""
    path = pathlib.PurePath(container(workload)["args"][1])
    config: str = of_kind("ConfigMap")[volumes(workload)[str(path.parent)]["configMap"]["name"]]["data"][path.name]
    return config


def settings(workload: Object) -> Object:
    return tomllib.loads(server_toml(workload))
