"""Brings the pieces and the state of a snapshot to the host: cheapest tier first, one read per object however many ask.

Everything is verified before it is handed out or kept. A damaged copy on a disk in front of a store is deleted, so that
the store's can take its place; a damaged object on the last tier is left for fsck to see, and remembered, so that the
next save writes it again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from engram_runtime.errors import NotFound, SnapshotError
from engram_runtime.snapshots.catalogue import Record
from engram_runtime.snapshots.flight import SingleFlight
from engram_runtime.snapshots.io import digest, tensors
from engram_runtime.snapshots.io.host_tier import START_STATE, STATE, ItemKey
from engram_runtime.snapshots.io.store import StoreUnavailable
from engram_runtime.snapshots.policy.manifest import START, PieceRef
from engram_runtime.snapshots.shared import Shared
from engram_runtime.snapshots.tiers import Tier

log = logging.getLogger(__name__)
PARALLEL_READS = 8
TIER_ORDER = ("host", "disk", "store")

Value = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Loaded:
    """KV pieces by their reference, and the state; `tier` is the slowest one read, `store_used` asks for promotion."""

    pieces: Mapping[PieceRef, Tensor]
    state: dict[str, Tensor] | None
    tier: str
    nbytes: int


class Loader:
    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._flights: SingleFlight[tuple[Value, str]] = SingleFlight()
        self._pool = ThreadPoolExecutor(PARALLEL_READS, thread_name_prefix="engram-load")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def pool(self) -> ThreadPoolExecutor:
        return self._pool

    def estimate(self, record: Record, pieces: tuple[PieceRef, ...], position: int) -> float:
        """Seconds that load() would take, by measured speeds."""
        needs = dict.fromkeys(TIER_ORDER, 0)
        for ref in pieces:
            needs[self._nearest(record, ItemKey(record.space, ref.file, ref.tensor))] += ref.nbytes
        if self._shared.layout.states:
            key = state_key(record, position)
            needs[self._nearest(record, key)] += self._shared.layout.state_bytes
        speeds = {"host": self._shared.host_speed, **{tier.name: tier.speed for tier in self._shared.tiers}}
        return sum(speeds[tier].estimate(nbytes) for tier, nbytes in needs.items() if nbytes and tier in speeds)

    def relax(self) -> None:
        """A load was refused on the word of the estimate."""
        for speed in (self._shared.host_speed, *(tier.speed for tier in self._shared.tiers)):
            speed.relax()

    def load(self, record: Record, pieces: tuple[PieceRef, ...], position: int, deadline: float) -> Loaded:
        """All or nothing, with the state at `position`. SnapshotError with the reason; TimeoutError when `deadline`
        (monotonic) passes."""
        work: list[tuple[PieceRef | None, Future[tuple[Value, str]]]] = []
        for ref in pieces:
            key = ItemKey(record.space, ref.file, ref.tensor)
            work.append((ref, self._at_hand(key) or self._pool.submit(self._piece, record, ref)))
        if self._shared.layout.states:
            key = state_key(record, position)
            work.append((None, self._at_hand(key) or self._pool.submit(self._state, record, position)))
        found: dict[PieceRef, Tensor] = {}
        state: dict[str, Tensor] | None = None
        slowest, nbytes = "host", 0
        try:
            for ref_or_none, future in work:
                value, tier = future.result(max(0.0, deadline - time.monotonic()))
                if ref_or_none is None:
                    state = dict(value)
                else:
                    found[ref_or_none] = value["kv"]
                nbytes += sum(tensors.nbytes(tensor) for tensor in value.values())
                slowest = max(slowest, tier, key=TIER_ORDER.index)
        finally:
            for _, future in work:
                future.cancel()
        return Loaded(found, state, slowest, nbytes)

    def _at_hand(self, key: ItemKey) -> Future[tuple[Value, str]] | None:
        """What the host has and need not look at, since the device checks it: handing it to a thread takes longer."""
        value = self._shared.host.get(key)
        if value is None or not (
            all(map(self._shared.memory.is_sealed, value.values())) or not self._shared.config.verify
        ):
            return None
        done: Future[tuple[Value, str]] = Future()
        done.set_result((value, "host"))
        return done

    def _nearest(self, record: Record, key: ItemKey) -> str:
        if key in self._shared.host:
            return "host"
        for tier in self._shared.tiers:
            if tier.name in record.tiers:
                return tier.name
        return self._shared.tiers[-1].name if self._shared.tiers else "host"

    def _piece(self, record: Record, ref: PieceRef) -> tuple[Value, str]:
        key = ItemKey(record.space, ref.file, ref.tensor)
        what = f"KV tokens [{ref.start}, {ref.end})"

        def verify(value: Value) -> None:
            digest.check(tensors.view_bytes(value["kv"]), ref.digest, f"{what} on the host tier")

        def read(tier: Tier) -> Value:
            try:
                return {"kv": tier.repository.read_piece(record.space, ref)}
            except NotFound:
                # Taken behind our back: that its snapshot is there says nothing any more.
                tier.repository.forget(record.space.kv(ref.file), damaged=True)
                raise

        def damaged(tier: Tier) -> None:
            path = record.space.kv(ref.file)
            tier.repository.forget(path, damaged=True)
            if tier is not self._shared.authority:
                tier.repository.store.delete(path)

        return self._flights.run((key, "piece"), lambda: self._from_tiers(key, what, ref.nbytes, verify, read, damaged))

    def _state(self, record: Record, position: int) -> tuple[Value, str]:
        key = state_key(record, position)
        shared = self._shared
        prefix = START if key.tensor == START_STATE else ""

        def verify(value: Value) -> None:
            for name in shared.layout.states:
                ref = record.manifest.tensor(prefix + name)
                if ref is None:
                    raise SnapshotError(f"state {prefix}{name} is not in the manifest")
                digest.check(tensors.view_bytes(value[name]), ref.digest, f"state {ref.name} on the host tier")

        def read(tier: Tier) -> Value:
            return tier.repository.read_state(tier.repository.open_snapshot(record.space, record.snapshot_id), prefix)

        def damaged(tier: Tier) -> None:
            if tier is not self._shared.authority:
                tier.repository.store.delete(record.space.snapshot(record.snapshot_id))
            record.tiers.discard(tier.name)

        nbytes = shared.layout.state_bytes
        return self._flights.run(key, lambda: self._from_tiers(key, "state", nbytes, verify, read, damaged))

    def _from_tiers(
        self,
        key: ItemKey,
        what: str,
        nbytes: int,
        verify: Callable[[Value], None],
        read: Callable[[Tier], Value],
        damaged: Callable[[Tier], None],
    ) -> tuple[Value, str]:
        shared = self._shared
        reasons: list[str] = []
        value = shared.host.get(key)
        if value is not None:
            started = time.perf_counter()
            try:
                if shared.config.verify and not all(map(shared.memory.is_sealed, value.values())):
                    verify(value)
                shared.host_speed.observe(nbytes, time.perf_counter() - started)
                return value, "host"
            except SnapshotError as error:
                shared.host.remove(key)
                shared.counters.add("damaged.host")
                reasons.append(str(error))
        for tier in shared.tiers:
            started = time.perf_counter()
            try:
                with tier.reading():
                    value = read(tier)
            except NotFound:
                reasons.append(f"{what} is not on the {tier.name} tier")
                continue
            except StoreUnavailable as error:
                reasons.append(f"{tier.name}: {error.public}")
                continue
            except SnapshotError as error:
                log.warning("tier %s: %s", tier.name, error)
                shared.counters.add(f"damaged.{tier.name}")
                reasons.append(f"{tier.name}: {error}")
                try:
                    with tier.writing():
                        damaged(tier)
                except SnapshotError:
                    pass
                continue
            tier.speed.observe(nbytes, time.perf_counter() - started)
            shared.host.put(key, value)
            return value, tier.name
        raise SnapshotError("; ".join(reasons) or f"{what} was evicted from the host tier")


def state_key(record: Record, position: int) -> ItemKey:
    """Of the record's state at `position`: its own end, or user_start."""
    at_start = position == record.manifest.start_position
    return ItemKey(record.space, record.snapshot_id, START_STATE if at_start else STATE)
