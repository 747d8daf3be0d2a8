"""The events of the bus: one tagged union of msgspec Structs, MessagePack on the wire.

A ZeroMQ message is `[route][header][payload frames…]`: the route is the peer's identity at the broker's ROUTER socket, the header
one event of this file, and the payload frames belong to Chunk, Submit and Append only: frame 0 is the encoded payload Struct,
the following frames are the bytes of inline tensors in the order of `refs`. The broker never looks into payload frames.

Ids: `ticket` numbers a request on one client's connection, made by BusClient. `request` is the broker's own number for one
attempt at it; a retry gets a new one. Neither comes from outside.
"""

from __future__ import annotations

import msgspec

from omni_bus.errors import ErrorInfo
from omni_bus.sampling import SamplingParams

PROTOCOL = 1
INTERACTIVE, BATCH = PRIORITIES = ("interactive", "batch")  # of requests
REQUEST, SESSION = "request", "session"  # what a client may have so many of at a time
CLIENT = "client"  # the pseudo stage at both ends of every pipeline


class TensorRef(msgspec.Struct, frozen=True, array_like=True):
    """Where the bytes of one tensor lie. Made by a connector's `put`, resolved by its `get` at the consumer.

    inline: `offset` is the index of the payload frame. shm, cuda_ipc: `segment` names the pooled segment, `offset` the first byte
    in it, `generation` the slot's generation at `put` (a reader that finds another one raises StaleTensor); cuda_ipc: `segment` is the
    buffer's control page, and `fence` the number of the slot's events on it. local: `segment` is "" and `generation` the key in the
    process's table. tcp: `segment` names the sending process, `generation` numbers its tensors, `offset` is the slot's place in its pool.
    """

    name: str
    connector: str
    dtype: str  # torch's name without the prefix: "float32", "int16", "bfloat16"
    shape: tuple[int, ...]
    nbytes: int
    segment: str = ""
    offset: int = 0
    generation: int = 0
    fence: int = 0


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asks of every stage, validated by the API; sent to each stage in Open."""

    modalities: tuple[str, ...] = ("text",)  # wanted outputs: "text", "audio"
    voice: str | None = None
    seed: int | None = None
    sampling: dict[str, SamplingParams] = {}  # by stage name
    prepare: bool = False  # compute and keep what a later request with the same beginning needs, and make no output
    priority: str = INTERACTIVE  # which of PRIORITIES, where requests have to wait for each other
    affinity: str = ""  # made by the API: requests with the same one go to replicas that know the earlier ones, where it pays


class EdgeRoute(msgspec.Struct, frozen=True, array_like=True):
    """How a producer sends on one output edge of one request, decided by the broker from where both ends run."""

    edge: str
    connector: str  # inline | local | shm | cuda_ipc | tcp: for large tensors (cuda_ipc: for all on a GPU); others go inline
    credits: int  # chunks that may be unconsumed before the producer pauses
    to: str = ""  # tcp: the consumer's data socket, as `Register.data` has it


class StageLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A stage replica's figures in each Heartbeat; counters are totals since the process started."""

    stage: str
    waiting: int = 0
    running: int = 0
    queued: int = 0  # work that is here and not done: prompt positions of an autoregressive stage, codec frames of a vocoder
    per_step: int = 0  # as much of it as one step does; 0: the stage does not say
    batch: int = 0  # rows in the last step
    steps: int = 0
    busy_s: float = 0.0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    prompt_computed: int = 0  # prompt positions
    prompt_cached: int = 0  # those whose KV was there already
    slots_used: int = 0
    slots_total: int = 0
    segments_used: int = 0  # connector slots handed out and not yet returned
    chunks: dict[str, int] = {}  # "edge|connector" → chunks sent
    bytes: dict[str, int] = {}  # "edge|connector" → bytes sent
    streams: int = 0  # requests here that end in speech, and so are bound to real time
    lead_s: float | None = (
        None  # smallest playback lead of those that are being spoken; None: none is, or the stage makes no audio
    )
    audio_s: float = 0.0  # sent to clients
    held: int = 0  # entries in the worker's tables: its requests, and the process's open edges, unconsumed and waiting chunks


class StageReplica(msgspec.Struct, frozen=True, array_like=True):
    """One stage that a registering worker process hosts."""

    stage: str
    device: str
    capacity: int  # requests it runs at once


class Event(msgspec.Struct, frozen=True, tag=True, tag_field="t"):
    """Base of the union."""


# ---- client → broker


class Hello(Event, frozen=True):
    """First message of a client or supervisor connection."""

    role: str  # "client" | "supervisor"
    protocol: int = PROTOCOL


class Submit(Event, frozen=True):
    """A new request; its payload frames are the first chunk on the entry edge (seq 0)."""

    ticket: int
    label: str  # for logs only
    options: RequestOptions
    deadline_s: float  # from arrival at the broker
    refs: tuple[TensorRef, ...] = ()
    last: bool = True  # False: Append follows


class Append(Event, frozen=True):
    """Streamed input: the next chunk on the entry edge."""

    ticket: int
    seq: int
    refs: tuple[TensorRef, ...] = ()
    last: bool = False


class CancelRequest(Event, frozen=True):
    ticket: int


class Lease(Event, frozen=True):
    """One more request or voice session of a client; answered with Leased or LeaseRefused. Ends with Release, or with the connection.

    `renewed`: a broker that has ended had granted it, and it is not asked for again but told.
    """

    lease: int  # numbered by the process that asks
    kind: str  # REQUEST | SESSION
    client: str  # a name made by the API: of a key, or of an address; never what a client sent
    renewed: bool = False


class Release(Event, frozen=True):
    lease: int


class StatusQuery(Event, frozen=True):
    """Answered with Status; `watch`: also at every change of a replica's state (the supervisor's progress lines)."""

    query: int
    watch: bool = False


class Exited(Event, frozen=True):
    """supervisor → broker: a worker process ended. Its replicas are lost and their requests failed or retried."""

    worker: str


class Expect(Event, frozen=True):
    """supervisor → broker: a worker process of this name is being started, and is to be known while it loads and when it is lost."""

    worker: str
    replicas: tuple[StageReplica, ...]


class DrainWorker(Event, frozen=True):
    """supervisor → broker: give that worker nothing new; it gets Shutdown once nothing is bound to it, or after `grace_s` seconds.

    What is still bound to it then is as if it had been lost. Afterwards it is forgotten.
    """

    worker: str
    grace_s: float


class StopServing(Event, frozen=True):
    """supervisor → broker: refuse new requests, end the running ones, then send Shutdown to the workers and clients."""

    grace_s: float = 2.0


# ---- broker → client


class Welcome(Event, frozen=True):
    """Answers Hello of a client: the connection stands. credits: edges to and from the client → chunks that may be unconsumed."""

    credits: dict[str, int]


class Ping(Event, frozen=True):
    """Asks nothing. Sent after some peer's connection closed: a send to a peer that is gone fails, and so tells which one it was."""


class Delta(Event, frozen=True):
    """A chunk for the client, with payload frames as in Chunk."""

    ticket: int
    edge: str
    seq: int
    last: bool
    refs: tuple[TensorRef, ...] = ()


class Completed(Event, frozen=True):
    """The request ended well. usage: stage name → figure → value (prompt_tokens, completion_tokens, frames, …).

    first_chunks: edge → seconds from the request's arrival at the broker to the first chunk that a stage sent on it.
    """

    ticket: int
    usage: dict[str, dict[str, int]] = {}
    first_chunks: dict[str, float] = {}


class RequestFailed(Event, frozen=True):
    ticket: int
    error: ErrorInfo


class Leased(Event, frozen=True):
    lease: int


class LeaseRefused(Event, frozen=True):
    lease: int
    error: ErrorInfo


class RequestCancelled(Event, frozen=True):
    """Every stage has acknowledged the cancel: nothing of the request is left anywhere."""

    ticket: int


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    stage: str
    worker: str
    pid: int
    host: str
    device: str
    state: str  # starting | loading | ready | draining | lost
    progress: float = 0.0
    detail: str = ""
    requests: int = 0
    restarts: int = 0
    load: StageLoad | None = None
    streams: int = 0  # requests that end in speech, by the broker's own count
    predicted_rtf: float | None = None  # of its process with one more of them; None: nothing was measured yet


class Status(Event, frozen=True, kw_only=True):
    query: int
    pipeline: str
    ready: bool
    missing: tuple[str, ...]  # stages without a ready replica
    replicas: tuple[ReplicaStatus, ...]
    requests: dict[str, int]  # request state → how many now
    ended: dict[str, int]  # "done", "cancelled", "failed:<code>" → how many since start
    stopping: bool = False  # nothing new is taken any more
    waiting: dict[str, int] = {}  # priority → requests that wait for their start
    retry_after_s: float = 0.0  # what the next request would be told if it were refused
    edge_chunks: dict[str, int] = {}
    edge_bytes: dict[str, int] = {}  # "edge|connector" → bytes of the edge that no worker sends on: the entry edge
    uptime_s: float = 0.0


# ---- both directions between client/worker and broker


class Consumed(Event, frozen=True):
    """`count` more chunks of (request, edge) were consumed: the producer gets that many credits and its tensor slots back.

    From and to a client, `request` is its ticket.
    """

    request: int
    edge: str
    count: int = 1


# ---- broker → worker


class Open(Event, frozen=True, kw_only=True):
    """A request is bound to this stage replica; may come before its first chunk."""

    request: int
    stage: str
    options: RequestOptions
    deadline_s: float  # seconds left
    inputs: tuple[str, ...]
    outputs: tuple[EdgeRoute, ...]


class Attached(Event, frozen=True):
    """Answers Attach: what a worker on another host needs to serve. Sent over CURVE only, as it carries a key."""

    server: str  # the server's id: another one has other keys, and perhaps another deployment
    deployment: bytes  # JSON of a Deployment, without what concerns the API and its keys
    data_public: str  # the key pair of all data sockets of this server, Z85
    data_secret: str


class Refused(Event, frozen=True):
    """Answers Attach or Register: this worker cannot serve here. `error.code` is "other_server" where it may attach anew."""

    error: ErrorInfo


class Chunk(Event, frozen=True):
    """One chunk on one edge of one request; seq counts from 0 for each (request, edge); `last` closes the edge."""

    request: int
    edge: str
    seq: int
    last: bool
    refs: tuple[TensorRef, ...] = ()


class Close(Event, frozen=True):
    """The request ended well everywhere: forget it."""

    request: int
    stage: str


class Cancel(Event, frozen=True):
    """Free all that the request holds in this stage, then answer Cancelled. Also sent to every stage after a failure."""

    request: int
    stage: str


class Drain(Event, frozen=True):
    """Finish what is open; nothing new will come. for_good: nor is the worker to come back, as an operator took it away."""

    for_good: bool = False


class Shutdown(Event, frozen=True):
    """Leave now, in order."""


# ---- worker → broker


class Attach(Event, frozen=True, kw_only=True):
    """First message of a command that brings workers from another host; asks for Attached, and binds nobody."""

    stages: tuple[str, ...]
    pipeline: str = ""  # the one it wants to serve; "" = whichever it is
    version: str = ""  # of omni-bus there
    protocol: int = PROTOCOL


class Leave(Event, frozen=True):
    """A worker wants to go: it is given nothing new, and Shutdown once all that it holds has ended."""


class Register(Event, frozen=True, kw_only=True):
    worker: str  # the process's name, e.g. "thinker.0", or "talker@gpu2-3f9a1c.0"; also its identity at the broker
    pid: int
    host: str
    boot: str  # boot id: same host and boot → shm reaches
    replicas: tuple[StageReplica, ...]
    protocol: int = PROTOCOL
    version: str = ""  # of omni-bus there; it and the following two must be said by a worker on another host
    pipeline: str = ""
    server: str = ""  # the server's id, from Attached
    data: str = ""  # endpoint of its data socket; "*" as the host means the broker's; "" = it has none


class Load(Event, frozen=True):
    """Progress of a stage's start: fraction 0..1 and what it is doing."""

    stage: str
    fraction: float
    detail: str


class Ready(Event, frozen=True):
    stage: str
    capacity: int


class Done(Event, frozen=True):
    request: int
    stage: str
    usage: dict[str, int] = {}


class Failed(Event, frozen=True):
    request: int
    stage: str
    error: ErrorInfo


class Cancelled(Event, frozen=True):
    """KV blocks, slots and shared memory of the request are free in this stage."""

    request: int
    stage: str


class Heartbeat(Event, frozen=True):
    """Sent every `bus.heartbeat_s`, and sooner where a load has changed enough to matter for who gets the next request."""

    loads: tuple[StageLoad, ...]


ClientToBroker = (
    Hello
    | Submit
    | Append
    | CancelRequest
    | Consumed
    | StatusQuery
    | Lease
    | Release
    | Exited
    | Expect
    | DrainWorker
    | StopServing
)
BrokerToClient = (
    Welcome | Ping | Delta | Consumed | Completed | Leased | LeaseRefused | RequestFailed | RequestCancelled | Status | Shutdown
)
BrokerToWorker = Open | Chunk | Consumed | Close | Cancel | Drain | Shutdown | Ping | Attached | Refused
WorkerToBroker = Attach | Leave | Register | Load | Ready | Chunk | Consumed | Done | Failed | Cancelled | Heartbeat
