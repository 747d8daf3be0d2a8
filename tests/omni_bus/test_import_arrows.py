"""Who may import whom. Imports for type checkers only (`if TYPE_CHECKING:`) do not count: they load nothing."""

from __future__ import annotations

import ast
import graphlib
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = ("omni_bus", "stages", "workers", "connectors", "api")

# Folder → the folders of ours it may import, itself included.
OURS = {
    "omni_bus": {"omni_bus"},
    "connectors": {"omni_bus", "connectors"},
    "stages": {"omni_bus", "stages"},
    "workers": {"omni_bus", "stages", "connectors", "workers"},
    "api": {"omni_bus", "api"},
}
# Folder → packages of others. A stage may import whatever its model needs, but nothing that talks to the world.
OTHERS = {
    "omni_bus": {"msgspec", "zmq", "uvloop", "rich"},
    "connectors": {"msgspec", "zmq", "numpy", "torch", "cupy"},
    "workers": {"msgspec", "zmq", "numpy", "torch"},
    "api": {"msgspec", "uvloop", "aiohttp", "yarl", "multidict", "av", "numpy", "onnxruntime", "prometheus_client"},
}
NOT_IN_STAGES = {"zmq", "aiohttp", "prometheus_client", "uvloop"}

Import = tuple[int, str]  # line, dotted name


def modules() -> dict[str, pathlib.Path]:
    """Dotted name → file, of every module in the five code folders."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if folder == "omni_bus" and len(parts) > 2:
                continue  # the links to the other four
            dotted = ".".join(parts if folder == "omni_bus" else ("omni_bus", *parts))
            found[dotted.removesuffix(".__init__")] = path
    return found


MODULES = modules()


def folder_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in FOLDERS else "omni_bus"


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def imports(path: pathlib.Path, *, when_loaded: bool = False) -> Iterator[Import]:
    """What a module imports; `when_loaded` leaves out imports inside functions."""
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif is_type_checking(node):
            assert isinstance(node, ast.If)
            waiting += node.orelse
        elif not (when_loaded and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
            waiting += ast.iter_child_nodes(node)


def complaint(module: str, imported: str) -> str | None:
    """Why `module` may not import the dotted name, or None."""
    folder = folder_of(module)
    top = imported.split(".")[0]
    if top == "omni_bus":
        return None if folder_of(imported) in OURS[folder] else f"{folder} may not import {folder_of(imported)}"
    if top in sys.stdlib_module_names:
        return "nothing is ever pickled" if top in ("pickle", "marshal", "shelve") else None
    if top in FOLDERS:
        return f"say omni_bus.{top}"
    allowed = top not in NOT_IN_STAGES if folder == "stages" else top in OTHERS[folder]
    return None if allowed else f"{folder} may not import {top}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_only_what_it_may(folder: str) -> None:
    members = {module: path for module, path in MODULES.items() if folder_of(module) == folder}
    assert members
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {why}"
        for module, path in members.items()
        for line, imported in imports(path)
        if (why := complaint(module, imported))
    ]
    assert not wrong, "\n".join(wrong)


def test_there_are_no_cycles() -> None:
    graph = {
        module: {name for _, imported in imports(path, when_loaded=True) if (name := nearest(imported)) not in (None, module)}
        for module, path in MODULES.items()
    }
    graphlib.TopologicalSorter(graph).prepare()


def nearest(imported: str) -> str | None:
    """The module of ours that holds the dotted name. A package's own __init__ holds no code that others need."""
    if imported in MODULES:
        return imported
    parent = imported.rpartition(".")[0]
    return parent if parent in MODULES else None


WRONG = {
    "the_core_imports_a_stage": ("omni_bus.broker", "omni_bus.stages.ar.engine"),
    "the_core_imports_torch": ("omni_bus.broker", "torch"),
    "a_stage_imports_a_worker": ("omni_bus.stages.ar.engine", "omni_bus.workers.link"),
    "a_stage_imports_zmq": ("omni_bus.stages.ar.engine", "zmq"),
    "the_api_imports_a_stage": ("omni_bus.api.app", "omni_bus.stages.contract"),
    "the_api_imports_transformers": ("omni_bus.api.app", "transformers"),
    "a_connector_imports_a_stage": ("omni_bus.connectors.shm", "omni_bus.stages"),
    "a_folder_is_imported_by_its_bare_name": ("omni_bus.workers.link", "stages.contract"),
    "something_is_pickled": ("omni_bus.wire", "pickle"),
}


@pytest.mark.parametrize("name", WRONG)
def test_is_complained_of(name: str) -> None:
    assert complaint(*WRONG[name])


@pytest.mark.parametrize("module", ["omni_bus.broker_main", "omni_bus.client", "omni_bus.supervisor", "omni_bus.api.__main__"])
def test_a_process_without_a_model_starts_without_torch(module: str) -> None:
    """Also where a lazy import deep inside would load it: the whole pipeline spec is read as the process reads it."""
    code = (
        f"import sys, {module}\nfrom omni_bus.spec import load_pipeline, pipeline_names\n"
        "for name in pipeline_names(): load_pipeline(name)\n"
        "print(sorted({'torch', 'transformers', 'scipy', 'tokenizers', 'onnxruntime'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_the_broker_loads_no_array_library_either() -> None:
    code = "import sys, omni_bus.broker_main, omni_bus.client; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "False"
