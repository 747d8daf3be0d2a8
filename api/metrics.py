"""Every metric's name, in one file; what each request measures of itself is in timing.py.

Labels come from the pipeline and from fixed lists, never from a client, so that their number is bounded.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest, values
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

from omni_bus import errors
from omni_bus.api.recent import Recent
from omni_bus.events import CLIENT, Status

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0)
_LEAD_SECONDS = (-5.0, -2.0, -1.0, -0.5, -0.2, -0.1, 0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_RATIOS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0, 1.2, 1.5, 2.0, 5.0, 10.0)
_LAG_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0)


disable_created_metrics()  # type: ignore[no-untyped-call]  # a time of creation beside each series doubles them and tells nothing here


def _error_codes(cls: type[errors.OmniBusError]) -> set[str]:
    return {cls.code}.union(*(_error_codes(child) for child in cls.__subclasses__()))


def share_metrics(directory: pathlib.Path, index: int) -> None:
    """Have the metrics that are made from now on live in files of `directory`, where the other API processes find them.

    For a process that was started with PROMETHEUS_MULTIPROC_DIR set to that directory. The files are named by the process's index, not
    its pid: one that was started again goes on with the counts of the one before, and the directory does not grow.
    """
    directory.mkdir(mode=0o700, exist_ok=True)
    mark_process_dead(index, str(directory))  # type: ignore[no-untyped-call]  # what it had in flight is gone with it
    values.ValueClass = values.MultiProcessValue(lambda: index)  # type: ignore[no-untyped-call]


class Metrics:
    """One API process's metrics; with `directory`, its own and those of all others that share it (`share_metrics`)."""

    def __init__(self, directory: pathlib.Path | None = None, index: int = 0) -> None:
        """`index`: of this API process."""
        registry = CollectorRegistry()
        self._registry = registry
        if directory is not None:
            self._registry = CollectorRegistry()
            MultiProcessCollector(self._registry, str(directory))  # type: ignore[no-untyped-call]
        self.in_flight = 0  # in this process: read by the lag's timer; the gauge is for scrapes
        self._in_flight = Gauge(
            "omni_bus_requests_in_flight", "Requests being answered.", registry=registry, multiprocess_mode="livesum"
        )
        self._requests = Counter("omni_bus_requests", "Answers by route and status.", ["route", "status"], registry=registry)
        self._failures = Counter("omni_bus_failures", "Failed requests by error code.", ["code"], registry=registry)
        self.cancels = Counter("omni_bus_cancels", "Requests whose client went away.", registry=registry)
        self.ttft = Histogram(
            "omni_bus_ttft_seconds", "Time to first text, from the request's arrival.", buckets=_SECONDS, registry=registry
        )
        self._ttfp = Histogram(
            "omni_bus_ttfp_seconds", "Time to first audio packet, from arrival.", buckets=_SECONDS, registry=registry
        )
        self.tpot = Histogram(
            "omni_bus_tpot_seconds", "Time per text token after the first.", buckets=_TOKEN_SECONDS, registry=registry
        )
        self.e2el = Histogram("omni_bus_e2el_seconds", "Arrival to end of answer.", buckets=_SECONDS, registry=registry)
        self._rtf = Histogram(
            "omni_bus_rtf",
            "Real-time factor: seconds from arrival to end per second of audio.",
            buckets=_RATIOS,
            registry=registry,
        )
        self.playback_lead = Histogram(
            "omni_bus_playback_lead_seconds",
            "At each audio chunk: audio sent before it minus wall time since the first packet; below 0 the player was starved.",
            buckets=_LEAD_SECONDS,
            registry=registry,
        )
        self._underruns = Counter(
            "omni_bus_underruns", "Audio chunks that came after the player had run dry.", registry=registry
        )
        self._underrun_seconds = Counter("omni_bus_underrun_seconds", "Silence that underruns caused.", registry=registry)
        self.audio_seconds = Counter("omni_bus_audio_seconds", "Audio sent.", registry=registry)
        self._lag = Histogram(
            "omni_bus_event_loop_lag_seconds", "Lateness of the event loop's timers.", buckets=_LAG_SECONDS, registry=registry
        )
        self._worst_lag = Gauge(
            "omni_bus_event_loop_lag_worst_seconds",
            "The worst of them since start.",
            registry=registry,
            multiprocess_mode="livemax",
        )
        self._worst_held = Gauge(
            "omni_bus_event_loop_held_worst_seconds",
            "The worst lateness since start, less what the loop's thread spent waiting for a processor.",
            registry=registry,
            multiprocess_mode="livemax",
        )
        self._sessions = Gauge(
            "omni_bus_voice_sessions", "Voice sessions open.", registry=registry, multiprocess_mode="livesum"
        )
        self._watchers = Gauge(
            "omni_bus_status_watchers", "Who follows the status.", registry=registry, multiprocess_mode="livesum"
        )
        self._responses = Counter("omni_bus_voice_responses", "Ended responses by status.", ["status"], registry=registry)
        self._interruptions = Counter("omni_bus_voice_interruptions", "Responses that the user interrupted.", registry=registry)
        self._turn_answered = Histogram(
            "omni_bus_voice_turn_answered_seconds",
            "From the end of a user's turn, as it was detected, to the answer's first audio.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._cancel_acknowledged = Histogram(
            "omni_bus_voice_cancel_seconds",
            "From a response's cancel until every stage has let go of it.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._worst = self._held = 0.0
        self.recent = Recent(directory, index)
        self._codes = _error_codes(errors.OmniBusError)

    def arrived(self) -> None:
        """A request, which will be `answered`."""
        self.in_flight += 1
        self._in_flight.inc()

    def answered(self, route: str, status: int) -> None:
        """`route` is a route's own pattern, not the path that was asked."""
        self.in_flight -= 1
        self._in_flight.dec()
        self._requests.labels(route, str(status)).inc()

    @contextlib.contextmanager
    def watcher(self) -> Iterator[None]:
        """One that follows the status for as long as the block lasts. It makes no work, and so its request is not in flight."""
        self._watchers.inc()
        self.in_flight -= 1
        self._in_flight.dec()
        try:
            yield
        finally:
            self._watchers.dec()
            self.in_flight += 1
            self._in_flight.inc()

    def failed(self, code: str) -> None:
        self._failures.labels(code if code in self._codes else "other").inc()

    @contextlib.contextmanager
    def voice_session(self) -> Iterator[None]:
        """One that is open for as long as the block lasts."""
        self._sessions.inc()
        try:
            yield
        finally:
            self._sessions.dec()

    def response_ended(self, status: str) -> None:
        """status: of a voice session's response, one of five."""
        self._responses.labels(status).inc()

    def interrupted(self) -> None:
        self._interruptions.inc()

    def turn_answered(self, seconds: float) -> None:
        self._turn_answered.observe(seconds)

    def cancel_acknowledged(self, seconds: float) -> None:
        self._cancel_acknowledged.observe(seconds)

    def first_packet(self, seconds: float) -> None:
        """Arrival to the first audio packet."""
        self._ttfp.observe(seconds)
        self.recent.note("ttfp_s", seconds)

    def real_time_factor(self, ratio: float) -> None:
        self._rtf.observe(ratio)
        self.recent.note("rtf", ratio)

    def underrun(self, seconds: float) -> None:
        """An audio chunk came so long after the player had run dry."""
        self._underruns.inc()
        self._underrun_seconds.inc(seconds)
        self.recent.note("underrun_s", seconds)

    def lagged(self, late: float, held: float) -> None:
        """Seconds, as LoopLag observes them."""
        self._lag.observe(late)
        if late > self._worst:
            self._worst = late
            self._worst_lag.set(late)
        if held > self._held:
            self._held = held
            self._worst_held.set(held)

    def text(self, status: Status | None) -> bytes:
        """The Prometheus text format, with the bus's own figures; None: the broker does not answer."""
        bus = CollectorRegistry()
        bus.register(_BusCollector(status))
        return generate_latest(self._registry) + generate_latest(bus)


class _BusCollector(Collector):
    """The broker's and the workers' figures, as they stood when the scrape asked for them."""

    def __init__(self, status: Status | None) -> None:
        self.status = status

    def describe(self) -> Iterable[Metric]:
        return ()  # the names depend on nothing, but their labels on what runs

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("omni_bus_broker_up", "1 if the broker answers.", value=float(self.status is not None))
        if self.status is None:
            return
        per_replica = ["stage", "worker"]
        gauges = {
            name: GaugeMetricFamily(f"omni_bus_stage_{name}", text, labels=per_replica)
            for name, text in (
                ("queue", "Requests waiting in the stage."),
                ("running", "Requests running in the stage."),
                ("batch", "Rows of the last step."),
                ("kv_blocks_used", "KV blocks in use."),
                ("kv_blocks_total", "KV blocks there are."),
                ("slots_used", "State slots in use."),
                ("slots_total", "State slots there are."),
                ("segments_used", "Connector slots handed out."),
                ("streams", "Requests that end in speech, bound to the replica."),
                ("playback_lead_seconds", "Smallest lead of the answers that are being spoken: audio sent minus time since."),
                ("predicted_rtf", "Real-time factor of the replica's process with one more spoken answer."),
            )
        }
        ready = GaugeMetricFamily("omni_bus_stage_ready", "1 if the replica takes requests.", labels=per_replica)
        steps = CounterMetricFamily("omni_bus_stage_steps", "Steps run.", labels=per_replica)
        busy = CounterMetricFamily("omni_bus_stage_busy_seconds", "Time spent in steps.", labels=per_replica)
        computed = CounterMetricFamily("omni_bus_stage_prompt_computed", "Prompt positions computed.", labels=per_replica)
        cached = CounterMetricFamily(
            "omni_bus_stage_prompt_cached", "Prompt positions whose KV was there already.", labels=per_replica
        )
        audio = CounterMetricFamily("omni_bus_stage_audio_seconds", "Audio sent to clients.", labels=per_replica)
        restarts = CounterMetricFamily("omni_bus_stage_restarts", "Times the worker was started again.", labels=per_replica)
        per_edge = ["edge", "connector", "worker"]
        chunks = CounterMetricFamily("omni_bus_edge_chunks", "Chunks sent.", labels=per_edge)
        sent = CounterMetricFamily("omni_bus_edge_bytes", "Bytes of tensors and payloads sent.", labels=per_edge)
        for replica in self.status.replicas:
            where = [replica.stage, replica.worker]
            ready.add_metric(where, float(replica.state == "ready"))
            restarts.add_metric(where, replica.restarts)
            load = replica.load
            gauges["streams"].add_metric(where, replica.streams)
            if replica.predicted_rtf is not None:
                gauges["predicted_rtf"].add_metric(where, replica.predicted_rtf)
            if load is None:
                continue
            if load.lead_s is not None:
                gauges["playback_lead_seconds"].add_metric(where, load.lead_s)
            audio.add_metric(where, load.audio_s)
            values = {
                "queue": load.waiting,
                "running": load.running,
                "batch": load.batch,
                "kv_blocks_used": load.kv_blocks_used,
                "kv_blocks_total": load.kv_blocks_total,
                "slots_used": load.slots_used,
                "slots_total": load.slots_total,
                "segments_used": load.segments_used,
            }
            for name, value in values.items():
                gauges[name].add_metric(where, value)
            steps.add_metric(where, load.steps)
            busy.add_metric(where, load.busy_s)
            computed.add_metric(where, load.prompt_computed)
            cached.add_metric(where, load.prompt_cached)
            for family, totals in ((chunks, load.chunks), (sent, load.bytes)):
                for key, total in totals.items():
                    edge, _, connector = key.partition("|")
                    family.add_metric([edge, connector, replica.worker], total)
        for key, total in self.status.edge_bytes.items():  # of the edge on which the clients are the senders
            edge, _, connector = key.partition("|")
            chunks.add_metric([edge, connector, CLIENT], self.status.edge_chunks[edge])
            sent.add_metric([edge, connector, CLIENT], total)
        requests = GaugeMetricFamily("omni_bus_broker_requests", "Requests at the broker by state.", labels=["state"])
        for state, count in self.status.requests.items():
            requests.add_metric([state], count)
        waiting = GaugeMetricFamily("omni_bus_broker_waiting", "Requests that wait for their start.", labels=["priority"])
        for priority, count in self.status.waiting.items():
            waiting.add_metric([priority], count)
        retry_after = GaugeMetricFamily(
            "omni_bus_broker_retry_after_seconds",
            "What a request is told that is refused now; 0: none would be.",
            value=self.status.retry_after_s,
        )
        ended = CounterMetricFamily("omni_bus_broker_ended", "Requests ended since the broker's start.", labels=["how"])
        for how, count in self.status.ended.items():
            ended.add_metric([how], count)
        edge_chunks = CounterMetricFamily("omni_bus_broker_edge_chunks", "Chunks that passed the broker.", labels=["edge"])
        for edge, count in self.status.edge_chunks.items():
            edge_chunks.add_metric([edge], count)
        yield from (ready, *gauges.values(), steps, busy, computed, cached, audio)
        yield from (restarts, chunks, sent, requests, waiting, retry_after, ended, edge_chunks)
