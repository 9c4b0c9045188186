"""A stand-in for the engine's side of the snapshot service: paged caches with random content, and turns on them.

`World` bundles a service with its folders so that tests can restart it, share its store, or look at its files.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engram_runtime.snapshots.io.local_store import LocalStore
from engram_runtime.snapshots.io.store import ObjectInfo, ObjectStore
from engram_runtime.snapshots.policy.identity import state_abi
from engram_runtime.snapshots.policy.ids import new_id
from engram_runtime.snapshots.service import SnapshotService
from engram_runtime.snapshots.types import (
    Capture,
    Fetched,
    RestoreQuery,
    SaveResult,
    SnapshotConfig,
    StateLayout,
    TensorSpec,
)
from tests.support import patience

KEY = b"0123456789abcdef0123456789abcdef"
ABI = state_abi({"architecture": "test", "weights": "none"})
PAGE = 16
STATES = {"ssm": TensorSpec((2, 3, 4, 5), "float32"), "conv": TensorSpec((2, 6, 3), "bfloat16")}
DENSE = StateLayout(2, 2, 4, "float32")
HYBRID = StateLayout(1, 2, 4, "bfloat16", STATES)
PURE = StateLayout(0, 1, 1, "float32", STATES)
LAYOUTS = {"dense": DENSE, "hybrid": HYBRID, "pure": PURE}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Device:
    """Paged caches and state slots with random content. Implements KVTransfer."""

    def __init__(self, layout: StateLayout, blocks: int = 256, slots: int = 64, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.layout = layout
        shape = (layout.kv_layers, 2, blocks, layout.kv_heads, PAGE, layout.head_dim)
        self.kv = torch.randn(shape, generator=generator).to(DTYPES[layout.kv_dtype])
        self.states = {
            name: torch.randn((slots, *spec.shape), generator=generator).to(DTYPES[spec.dtype])
            for name, spec in layout.states.items()
        }
        self.reads: list[tuple[int, int]] = []

    def _places(self, block_ids: Sequence[int], first: int, count: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(first, first + count)
        return torch.tensor(list(block_ids))[positions // PAGE], positions % PAGE

    def read_kv(self, block_ids: Sequence[int], first: int, count: int) -> Tensor:
        self.reads.append((first, count))
        blocks, offsets = self._places(block_ids, first, count)
        return self.kv[:, :, blocks, :, offsets].permute(1, 2, 3, 0, 4).contiguous()

    def write(
        self,
        block_ids: Sequence[int],
        kv: Sequence[tuple[int, Tensor]],
        state_slot: int | None,
        state: dict[str, Tensor],
    ) -> int:
        for first, packed in kv:
            blocks, offsets = self._places(block_ids, first, packed.shape[3])
            self.kv[:, :, blocks, :, offsets] = packed.permute(3, 0, 1, 2, 4)
        for name, value in state.items() if state_slot is not None else ():
            self.states[name][state_slot] = value
        return 0

    def settle(self) -> None:
        """Writes are done when they return."""

    def read_state(self, slot: int) -> dict[str, Tensor]:
        return {name: states[slot].clone() for name, states in self.states.items()}


def tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000), k=count)


@dataclass
class World:
    root: Path
    layout: StateLayout = DENSE
    config: SnapshotConfig = field(
        default_factory=lambda: SnapshotConfig(tenant_key=KEY, gc_interval_seconds=0, **patience.SNAPSHOTS)
    )
    disk: bool = True
    store: bool = True
    device: Device = None  # type: ignore[assignment]
    disk_store: ObjectStore | None = None
    shared_store: ObjectStore | None = None
    now: float | None = None
    service: SnapshotService = None  # type: ignore[assignment]
    released: list[str] = field(default_factory=list)
    results: dict[str, SaveResult] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._numbers = itertools.count()
        self.device = self.device or Device(self.layout)
        self.start()

    @property
    def disk_path(self) -> Path:
        return self.root / "disk"

    @property
    def store_path(self) -> Path:
        return self.root / "store"

    def start(self, **changes: Any) -> SnapshotService:
        """A fresh process: nothing in memory."""
        if self.service is not None:
            self.service.close()
        self.config = replace(
            self.config,
            disk_path=self.disk_path if self.disk else None,
            store_uri=f"file://{self.store_path}" if self.store else None,
            **changes,
        )
        clock = {} if self.now is None else {"clock": lambda: self.now}
        self.service = SnapshotService(
            self.config,
            state_abi=ABI,
            layout=self.layout,
            transfer=self.device,
            disk=self.disk_store,
            store=self.shared_store,
            **clock,
        )
        return self.service

    def capture(
        self,
        token_ids: Sequence[int],
        conversation: str = "c",
        turn: int = 1,
        *,
        boundary: str = "turn_end",
        parent: str | None = None,
        tenant: str = "default",
        branch: str = "main",
        first_block: int | None = None,
        slot: int | None = None,
        pending: Sequence[int] = (7,),
        **more: Any,
    ) -> Capture:
        blocks = -(-len(token_ids) // PAGE)
        start = 0 if first_block is None else first_block
        snapshot_id = new_id(self.now)
        return Capture(
            tenant=tenant,
            conversation_id=conversation,
            branch_name=branch,
            turn_number=turn,
            boundary=boundary,
            snapshot_id=snapshot_id,
            parent_id=parent,
            token_ids=list(token_ids),
            pending_ids=tuple(pending),
            position=len(token_ids),
            block_ids=list(range(start, start + blocks)),
            state_slot=(next(self._numbers) % 64 if slot is None else slot) if self.layout.states else None,
            release=lambda: self.released.append(snapshot_id),
            on_done=lambda result: self.results.__setitem__(snapshot_id, result),
            **more,
        )

    def save(self, token_ids: Sequence[int], conversation: str = "c", turn: int = 1, **more: Any) -> Capture:
        """Save and wait until it is as durable as it gets."""
        capture = self.capture(token_ids, conversation, turn, **more)
        self.service.save(capture)
        assert self.service._saver.wait(300)
        return capture

    def find(self, token_ids: Sequence[int], tenant: str = "default", **more: Any) -> Any:
        return self.service.find(RestoreQuery(tenant=tenant, token_ids=list(token_ids), **more))

    def only_host(self) -> None:
        """Drop the host tier's payloads and all memory: the next find must read a durable tier."""
        self.start()

    def check(self, fetched: Any, capture: Capture, kv_from: int = 0) -> None:
        """Bit for bit what was captured."""
        assert isinstance(fetched, Fetched), fetched
        position = kv_from
        if self.layout.kv_layers:
            for start, packed in fetched.kv:
                assert start == position
                expected = self.device.read_kv(capture.block_ids, start, packed.shape[3])
                assert torch.equal(packed.view(torch.uint8), expected.view(torch.uint8))
                position += packed.shape[3]
            assert position == fetched.position
        else:
            assert fetched.kv == []
        if self.layout.states:
            assert fetched.position == capture.position
            expected_state = self.device.read_state(capture.state_slot)  # type: ignore[arg-type]
            assert fetched.state is not None
            assert fetched.state.keys() == expected_state.keys()
            for name, value in expected_state.items():
                assert torch.equal(fetched.state[name].view(torch.uint8), value.view(torch.uint8))
        else:
            assert fetched.state is None


class RecordingStore:
    """Passes calls on to a LocalStore and remembers them; `fail` may raise before a call."""

    def __init__(self, inner: LocalStore) -> None:
        self.inner = inner
        self.calls: list[tuple[str, str]] = []
        self.bytes_read = 0
        self.fail: Any = None
        self._lock = threading.Lock()

    def _note(self, call: str, key: str) -> None:
        with self._lock:
            self.calls.append((call, key))
        if self.fail is not None:
            self.fail(call, key)

    def keys(self, *calls: str) -> list[str]:
        return [key for call, key in self.calls if call in calls]

    def probe(self) -> None:
        self._note("probe", "")
        self.inner.probe()

    def put(self, key: str, parts: Sequence[memoryview | bytes], *, if_absent: bool = False) -> None:
        self._note("put", key)
        self.inner.put(key, parts, if_absent=if_absent)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        self._note("get", key)
        data = self.inner.get(key, start, length)
        self.bytes_read += len(data)
        return data

    def front(self, key: str, length: int) -> tuple[bytes, int]:
        self._note("get", key)
        data, size = self.inner.front(key, length)
        self.bytes_read += len(data)
        return data, size

    def get_tagged(self, key: str) -> tuple[bytes, str]:
        self._note("get", key)
        data, tag = self.inner.get_tagged(key)
        self.bytes_read += len(data)
        return data, tag

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        self._note("get", key)
        self.inner.read_into(key, start, buffer)
        self.bytes_read += buffer.nbytes

    def head(self, key: str) -> ObjectInfo:
        self._note("head", key)
        return self.inner.head(key)

    def delete(self, key: str) -> None:
        self._note("delete", key)
        self.inner.delete(key)

    def delete_many(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.delete(key)

    def now(self) -> float | None:
        return self.inner.now()

    def touch(self, key: str) -> None:
        self._note("touch", key)
        self.inner.touch(key)

    def list(self, prefix: str, *, after: str | None = None, limit: int = 1000) -> list[ObjectInfo]:
        self._note("list", prefix)
        return self.inner.list(prefix, after=after, limit=limit)

    def compare_and_swap(self, key: str, data: bytes, expected: str | None) -> str:
        self._note("swap", key)
        return self.inner.compare_and_swap(key, data, expected)

    def clean_uploads(self, older_than: float) -> int:
        return self.inner.clean_uploads(older_than)

    def close(self) -> None:
        self.inner.close()
