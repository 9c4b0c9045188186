"""What this process knows about snapshots, in memory: manifests and token ids, never payloads.

It answers the common question, "which snapshot shares the longest prefix with this prompt", without touching a disk, by
the same chain keys that name objects in a store. It is a cache: everything in it can be read again, except snapshots
that live on the host tier only.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from engram_runtime.snapshots.policy.identity import SEGMENT_TOKENS, TokenChain, common_prefix
from engram_runtime.snapshots.policy.keys import Space
from engram_runtime.snapshots.policy.manifest import Manifest, PieceRef
from engram_runtime.snapshots.policy.records import Label, effective_expiry

FINE_GRID = 16  # inside the first segment, so that short chats are found too
FINE_NAMES = (SEGMENT_TOKENS - 1) // FINE_GRID
MAX_BUCKET = 64
MAX_GONE = 1 << 16
RECORD_TOKENS = 2048  # what a record costs besides its token ids (keys, manifest, index), in ids of 4 bytes


@dataclass(slots=True)
class Record:
    """One snapshot. `tiers` says where it was last known to be durable."""

    space: Space
    manifest: Manifest
    tokens: array[int]
    tenant: str
    tiers: set[str] = field(default_factory=set)
    own: bool = False  # written by this process
    adopted: bool = False  # another process wrote it, and its head was seen to be right
    level: bool = False  # known to be on every durable tier
    messages: bytes | None = None  # kept only while there is no durable copy
    label: Label | None = None
    segments: tuple[bytes, ...] = ()  # of its token chain: hashed once, though every turn begins with the same tokens

    @property
    def snapshot_id(self) -> str:
        return self.manifest.snapshot_id

    @property
    def pinned(self) -> bool:
        return self.manifest.pinned if self.label is None or self.label.pinned is None else self.label.pinned

    @property
    def tag(self) -> str | None:
        return self.manifest.tag if self.label is None or self.label.tag is None else self.label.tag

    @property
    def expires(self) -> float | None:
        return effective_expiry(self.manifest.expires, self.label)

    def expired(self, now: float) -> bool:
        expires = self.expires
        return expires is not None and expires <= now and not self.pinned


class Catalogue:
    """Thread-safe. Bounded by tokens held, RECORD_TOKENS a record besides its own; least recently used records go
    first, host-only ones last."""

    def __init__(self, max_tokens: int = 1 << 26) -> None:
        self._max_tokens = max_tokens
        self._lock = threading.RLock()
        self._records: OrderedDict[tuple[Space, str], Record] = OrderedDict()
        self._tokens = 0
        self._buckets: dict[Space, dict[str, OrderedDict[str, None]]] = {}
        self._keys: dict[tuple[Space, str], list[str]] = {}
        self._pieces: dict[Space, dict[tuple[int, str], PieceRef]] = {}
        self._conversations: dict[tuple[Space, str], dict[str, Record]] = {}
        self._gone: OrderedDict[tuple[Space, str], None] = OrderedDict()
        self._aliases: OrderedDict[tuple[Space, str], str] = OrderedDict()

    def add(self, record: Record, chain: TokenChain) -> Record | None:
        """Insert or replace; None when the snapshot was deleted meanwhile. `chain` covers the record's tokens."""
        key = (record.space, record.snapshot_id)
        with self._lock:
            if key in self._gone:
                return None
            self._drop(key)
            self._records[key] = record
            self._tokens += len(record.tokens) + RECORD_TOKENS
            group = (record.space, record.manifest.conversation_id)
            self._conversations.setdefault(group, {})[record.snapshot_id] = record
            pieces = self._pieces.setdefault(record.space, {})
            for piece in record.manifest.pieces:
                if piece.end == piece.tensor_end:
                    pieces[piece.start, piece.chain] = piece
            buckets = self._buckets.setdefault(record.space, {})
            names = self._keys[key] = self._names(record, chain, buckets)
            record.segments = chain.segments
            for name in names:
                bucket = buckets.get(name)
                if bucket is None:
                    bucket = buckets[name] = OrderedDict()
                bucket[record.snapshot_id] = None
                if len(bucket) > MAX_BUCKET:
                    bucket.popitem(last=False)
            self._shrink(key)
            return record

    def alias(self, space: Space, snapshot_id: str, existing: str) -> None:
        """`snapshot_id` was announced, but `existing` already is the same content."""
        with self._lock:
            self._aliases[space, snapshot_id] = existing
            if len(self._aliases) > MAX_GONE:
                self._aliases.popitem(last=False)

    def canonical_id(self, space: Space, snapshot_id: str) -> str:
        with self._lock:
            return self._aliases.get((space, snapshot_id), snapshot_id)

    def get(self, space: Space, snapshot_id: str) -> Record | None:
        with self._lock:
            key = (space, self._aliases.get((space, snapshot_id), snapshot_id))
            record = self._records.get(key)
            if record is not None:
                self._records.move_to_end(key)
            return record

    def remove(self, space: Space, snapshot_id: str) -> Record | None:
        """Forget it; it may be learnt again."""
        with self._lock:
            return self._drop((space, snapshot_id))

    def mark_gone(self, space: Space, snapshot_id: str) -> Record | None:
        """Deleted: it must not come back, whatever is still in flight or on some tier."""
        key = (space, snapshot_id)
        with self._lock:
            self._gone[key] = None
            if len(self._gone) > MAX_GONE:
                self._gone.popitem(last=False)
            return self._drop(key)

    def is_gone(self, space: Space, snapshot_id: str) -> bool:
        with self._lock:
            return (space, snapshot_id) in self._gone

    def piece(self, space: Space, start: int, chain: str) -> PieceRef | None:
        """A piece that begins at `start` and ends where the chain key is `chain`."""
        with self._lock:
            return self._pieces.get(space, {}).get((start, chain))

    def conversation(self, space: Space, conversation_id: str) -> list[Record]:
        with self._lock:
            return list(self._conversations.get((space, conversation_id), {}).values())

    def newest(self, space: Space, conversation_id: str) -> Record | None:
        """The longest that is known of a conversation."""
        return max(self.conversation(space, conversation_id), key=lambda r: r.manifest.forwarded, default=None)

    def records(self, space: Space | None = None) -> list[Record]:
        with self._lock:
            return [record for record in self._records.values() if space is None or record.space == space]

    def matches(
        self, space: Space, chain: TokenChain, limit: int, *, exact: bool, positions: Iterable[int] = ()
    ) -> list[tuple[Record, int]]:
        """(record, usable position), longest first: records that share a prefix of at most `limit` tokens with `chain`.

        With `exact` a record is of use only where it has a state (a recurrent one cannot step back). Looks at the grid
        and at `positions` (where anchors may be) from the longest to the shortest, and stops when nothing longer can
        follow.
        """
        grid = set(_grid(limit)) | {p for p in positions if 0 < p <= limit}
        seen: set[str] = set()
        found: list[tuple[Record, int]] = []
        best = 0
        with self._lock:
            buckets = self._buckets.get(space, {})
            for position in sorted(grid, reverse=True):
                if position + SEGMENT_TOKENS <= best:
                    break
                for snapshot_id in reversed(buckets.get(chain.key(position), ())):
                    record = self._records.get((space, snapshot_id))
                    if record is None or snapshot_id in seen:
                        continue
                    seen.add(snapshot_id)
                    usable = usable_prefix(record, chain.tokens, limit, exact=exact)
                    if usable:
                        found.append((record, usable))
                        best = max(best, usable)
        return sorted(found, key=lambda item: item[1], reverse=True)

    def _drop(self, key: tuple[Space, str]) -> Record | None:
        record = self._records.pop(key, None)
        if record is None:
            return None
        space, snapshot_id = key
        self._tokens -= len(record.tokens) + RECORD_TOKENS
        buckets, pieces = self._buckets.get(space, {}), self._pieces.get(space, {})
        for name in self._keys.pop(key):
            bucket = buckets.get(name)
            if bucket is not None:
                bucket.pop(snapshot_id, None)
                if not bucket:
                    del buckets[name]
        for piece in record.manifest.pieces:
            if pieces.get((piece.start, piece.chain)) == piece:
                del pieces[piece.start, piece.chain]
        if not buckets:
            self._buckets.pop(space, None)
        if not pieces:
            self._pieces.pop(space, None)
        group = (space, record.manifest.conversation_id)
        del self._conversations[group][snapshot_id]
        if not self._conversations[group]:
            del self._conversations[group]
        return record

    def _names(self, record: Record, chain: TokenChain, buckets: Mapping[str, Iterable[str]]) -> list[str]:
        """Where it is found. On the fine grid it has the names of any other that begins with the same segment."""
        forwarded, start = record.manifest.forwarded, record.manifest.start_position
        like = next(iter(buckets.get(chain.key(SEGMENT_TOKENS), ())), None) if forwarded >= SEGMENT_TOKENS else None
        if like is None or self._records[record.space, like].tokens[:SEGMENT_TOKENS] != chain.tokens[:SEGMENT_TOKENS]:
            names = [chain.key(position) for position in _grid(forwarded)]
        else:
            names = self._keys[record.space, like][:FINE_NAMES]
            names += [chain.key(position) for position in range(SEGMENT_TOKENS, forwarded + 1, SEGMENT_TOKENS)]
        names.append(record.manifest.chain)
        if start is not None:
            names.append(chain.key(start))
        return names

    def _shrink(self, keep: tuple[Space, str]) -> None:
        if self._tokens <= self._max_tokens:
            return
        for host_only in (False, True):
            for key, record in list(self._records.items()):
                if self._tokens <= self._max_tokens:
                    return
                if key != keep and host_only == (not record.tiers):
                    self._drop(key)


def usable_prefix(record: Record, tokens: array[int], limit: int, *, exact: bool) -> int:
    """How many leading tokens of `tokens` (at most `limit`) the record restores; 0 when none."""
    common = common_prefix(record.tokens, tokens)
    if exact:
        places = (record.manifest.forwarded, record.manifest.start_position or 0)
        return next((place for place in places if place <= min(common, limit)), 0)
    return min(common, limit)


def _grid(tokens: int) -> list[int]:
    """Positions in (0, tokens] at which a record is indexed."""
    fine = range(FINE_GRID, min(tokens, SEGMENT_TOKENS - 1) + 1, FINE_GRID)
    return [*fine, *range(SEGMENT_TOKENS, tokens + 1, SEGMENT_TOKENS)]
