"""Every kernel that may start before the one in front of it has ended waits for it before it reads what that one writes."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

import pytest

STAGES = pathlib.Path(__file__).parents[3] / "stages"
FILES = sorted(path for path in STAGES.glob("**/*triton*.py") if "dependent_launch" in path.read_text())
# What no kernel of a step writes: weights, their scales, tables, and what a step is given before its first kernel.
CONSTANT = {"norm_ptr", "weight_ptr", "q_weight_ptr", "k_weight_ptr", "q_norm_ptr", "k_norm_ptr", "cos_ptr", "sin_ptr"} | {
    "seeds_ptr",
    "draws_ptr",
    "temperature_ptr",
}
SCALARS = {"start", "group"}
# In the attention of every other decoder these are of the step.
WRITTEN = {("triton_layers.py", "cos_ptr"), ("triton_layers.py", "sin_ptr")}


def called(node: ast.AST) -> str:
    """The name of what a call calls, without its module."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def kernels(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and "PDL" in {one.arg for one in node.args.args}:
            yield node


def faults(name: str, source: str) -> list[str]:
    """What breaks the rules of dependent_launch.py in a file of kernels."""
    tree, found, names = ast.parse(source), [], set()
    for kernel in kernels(tree):
        names.add(kernel.name)
        body = (
            kernel.body[1:]
            if isinstance(kernel.body[0], ast.Expr) and isinstance(kernel.body[0].value, ast.Constant)
            else kernel.body
        )
        calls = [called(one.value) if isinstance(one, ast.Expr) else "" for one in body]
        if calls[0] != "let_next_start":
            found.append(f"{kernel.name}: does not begin with let_next_start")
        if calls.count("wait_for_earlier") != 1:
            found.append(f"{kernel.name}: does not wait once, and always")
            continue
        pointers = {one.arg for one in kernel.args.args if one.annotation is None}
        early = body[: calls.index("wait_for_earlier")]
        origin: dict[str, set[str]] = {one: {one} for one in pointers}
        for node in (part for statement in early for part in ast.walk(statement)):
            if isinstance(node, ast.Return) or called(node) in ("store", "atomic_add", "atomic_cas"):
                found.append(f"{kernel.name}: writes or returns before it waits")
            if isinstance(node, ast.Assign | ast.AugAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                reads = {one.id for one in ast.walk(node.value) if isinstance(one, ast.Name)}
                for target in targets:
                    if isinstance(target, ast.Name):
                        origin[target.id] = origin.get(target.id, set()) | set().union(
                            *(origin.get(one, set()) for one in reads)
                        )
            if called(node) in ("load", "block_of", "_fetch"):
                assert isinstance(node, ast.Call)
                used = {one.id for one in ast.walk(node.args[0]) if isinstance(one, ast.Name)}
                read = set().union(*(origin.get(one, set()) for one in used))
                written = (read - CONSTANT - SCALARS) | {one for one in read if (name, one) in WRITTEN}
                if written:
                    found.append(f"{kernel.name}: reads {', '.join(sorted(written))} before it waits")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and getattr(node.func.value, "id", "") in names:
            spread = [one.value for one in node.keywords if one.arg is None]
            if not any(called(one) == "options" or isinstance(one, ast.Name) for one in spread):
                found.append(f"{ast.unparse(node.func.value)}: started without dependent_launch.options")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_kernels_wait_before_they_read_or_write(path: pathlib.Path) -> None:
    assert list(kernels(ast.parse(path.read_text())))
    assert faults(path.name, path.read_text()) == []


def test_every_file_of_decode_kernels_is_looked_at() -> None:
    assert len(FILES) >= 8


SOUND = """
def kernel(x_ptr, norm_ptr, out_ptr, PDL: tl.constexpr):
    let_next_start(PDL)
    norm = tl.load(norm_ptr)
    wait_for_earlier(PDL)
    tl.store(out_ptr, tl.load(x_ptr) * norm)

def start(x):
    kernel[(1,)](x, **dependent_launch.options(x))
"""


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        ("    wait_for_earlier(PDL)\n", "", "kernel: does not wait once, and always"),
        (
            "    wait_for_earlier(PDL)\n",
            "    if norm:\n        wait_for_earlier(PDL)\n",
            "kernel: does not wait once, and always",
        ),
        ("    let_next_start(PDL)\n", "", "kernel: does not begin with let_next_start"),
        ("tl.load(norm_ptr)", "tl.load(x_ptr)", "kernel: reads x_ptr before it waits"),
        (
            "    norm = tl.load(norm_ptr)\n",
            "    at = x_ptr + 1\n    norm = tl.load(at)\n",
            "kernel: reads x_ptr before it waits",
        ),
        ("    norm = tl.load(norm_ptr)\n", "    tl.store(out_ptr, 1)\n", "kernel: writes or returns before it waits"),
        ("norm_ptr", "residual", "kernel: reads residual before it waits"),
        (", **dependent_launch.options(x)", "", "kernel: started without dependent_launch.options"),
    ],
)
def test_each_fault_is_found(before: str, after: str, fault: str) -> None:
    assert faults("sound.py", SOUND) == []
    assert before in SOUND
    assert faults("sound.py", SOUND.replace(before, after)) == [fault]
