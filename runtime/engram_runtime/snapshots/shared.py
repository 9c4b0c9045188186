"""What the parts of the service work on together, made once by the service."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engram_runtime.errors import Deleted, NotFound, SnapshotError
from engram_runtime.snapshots.catalogue import Catalogue, Record
from engram_runtime.snapshots.io.files import OpenSnapshot
from engram_runtime.snapshots.io.host_tier import HostTier
from engram_runtime.snapshots.io.store import StoreUnavailable
from engram_runtime.snapshots.outcomes import OutcomeLog
from engram_runtime.snapshots.policy.cost import Speed
from engram_runtime.snapshots.policy.identity import Keyring, TokenChain
from engram_runtime.snapshots.policy.keys import Space
from engram_runtime.snapshots.sources import FileSources
from engram_runtime.snapshots.tiers import Counters, Tier
from engram_runtime.snapshots.types import HostMemory, KVTransfer, SnapshotConfig, StateLayout


@dataclass(frozen=True, slots=True)
class Shared:
    """`tiers` are the durable ones, fastest first: disk, store."""

    config: SnapshotConfig
    abi: str
    layout: StateLayout
    transfer: KVTransfer
    memory: HostMemory
    keyring: Keyring
    catalogue: Catalogue
    host: HostTier
    host_speed: Speed
    tiers: Sequence[Tier]
    sources: FileSources
    counters: Counters
    clock: Callable[[], float]
    outcomes: OutcomeLog

    def space(self, tenant: str) -> Space:
        return Space.of(self.keyring.namespace(tenant), self.abi)

    def chain(self, tenant: str, token_ids: Sequence[int], conversation_id: str | None = None) -> TokenChain:
        """`conversation_id`: of a turn, whose tokens begin like those of the turns before."""
        chain = TokenChain(self.keyring.root(self.abi, tenant), token_ids)
        if conversation_id is not None:
            before = self.catalogue.newest(self.space(tenant), conversation_id)
            if before is not None:
                chain.begin_like(before.tokens, before.segments)
        return chain

    @property
    def authority(self) -> Tier | None:
        """The tier whose heads count: the shared store, else the disk."""
        return self.tiers[-1] if self.tiers else None

    @property
    def live_seconds(self) -> float:
        """How long a file once seen needs no second look: well within the sweep's grace."""
        return self.config.gc_grace_seconds / 4

    def open(self, tier: Tier, space: Space, snapshot_id: str) -> OpenSnapshot:
        with tier.reading():
            return tier.repository.open_snapshot(space, snapshot_id)

    def load(self, space: Space, snapshot_id: str, tenant: str) -> Record:
        """From memory, else the first tier that has it whole. NotFound, or SnapshotError with the reason."""
        snapshot_id = self.catalogue.canonical_id(space, snapshot_id)
        if self.catalogue.is_gone(space, snapshot_id):
            raise Deleted(f"snapshot {snapshot_id} does not exist")
        record = self.catalogue.get(space, snapshot_id)
        if record is not None:
            return record
        trouble: SnapshotError | None = None
        for tier in self.tiers:
            try:
                opened = self.open(tier, space, snapshot_id)
                with tier.reading():
                    tokens = tier.repository.read_tokens(opened)
                    label = tier.repository.read_label(space, snapshot_id)
            except NotFound:
                continue
            except SnapshotError as error:
                trouble = error if trouble is None or isinstance(trouble, StoreUnavailable) else trouble
                continue
            chain = self.chain(tenant, tokens)
            if self.config.verify and chain.key(opened.manifest.forwarded) != opened.manifest.chain:
                trouble = SnapshotError("token ids do not give the manifest's chain: another tenant's or model's")
                continue
            record = self.catalogue.add(Record(space, opened.manifest, tokens, tenant, {tier.name}, label=label), chain)
            if record is not None:
                return record
        raise trouble or NotFound(f"snapshot {snapshot_id} does not exist")

    def forget(self, record: Record, tier: str) -> None:
        """The snapshot is not on this tier (any more)."""
        record.tiers.discard(tier)
        if not record.tiers:
            self.catalogue.remove(record.space, record.snapshot_id)
