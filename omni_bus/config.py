"""Configuration → Deployment, checked whole before any process starts.

Precedence: pipeline defaults < TOML < `OMNI_BUS_*` environment < `--set` (config_layers.py). Every problem found is told, each
with the file and line (or variable, or option), the key, and the nearest valid name; the most important one first.
"""

from __future__ import annotations

import ipaddress
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from omni_bus.config_layers import Layers, dotted
from omni_bus.config_text import KeyPath
from omni_bus.config_values import BadValue, convert
from omni_bus.deployment import ApiConfig, BusConfig, Deployment, EdgeConfig, ModelConfig, StageConfig
from omni_bus.devices import usable_cores
from omni_bus.errors import ConfigError, InvalidRequest
from omni_bus.keys import server_pair
from omni_bus.names import did_you_mean
from omni_bus.sampling import SamplingParams
from omni_bus.spec import EdgeSpec, PipelineSpec, StageSpec, load_pipeline, pipeline_names
from omni_bus.tcp_endpoint import TcpEndpoint

TABLES = ("model", "api", "bus", "stages", "edges")
DTYPES = ("float32", "bfloat16", "float16", "float64")
MPS = ("off", "auto", "on")
FENCES = ("words", "events")
LOOPS = ("shared", "own")
CONNECTORS = ("auto", "inline", "local", "shm", "cuda_ipc", "tcp")

Rule = tuple[Callable[[Any], bool], str]
RULES: dict[str, Rule] = {
    "api.host": (bool, "a host name or address"),
    "api.port": (lambda port: 1 <= port <= 65535, "from 1 to 65535"),
    "api.processes": (lambda count: 1 <= count <= 64, "from 1 to 64"),
    "api.max_requests_per_client": (lambda count: 0 <= count <= 1_000_000, "from 0 (no limit) to 1000000"),
    "api.max_body_mb": (lambda size: 1 <= size <= 4096, "from 1 to 4096"),
    "api.deadline_s": (lambda seconds: 0 < seconds <= 86400, "above 0 and up to 86400"),
    "api.max_sessions": (lambda count: 0 <= count <= 1_000_000, "from 0 (no limit) to 1000000"),
    "api.max_sessions_per_client": (lambda count: 0 <= count <= 1_000_000, "from 0 (no limit) to 1000000"),
    "api.session_s": (lambda seconds: 1 <= seconds <= 604_800, "from 1 to 604800"),
    "api.session_idle_s": (lambda seconds: 1 <= seconds <= 604_800, "from 1 to 604800"),
    "api.session_events_per_s": (lambda count: 0 <= count <= 1_000_000, "from 0 (no limit) to 1000000"),
    "api.session_event_mb": (lambda size: 1 <= size <= 256, "from 1 to 256"),
    "api.session_buffer_s": (lambda seconds: 1 <= seconds <= 3600, "from 1 to 3600"),
    "api.session_history_s": (lambda seconds: 1 <= seconds <= 86400, "from 1 to 86400"),
    "api.voice_lead_s": (lambda seconds: 0.1 <= seconds <= 60, "from 0.1 to 60"),
    "bus.max_requests": (lambda count: 1 <= count <= 1_000_000, "from 1 to 1000000"),
    "bus.max_waiting": (lambda count: 0 <= count <= 1_000_000, "from 0 to 1000000"),
    "bus.admit_rtf": (lambda factor: 0.0 <= factor <= 100.0, "from 0 to 100"),
    "bus.heartbeat_s": (lambda seconds: 0.05 <= seconds <= 60, "from 0.05 to 60"),
    "bus.lost_after_s": (lambda seconds: 0.1 <= seconds <= 3600, "from 0.1 to 3600"),
    "bus.broker_lost_after_s": (lambda seconds: 0.1 <= seconds <= 3600, "from 0.1 to 3600"),
    "bus.load_s": (lambda seconds: 0 <= seconds <= 86400, "from 0 (no limit) to 86400"),
    "bus.step_s": (lambda seconds: 0 <= seconds <= 86400, "from 0 (no limit) to 86400"),
    "bus.retries": (lambda count: 0 <= count <= 10, "from 0 to 10"),
    "bus.gpu_buffer_mb": (lambda size: 1 <= size <= 65536, "from 1 to 65536"),
    "bus.gpu_fences": (lambda name: name in FENCES, f"one of {', '.join(FENCES)}"),
    "bus.mps": (lambda name: name in MPS, f"one of {', '.join(MPS)}"),
    "bus.drain_s": (lambda seconds: 0 <= seconds <= 86400, "from 0 to 86400"),
    "bus.restart_backoff_s": (lambda seconds: 0.01 <= seconds <= 30, "from 0.01 to 30"),
    "stage.devices": (bool, 'a list of at least one device, such as ["cpu"] or ["cuda:0"]'),
    "stage.replicas": (lambda count: 0 <= count <= 256, "from 0 (with bus.listen) to 256"),
    "stage.loop": (lambda name: name in LOOPS, f"one of {', '.join(LOOPS)}"),
    "stage.dtype": (lambda name: name in DTYPES, f"one of {', '.join(DTYPES)}"),
    "stage.threads": (lambda count: 0 <= count <= 1024, "from 0 (computed) to 1024"),
    "stage.max_batch": (lambda rows: 1 <= rows <= 4096, "from 1 to 4096"),
    "edge.connector": (lambda name: name in CONNECTORS, f"one of {', '.join(CONNECTORS)}"),
    "edge.credits": (lambda count: 1 <= count <= 100_000, "from 1 to 100000"),
}


def load_deployment(
    file: pathlib.Path,
    *,
    sets: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    host: str | None = None,
    port: int | None = None,
) -> Deployment:
    """The checked deployment of a TOML file. Raises ConfigError with one line for each problem; its subclass where all are of it."""
    from omni_bus.placement import placement_problems

    layers = Layers(file)
    layers.add_toml()
    malformed = layers.add_environment(os.environ if environ is None else environ) + layers.add_sets(sets)
    if host is not None:
        layers.add_option("--host", ("api", "host"), host)
    if port is not None:
        layers.add_option("--port", ("api", "port"), port)
    named = _table(layers.values, "model").get("pipeline")
    pipeline = load_pipeline(named) if isinstance(named, str) and named in pipeline_names() else None
    checker = _Checker(layers)
    for problem in malformed:
        checker.problems.append((1, (9, 0), problem))
    deployment = checker.deployment(pipeline)
    if pipeline is not None and deployment is not None:
        for path, text in placement_problems(deployment, pipeline, _smaller(file)):
            checker.report(path, text, weight=1)
        # A hub id may have to be fetched: not for a deployment that is refused anyway.
        checkpoint = deployment.model.path
        if not (checker.problems and checkpoint) or pathlib.Path(checkpoint).exists():
            checker.model(pipeline, checkpoint, deployment.stages)
    if checker.problems:
        raise ConfigError("\n".join(dict.fromkeys(text for *_, text in sorted(checker.problems, key=lambda found: found[:2]))))
    assert deployment is not None
    return deployment


def _smaller(file: pathlib.Path) -> str:
    """What to run instead on a machine without the devices: the `_tiny` deployment beside that file, if there is one."""
    tiny = file.with_name(f"{file.stem}_tiny.toml")
    return f"use {tiny} or " if tiny.is_file() else "use "


def _table(values: dict[str, Any], name: str) -> dict[str, Any]:
    found = values.get(name, {})
    return found if isinstance(found, dict) else {}


class _Checker:
    """Reads the merged layers into a Deployment, noting problems as (weight, order, text): the lightest weight is told first."""

    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        self.problems: list[tuple[int, tuple[int, int], str]] = []

    def report(self, path: KeyPath, text: str, weight: int = 1) -> None:
        origin = self.layers.origin(path)
        self.problems.append((weight, origin.order, f"{origin.where}: {dotted(path)}{text}"))

    def deployment(self, pipeline: PipelineSpec | None) -> Deployment | None:
        """None where so much is wrong that there is nothing to place."""
        for name in self.layers.values:
            if name not in TABLES:
                self.report((name,), f": unknown table{did_you_mean(name, TABLES)}")
        model = self._struct(ModelConfig, ("model",), "model")
        if pipeline is None:
            self._no_pipeline()
        api = self._struct(ApiConfig, ("api",), "api")
        bus = self._struct(BusConfig, ("bus",), "bus")
        if api is not None:
            api = self._api_keys(api)
        if bus is not None:
            bus = self._bus_keys(bus)
        if bus is not None and bus.lost_after_s < 2 * bus.heartbeat_s:
            self.report(("bus", "lost_after_s"), f": must be at least twice bus.heartbeat_s, which is {bus.heartbeat_s:g}")
        if pipeline is None:
            return None
        stages = self._named(("stages",), {spec.name: spec for spec in pipeline.stages}, self._stage, "stage", pipeline)
        edges = self._named(("edges",), {spec.name: spec for spec in pipeline.edges}, self._edge, "edge", pipeline)
        if model is None or api is None or bus is None or None in stages.values() or None in edges.values():
            return None
        placed = {name: stage for name, stage in stages.items() if stage is not None}
        joined = {name: edge for name, edge in edges.items() if edge is not None}
        model = msgspec.structs.replace(model, path=self._model_path(model.path))
        return with_threads(Deployment(model=model, api=api, bus=bus, stages=placed, edges=joined))

    def model(self, pipeline: PipelineSpec, path: str, stages: Mapping[str, StageConfig]) -> None:
        """Ask the pipeline whether it can serve that checkpoint."""
        try:
            pipeline.check_model(path, stages)
        except ConfigError as error:
            self.report(("model", "path"), f": {error.message}", weight=2)

    def _no_pipeline(self) -> None:
        names = pipeline_names()
        said = _table(self.layers.values, "model").get("pipeline")
        if said is None:
            self.report(("model", "pipeline"), f": missing; it says what is served: one of {', '.join(names)}", weight=0)
        elif isinstance(said, str):
            self.report(("model", "pipeline"), f': unknown pipeline "{said}"{did_you_mean(said, names)}', weight=0)

    def _model_path(self, path: str) -> str:
        """A directory as an absolute path: from the working directory, or from the TOML's own if it was said there."""
        if not path:
            return path
        beside = self.layers.origin(("model", "path")).directory
        expanded = pathlib.Path(path).expanduser()
        tried = [expanded] if beside is None else [beside / expanded, expanded]
        return next((str(directory.absolute()) for directory in tried if directory.exists()), path)

    def _api_keys(self, api: ApiConfig) -> ApiConfig:
        if not api.api_keys_file:
            if not is_loopback(api.host):
                key = ("api", "host")
                self.report(
                    key, f': without api.api_keys_file the server is open to all, so "{api.host}" must be a loopback address'
                )
            return api
        key = ("api", "api_keys_file")
        file = (self.layers.origin(key).directory or pathlib.Path()) / pathlib.Path(api.api_keys_file).expanduser()
        try:
            if not any(line.strip() for line in file.read_text(encoding="utf-8").splitlines()):
                self.report(key, f": {file} holds no key; write one a line")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            self.report(key, f": {file} cannot be read: {reason}")
        return msgspec.structs.replace(api, api_keys_file=str(file.absolute()))

    def _bus_keys(self, bus: BusConfig) -> BusConfig:
        """`listen` and `keys`, which need each other; the directory as an absolute path."""
        if bus.listen:
            try:
                TcpEndpoint.parse(bus.listen)
            except ValueError as error:
                self.report(("bus", "listen"), f": {error}")
            if not bus.keys:
                advice = "make some with `omni-bus keys new DIR` and name the directory"
                self.report(("bus", "listen"), f": without bus.keys anybody could attach; {advice}")
        if not bus.keys:
            return bus
        key = ("bus", "keys")
        if not bus.listen:
            self.report(key, ": of no use without bus.listen; leave it out, or say where to listen")
            return bus
        directory = (self.layers.origin(key).directory or pathlib.Path()) / pathlib.Path(bus.keys).expanduser()
        try:
            server_pair(directory)
        except ConfigError as error:
            self.report(key, f": {error.message}")
        return msgspec.structs.replace(bus, keys=str(directory.absolute()))

    def _named(
        self, path: KeyPath, specs: dict[str, Any], read: Callable[..., Any], what: str, pipeline: PipelineSpec
    ) -> dict[str, Any]:
        """The tables [stages.NAME] or [edges.NAME], in the pipeline's order."""
        tables = self._dict(path)
        for name in tables:
            if name not in specs:
                self.report((*path, name), f": pipeline {pipeline.name} has no such {what}{did_you_mean(name, specs)}")
        return {name: read(spec, self._dict((*path, name))) for name, spec in specs.items()}

    def _stage(self, spec: StageSpec, table: dict[str, Any]) -> StageConfig | None:
        path = ("stages", spec.name)
        for name in spec.unused & table.keys():
            self.report((*path, name), f": stage {spec.name} has no use for it; leave it out")
        defaults = {"devices": (spec.device,), "max_batch": spec.max_batch}
        common, options = self._split(table, StageConfig, spec.options, path)
        common.pop("sampling", None)
        sampling = self._sampling(spec, (*path, "sampling"))
        read = self._fields(StageConfig, common, path, "stage")
        own = self._options(spec.options, options, path)
        if read is None or own is None or sampling is None:
            return None
        return StageConfig(**{**defaults, **read, "sampling": sampling, "options": own})

    def _edge(self, spec: EdgeSpec, table: dict[str, Any]) -> EdgeConfig | None:
        path = ("edges", spec.name)
        common, options = self._split(table, EdgeConfig, spec.options, path)
        read = self._fields(EdgeConfig, common, path, "edge")
        own = self._options(spec.options, options, path)
        return None if read is None or own is None else EdgeConfig(**{"credits": spec.credits, **read, "options": own})

    def _sampling(self, spec: StageSpec, path: KeyPath) -> SamplingParams | None:
        table = self._dict(path)
        if table and spec.sampling is None:
            self.report(path, f": stage {spec.name} does not sample")
            return None
        read = self._fields(SamplingParams, table, path, "sampling")
        if read is None:
            return None
        said = SamplingParams(**read)
        try:
            said.check("")
        except InvalidRequest as error:
            self.report((*path, error.param or ""), f": {error.message.removeprefix(error.param or '').strip()}")
            return None
        return (spec.sampling or SamplingParams()).merged(said)

    def _split(
        self, table: dict[str, Any], common: type[msgspec.Struct], own: type[msgspec.Struct], path: KeyPath
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Keys that every stage or edge has, and those that its own options type declares; unknown ones are reported."""
        shared = {name for name in common.__struct_fields__ if name != "options"}
        for name in table:
            if name not in shared and name not in own.__struct_fields__:
                self.report((*path, name), f": unknown key{did_you_mean(name, shared | set(own.__struct_fields__))}")
        return (
            {name: value for name, value in table.items() if name in shared},
            {name: value for name, value in table.items() if name in own.__struct_fields__},
        )

    def _struct(self, kind: type[Any], path: KeyPath, section: str) -> Any | None:
        table = self._dict(path)
        read = self._fields(kind, table, path, section)
        if read is None or any(field.required and field.name not in read for field in msgspec.structs.fields(kind)):
            return None
        return kind(**read)

    def _options(self, kind: type[msgspec.Struct], table: dict[str, Any], path: KeyPath) -> dict[str, Any] | None:
        read = self._fields(kind, table, path, "")
        if read is None:
            return None
        missing = [field.name for field in msgspec.structs.fields(kind) if field.required and field.name not in read]
        for name in missing:
            self.report((*path, name), ": missing")
        if missing:
            return None
        try:
            return dict(msgspec.to_builtins(kind(**read)))
        except ValueError as error:  # a rule of the type's own: its sentence begins with the key
            name, _, rule = str(error).partition(" ")
            self.report((*path, name), f" {rule}")
            return None

    def _fields(self, kind: type[msgspec.Struct], table: dict[str, Any], path: KeyPath, section: str) -> dict[str, Any] | None:
        """Converted values of the known keys said, unknown ones reported; None after reporting what is wrong with a value."""
        kinds = {field.name: field.type for field in msgspec.structs.fields(kind)}
        read, well = {}, True
        for name, value in table.items():
            key = (*path, name)
            if name not in kinds:
                self.report(key, f": unknown key{did_you_mean(name, kinds)}")
                continue
            bounded = section == "sampling" or f"{section}.{name}" in RULES
            try:
                read[name] = convert(value, kinds[name], self.layers.origin(key).raw, bounded=bounded)
                rule = RULES.get(f"{section}.{name}")
                if rule is not None and not rule[0](read[name]):
                    raise BadValue(f"must be {rule[1]}, not {_shown(value)}")
            except BadValue as error:
                self.report(key, f" {error}")
                well = False
        return read if well else None

    def _dict(self, path: KeyPath) -> dict[str, Any]:
        value = self.layers.values
        for name in path:
            value = value.get(name, {})
            if not isinstance(value, dict):
                self.report(path, f": must be a table, not {_shown(value)}")
                return {}
        return value


def _shown(value: Any) -> str:
    from omni_bus.config_values import described

    return described(value)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def with_threads(deployment: Deployment) -> Deployment:
    """The same with `threads` computed where it is 0: what its process was given elsewhere, else usable cores / processes."""
    share = max(1, math.floor(usable_cores() / max(1, len(deployment.workers()))))
    said = {stage.process or name: stage.threads for name, stage in deployment.stages.items() if stage.threads}
    stages = {
        name: msgspec.structs.replace(stage, threads=stage.threads or said.get(stage.process or name, share))
        for name, stage in deployment.stages.items()
    }
    return msgspec.structs.replace(deployment, stages=stages)
