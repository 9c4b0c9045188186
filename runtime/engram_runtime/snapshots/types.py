"""The seam of the snapshot service: what the engine and the server hand in and get back.

Plain data and two protocols, so that neither side imports the other: the executor implements `KVTransfer`, the engine
fills `Capture` and `RestoreQuery`, the server reads `SnapshotInfo`. Tensors appear in annotations only; importing this
module imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from engram_runtime.snapshots.io.s3.options import SCHEME, S3Options
from engram_runtime.snapshots.views import SnapshotOverview

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BOUNDARY_KINDS = ("user_start", "history", "turn_end", "next_history", "manual")
ITEM_BYTES: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1, "uint8": 1}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype (a torch dtype name such as "bfloat16") of one recurrent-state tensor, all layers stacked."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Canonical (unsharded) shapes of what a snapshot holds; everything read from a tier is checked against it.

    KV of tokens [a, b) is one contiguous tensor [L, 2, K, b-a, D]. `kv_layers` is 0 for a pure-state model, `states` is
    empty for a dense one.
    """

    kv_layers: int
    kv_heads: int
    head_dim: int
    kv_dtype: str
    states: Mapping[str, TensorSpec] = field(default_factory=dict)

    @property
    def kv_bytes_per_token(self) -> int:
        return self.kv_layers * 2 * self.kv_heads * self.head_dim * ITEM_BYTES[self.kv_dtype]

    @property
    def state_bytes(self) -> int:
        return sum(spec.nbytes for spec in self.states.values())


class KVTransfer(Protocol):
    """Moves bytes between the device and host tensors. Called on the service's and the engine's worker threads."""

    def read_kv(self, block_ids: Sequence[int], first: int, count: int) -> Tensor:
        """Tokens [first, first+count) of the sequence whose block table is `block_ids` -> host [L, 2, K, count, D],
        contiguous. L may be 0."""

    def read_state(self, slot: int) -> dict[str, Tensor]:
        """Host copies of a checkpoint slot: {"ssm": [layers, H, P, N], "conv": [layers, C, W-1]}; {} without state."""

    def write(
        self,
        block_ids: Sequence[int],
        kv: Sequence[tuple[int, Tensor]],
        state_slot: int | None,
        state: dict[str, Tensor],
    ) -> int:
        """All of a restore, the inverse of read_kv and read_state: (first token, packed) pieces, and a state unless
        `state_slot` is None.

        Returns, before all of it is there, a number to give to the step that reads it (`StepPlan.after`); 0 when
        nothing has to be waited for. `settle` is still to be called.
        """

    def settle(self) -> None:
        """Returns when what the calling thread wrote is there. SnapshotError when its bytes were damaged on the host,
        as far as the device can tell (see HostMemory)."""


class HostMemory(Protocol):
    """Where the host tier's tensors lie: memory that the device copies fast, where there is a device."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised host tensor."""

    def is_sealed(self, tensor: Tensor) -> bool:
        """Whether the device itself will check these bytes when they are written to it."""


@dataclass(frozen=True, slots=True)
class RestoreQuery:
    """What the engine asks for before it admits a request."""

    tenant: str
    token_ids: Sequence[int]  # the whole prompt
    candidates: tuple[int, ...] = ()  # positions where an anchor may exist, most promising first
    min_position: int = 0  # the GPU tier already restores this many tokens: only a longer prefix is of use
    max_position: int | None = None  # default len(token_ids) - 1: one token must be left to forward
    kv_from: int = 0  # KV of tokens [0, kv_from) is already on the GPU and need not be fetched
    restore_from: str | None = None  # a snapshot id
    conversation_id: str | None = None
    branch_name: str = "main"
    needs_state: bool = False  # a hybrid or pure-state model: exact positions only, KV and state together or nothing
    prefill_tokens_per_second: float | None = None  # with it, a restore slower than prefilling is refused (a Miss)
    deadline_seconds: float | None = None  # default SnapshotConfig.restore_deadline_seconds


@dataclass(frozen=True, slots=True)
class Fetched:
    """A verified prefix, on the host, ready to be scattered."""

    snapshot_id: str
    position: int  # tokens [0, position) are covered by kv (from kv_from on) and, if needed, by state
    kv: list[tuple[int, Tensor]]  # (start, packed [L, 2, K, n, D], a view maybe), gapless over [kv_from, position)
    state: dict[str, Tensor] | None  # exact at `position`; None for a dense model
    tier: str  # slowest tier that was read: "host", "disk" or "store"
    bytes: int
    milliseconds: float
    conversation_id: str
    branch_name: str
    turn_number: int
    boundary: str  # the snapshot's; "user_start" where only what lies before its end was used
    note: str = ""  # what was tried before and could not be used


@dataclass(frozen=True, slots=True)
class Miss:
    """Nothing usable was found; the engine prefills. `reason` is for people and is always set."""

    reason: str
    failed: bool = False  # True: something was there (or explicitly named) and could not be used (restore_failed)
    head_turn: int = 0  # turn of the branch's head, where that was read: the conversation goes on from there


@dataclass(frozen=True, slots=True)
class SaveResult:
    """What became of a Capture."""

    snapshot_id: str
    branch_name: str  # differs from the capture's when another writer moved the head first
    tiers: tuple[str, ...]  # where it is now; () when it was dropped
    reason: str = ""  # why it was dropped or is missing from a tier; "" when all went well


@dataclass(slots=True)
class Capture:
    """A boundary to save. The engine keeps blocks and slot alive until `release` is called (exactly once, on any
    outcome, on a worker thread or inside save())."""

    tenant: str
    conversation_id: str
    branch_name: str
    turn_number: int
    boundary: str  # one of BOUNDARY_KINDS
    snapshot_id: str  # policy.ids.new_id()
    parent_id: str | None
    token_ids: Sequence[int]  # at least the `position` forwarded tokens; more are ignored
    pending_ids: Sequence[int]  # sampled but not forwarded
    position: int  # forwarded tokens, > 0
    block_ids: Sequence[int]
    state_slot: int | None  # checkpoint slot whose state is exact at `position`
    release: Callable[[], None]
    user_start: int | None = None  # where the last user message begins: pieces are cut and anchored there
    start_slot: int | None = None  # checkpoint slot whose state is exact at `user_start`, to be kept besides
    messages: bytes | None = None
    tokenizer_digest: str = ""
    template_digest: str = ""
    pin: bool = False
    tag: str | None = None
    ttl_seconds: int | None = None
    durable: bool = True  # False: host tier only, until save_now() or a drain makes it durable
    on_done: Callable[[SaveResult], None] | None = None


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """Manifest summary, as the REST calls show it. Times are Unix seconds."""

    snapshot_id: str
    parent_id: str | None
    conversation_id: str
    branch_name: str
    turn_number: int
    boundary: str
    tokens: int  # forwarded
    pending: int
    bytes: int  # KV (shared pieces included) and state
    tiers: tuple[str, ...]
    created: float
    expires: float | None
    pinned: bool
    tag: str | None
    state_abi: str
    is_head: bool = False


@dataclass(frozen=True, slots=True)
class SnapshotContent:
    """What a delta request or `restore_from` continues from."""

    token_ids: list[int]
    pending_ids: list[int]
    messages: bytes | None
    tokenizer_digest: str
    template_digest: str


@dataclass(frozen=True, slots=True)
class Page:
    items: list[SnapshotInfo]
    next_after: str | None  # pass as `after` for the next page; None at the end


@dataclass(frozen=True, slots=True)
class Event:
    cursor: str  # opaque, ordered; pass the last one seen as `after`
    kind: str  # "saved" | "deleted"
    snapshot_id: str
    time: float
    info: SnapshotInfo | None


@dataclass(frozen=True, slots=True)
class EventPage:
    events: list[Event]
    cursor: str  # where to go on, even when there was no event


@dataclass(frozen=True, slots=True)
class TierStatus:
    """One tier's condition, as status and /metrics show it."""

    name: str
    ready: bool
    reason: str  # CamelCase word, "Ready" when ready
    message: str
    bytes: int = 0
    capacity: int | None = None
    objects: int = 0
    read_bytes_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class PrefetchReport:
    snapshot_id: str
    bytes: int
    milliseconds: float
    tier: str  # where the bytes came from


@dataclass(frozen=True, slots=True)
class FsckProblem:
    kind: str  # "damaged" | "forged" | "missing" | "dangling" | "orphan" | "unknown" | "foreign"
    key: str
    message: str
    repaired: bool = False


@dataclass(frozen=True, slots=True)
class FsckReport:
    """Everything `engram snapshots fsck` found in one tier."""

    tier: str
    snapshots: int
    kv_files: int
    bytes: int
    problems: list[FsckProblem]

    @property
    def ok(self) -> bool:
        """Orphans are leftovers that the next sweep takes, and what another key signed is another's."""
        return all(problem.kind in ("orphan", "foreign") for problem in self.problems)


@dataclass(frozen=True, slots=True)
class SweepReport:
    snapshots_deleted: int
    files_deleted: int
    bytes_deleted: int


@dataclass(frozen=True, slots=True)
class SnapshotConfig:
    """Start-up configuration, validated (ValueError names the field). Sizes in bytes, times in seconds."""

    enabled: bool = True
    tenant_key: bytes = b""  # at least 32 bytes when enabled; scopes and signs everything
    host_bytes: int = 1 << 30
    disk_path: Path | None = None
    disk_bytes: int = 20 << 30
    store_uri: str | None = None  # file:///absolute/path or s3://BUCKET[/PREFIX]
    s3: S3Options | None = None  # how to reach an s3:// store_uri; default S3Options.parse(store_uri)
    verify: bool = True  # False only for tamper tests: damaged bytes are then really injected
    queue_captures: int = 64
    save_workers: int = 2
    restore_deadline_seconds: float = 10.0
    keep_last: int = 1
    max_age_seconds: float | None = 30 * 86400.0
    max_conversations: int | None = None
    max_total_bytes: int | None = None
    gc_interval_seconds: float = 3600.0  # 0: no sweeper thread
    gc_grace_seconds: float = 3600.0  # objects younger than this are never swept
    suspend_gc: bool = False

    def __post_init__(self) -> None:
        if not self.enabled:
            return
        if len(self.tenant_key) < 32:
            raise ValueError(f"tenant_key must be at least 32 bytes, got {len(self.tenant_key)}")
        for name in ("host_bytes", "disk_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        for name in ("queue_captures", "save_workers", "keep_last"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("max_age_seconds", "max_conversations", "max_total_bytes", "restore_deadline_seconds"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be > 0, got {value}")
        for name in ("gc_interval_seconds", "gc_grace_seconds"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        if self.store_uri is not None and not self.store_uri.startswith(("file:///", SCHEME)):
            raise ValueError(f"store_uri must be file:///absolute/path or s3://BUCKET[/PREFIX], got {self.store_uri!r}")
        if self.store_uri is not None and self.store_uri.startswith(SCHEME):
            named = S3Options.parse(self.store_uri)
            if self.s3 is not None and self.s3.uri != named.uri:
                raise ValueError(f"s3 must be options of {named.uri}, got those of {self.s3.uri}")
        elif self.s3 is not None:
            raise ValueError("s3 must not be set without an s3:// store_uri")


class Snapshots(Protocol):
    """`service.SnapshotService` as its users see it; every call may come from any thread.

    Made by `SnapshotService(config, state_abi=..., layout=StateLayout(...), transfer=KVTransfer)`.

    Calls that name a snapshot raise errors.NotFound for an unknown, deleted, expired or foreign one, and ValueError
    (field first) for an id that is not one. find() and save() never raise for trouble in a tier.
    """

    @property
    def overview(self) -> SnapshotOverview:
        """All tenants at once, for the administrator's port."""

    def find(self, query: RestoreQuery) -> Fetched | Miss:
        """Blocking; call it on a worker thread."""

    def save(self, capture: Capture) -> None:
        """Enqueue and return; with a full queue the capture is dropped, counted, released, and on_done says so."""

    def resolve(
        self, tenant: str, conversation_id: str, turn_number: int | None = None, branch_name: str = "main"
    ) -> SnapshotInfo:
        """The branch's head, or the newest snapshot of that turn ("conversation:turn" selectors)."""

    def get(self, tenant: str, snapshot_id: str) -> SnapshotInfo: ...

    def content(self, tenant: str, snapshot_id: str) -> SnapshotContent: ...

    def list(
        self,
        tenant: str,
        *,
        conversation_id: str | None = None,
        branch_name: str | None = None,
        limit: int = 50,
        after: str | None = None,
    ) -> Page:
        """Newest first; 1 <= limit <= 500."""

    def events(self, tenant: str, *, after: str | None = None, limit: int = 500) -> EventPage: ...

    def delete(self, tenant: str, snapshot_id: str) -> SnapshotInfo:
        """Gone (404) in every tier when this returns; its bytes go with the next sweep."""

    def set_head(self, tenant: str, snapshot_id: str) -> SnapshotInfo: ...

    def prefetch(self, tenant: str, snapshot_id: str) -> PrefetchReport:
        """Bring everything the snapshot needs to the host tier (SnapshotError when it cannot be)."""

    def save_now(
        self,
        tenant: str,
        conversation_id: str,
        *,
        turn_number: int | None = None,
        branch_name: str = "main",
        tag: str | None = None,
        pin: bool | None = None,
        ttl_seconds: int | None = None,
    ) -> SnapshotInfo:
        """Make the newest snapshot of the conversation (or turn) durable, and label it."""

    def fsck(self, *, repair: bool = False) -> Sequence[FsckReport]: ...

    def sweep(self) -> SweepReport:
        """Apply retention and collect garbage now."""

    def status(self) -> Sequence[TierStatus]: ...

    def counters(self) -> dict[str, float]: ...

    def gathered(self, deadline_seconds: float) -> bool:
        """Wait until every capture handed over so far can be found; False when that took too long."""

    def flush(self, deadline_seconds: float) -> bool:
        """Wait for every queued save (and make host-only tips durable); True when all of it is done in time."""

    def close(self) -> None: ...
