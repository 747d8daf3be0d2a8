"""docs/configuration.md says every key as the code has it: none is missing, none is gone, types, defaults and bounds are the same."""

from __future__ import annotations

import pathlib
import re
import tomllib
import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
import pytest

from omni_bus.config import RULES
from omni_bus.config_layers import CLIENT_VARIABLES, Layers
from omni_bus.deployment import ApiConfig, BusConfig, EdgeConfig, ModelConfig, StageConfig
from omni_bus.sampling import SamplingParams
from omni_bus.spec import PipelineSpec, load_pipeline, pipeline_names
from omni_bus.stages.ar.options import AROptions

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
OF_PIPELINE = "the pipeline's"  # a default that each pipeline says for itself
Table = dict[str, tuple[str, ...]]  # first cell without its ticks → the other cells


def section(*path: str) -> str:
    """The text under nested headings, up to the next heading of any level."""
    rest, level = PAGE, 1
    for heading in path:
        found = re.search(rf"^(?P<level>#+) {re.escape(heading)}$", rest, re.M)
        assert found, f"the page has no heading {' / '.join(path)}"
        level = len(found["level"])
        rest = rest[found.end() :]
        rest = re.split(rf"^#{{1,{level}}} ", rest, maxsplit=1, flags=re.M)[0]
    return re.split(r"^#+ ", rest, maxsplit=1, flags=re.M)[0]


def tables(text: str) -> Iterator[Table]:
    """Every table of a section, without its head."""
    for block in re.findall(r"(?:^\|.*\|$\n?)+", text, re.M):
        rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])] for line in block.strip().splitlines()]
        assert len({len(row) for row in rows}) == 1, rows[0]
        yield {row[0].strip("`"): tuple(row[1:]) for row in rows[2:]}


def spelled(kind: Any) -> str:
    """A key's type as the page says it."""
    words = {int: "integer", float: "number", bool: "true or false", str: "string"}
    if kind in words:
        return words[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        [inner] = [argument for argument in arguments if argument is not type(None)]
        return spelled(inner)
    if origin is Literal:
        return spelled(type(arguments[0]))
    if origin is tuple:
        return f"list of {spelled(arguments[0])}s"
    assert issubclass(kind, msgspec.Struct), kind
    return "table"


def as_toml(value: Any) -> str:
    if value is None:
        return "none"
    return f"`{_toml(value)}`"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, SamplingParams):
        said = msgspec.to_builtins(value)
        return f"{{{', '.join(f'{name} = {_toml(said[name])}' for name in said)}}}"
    return repr(value)


def default(field: msgspec.structs.FieldInfo) -> str:
    if field.default is not msgspec.NODEFAULT:
        return as_toml(field.default)
    if field.default_factory is not msgspec.NODEFAULT:
        return as_toml(field.default_factory())
    return "required"


def choices(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def keys_of(kind: type[msgspec.Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    """Name → field, but for what the page says of the engine's keys already."""
    fields = {field.name: field for field in msgspec.structs.fields(kind) if field.name != "options"}
    if kind is AROptions or not issubclass(kind, AROptions):
        return fields
    engine = {field.name: (field.type, field.default) for field in msgspec.structs.fields(AROptions)}
    return {name: field for name, field in fields.items() if engine.get(name) != (field.type, field.default)}


def check(kind: type[msgspec.Struct], table: Table, where: str, rules: str = "") -> None:
    """`rules`: the section of RULES. A key may say that its default is the pipeline's."""
    fields = keys_of(kind)
    assert table.keys() == fields.keys(), f"{where}: docs/configuration.md and {kind.__name__} have different keys"
    for name, field in fields.items():
        said_type, said_default, allowed, _ = table[name]
        assert said_type == spelled(field.type), f"{where}.{name}"
        if said_default != OF_PIPELINE:
            assert said_default == default(field), f"{where}.{name}"
        if get_origin(field.type) is Literal:
            assert choices(allowed) == list(get_args(field.type)), f"{where}.{name}"
        rule = RULES.get(f"{rules}.{name}")
        if rule is not None:
            assert allowed.replace("`", "") == rule[1], f"{where}.{name}"


COMMON: Mapping[str, tuple[type[msgspec.Struct], str]] = {
    "`[model]`": (ModelConfig, "model"),
    "`[api]`": (ApiConfig, "api"),
    "`[bus]`": (BusConfig, "bus"),
    "`[stages.NAME]`": (StageConfig, "stage"),
    "`sampling`": (SamplingParams, ""),
    '`[edges."A->B"]`': (EdgeConfig, "edge"),
    "Keys of the autoregressive engine": (AROptions, ""),
}


@pytest.mark.parametrize("heading", COMMON)
def test_common_keys(heading: str) -> None:
    kind, rules = COMMON[heading]
    [table] = tables(section(heading))
    check(kind, table, heading, rules)


def test_only_what_each_pipeline_says_for_itself_is_left_to_it() -> None:
    [stage], [edge] = tables(section("`[stages.NAME]`")), tables(section('`[edges."A->B"]`'))
    assert {name for name, row in stage.items() if row[1] == OF_PIPELINE} == {"devices", "max_batch", "sampling"}
    assert {name for name, row in edge.items() if row[1] == OF_PIPELINE} == {"credits"}


def test_every_pipeline_has_its_section() -> None:
    listed = re.findall(r"^### `(\w+)`$", PAGE.partition("## The pipelines")[2], re.M)
    assert listed == pipeline_names() == choices(next(tables(section("`[model]`")))["pipeline"][2])[2:]


def own_keys(pipeline: PipelineSpec) -> Iterator[tuple[str, type[msgspec.Struct]]]:
    """Table of the TOML → the type of the keys that it has beyond the common ones."""
    for stage in pipeline.stages:
        yield f"`[stages.{stage.name}]`", stage.options
    for edge in pipeline.edges:
        yield f'`[edges."{edge.name}"]`', edge.options


@pytest.mark.parametrize("name", pipeline_names())
def test_a_pipelines_stages_edges_and_keys(name: str) -> None:
    pipeline = load_pipeline(name)
    stages, edges = tables(section("The pipelines", f"`{name}`"))
    assert stages == {
        stage.name: (
            as_toml((stage.device,)) + (" only" if stage.cpu_only else ""),
            as_toml(stage.max_batch),
            "" if stage.sampling is None else as_toml(stage.sampling),
            ", ".join(f"`{key}`" for key in sorted(stage.unused)),
            "autoregressive" if issubclass(stage.options, AROptions) else "",
        )
        for stage in pipeline.stages
    }
    assert edges == {edge.name: (as_toml(edge.credits),) for edge in pipeline.edges}
    headings = re.findall(r"^#### (.+)$", re.split(rf"^### `{name}`$", PAGE, flags=re.M)[1].split("\n### ")[0], re.M)
    named = {table: heading for heading in headings for table in heading.split(", ")}
    wanted = {table: kind for table, kind in own_keys(pipeline) if keys_of(kind)}
    assert named.keys() == wanted.keys()
    for table, kind in wanted.items():
        [keys] = tables(section("The pipelines", f"`{name}`", named[table]))
        check(kind, keys, f"{name} {table}")


def test_what_variables_and_sets_are_said_to_set() -> None:
    examples = re.findall(r"^(OMNI_BUS_\w+=.*?|--set .*?) +# (.+)$", section("Where a value comes from"), re.M)
    assert len(examples) >= 10
    for said, meant in examples:
        layers = Layers(pathlib.Path("x.toml"))
        variable, _, value = said.partition("=")
        problems = (
            layers.add_sets([said.removeprefix("--set ")])
            if said.startswith("--set")
            else layers.add_environment({variable: value})
        )
        assert not problems
        assert layers.values == tomllib.loads(meant), said
    assert set(re.findall(r"`(OMNI_BUS_(?:URL|API_KEY))`", section("Where a value comes from"))) == CLIENT_VARIABLES
