"""What saving costs the engine's thread: the interpreter, which only one thread has at a time. Needs no GPU.

    python -m tests.bench.bench_saver_host [--layouts dense,hybrid] [--digests blake3,sha256] [--cases held,beside]
        [--repeats 5]

16 conversations go on in turns, two captures each, on the device's transfer (on a CPU) and a host tier without disk or
store. dense: the layout of Qwen3-8B. hybrid: of Granite-4.0-H-tiny, with 57 MB of state a capture. Gather kernels and
the device's checksums are left out.

held: processor time of a capture on the savers' threads and their helpers, which is Python's alone: bytes are a 128th
(and so is the size of what is copied or hashed at a time, so there are as many of these), and hashing takes no time.
Of the fastest turn: other programs only add to it.
beside: the real sizes. The main thread plays the engine: a submission is 50 short torch calls, each of which lets
others have the interpreter, then it sleeps for 2 ms. Before each turn, alone, and while the turn's captures are saved.
With few cores it also waits for hashes and copies, which take the processor; the load is printed.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from time import perf_counter, process_time, sleep, thread_time
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from engram_kernels import Ops
from engram_runtime.engine import process
from engram_runtime.engine.intake import packed
from engram_runtime.executor.device import transfer as transfers
from engram_runtime.executor.device.arena import HostArena
from engram_runtime.executor.device.arrivals import Arrivals
from engram_runtime.executor.device.transfer import DeviceTransfer
from engram_runtime.models.caches import Caches
from engram_runtime.snapshots.io import digest
from engram_runtime.snapshots.policy.ids import new_id
from engram_runtime.snapshots.service import SnapshotService
from engram_runtime.snapshots.types import Capture, SnapshotConfig, StateLayout, TensorSpec

CHATS, TURNS, USER, ANSWER = 16, 6, 60, 60
FIRST_TURNS = 2
SMALL = 128
"""By what `held` makes sizes smaller."""
CALLS, PAUSE_SECONDS = 50, 0.002
HOST_BYTES = 1 << 30
BLOCK = 16


def layout_of(name: str, scale: int) -> StateLayout:
    if name == "dense":
        return StateLayout(36, 8, 128 // scale, "bfloat16")
    states = {
        "ssm": TensorSpec((36, 48, 64, 128 // scale), "float32"),
        "conv": TensorSpec((36, 3328 // scale, 3), "bfloat16"),
    }
    return StateLayout(4, 4, 128 // scale, "bfloat16", states)


class NoRows:
    def move(self, *_: Any, **__: Any) -> None:
        """What a kernel would do beside everything else."""


def no_checksum(words: Tensor, keys: Tensor, into: Tensor, first_row: int) -> None:
    """As above."""


def make_transfer(layout: StateLayout) -> DeviceTransfer:
    kv = [torch.zeros(2, 1, layout.kv_heads, BLOCK, layout.head_dim, dtype=torch.bfloat16)] * layout.kv_layers
    ssm, conv = (
        torch.zeros((1, *spec.shape), dtype=torch.float32 if spec.dtype == "float32" else torch.bfloat16)
        for spec in (layout.states.get(name, TensorSpec((1,), "float32")) for name in ("ssm", "conv"))
    )
    caches = Caches(kv, ssm if layout.states else None, conv if layout.states else None)
    cpu = torch.device("cpu")
    transfer = DeviceTransfer(Ops.bind("cpu", torch.bfloat16), caches, cpu, lambda: None, Arrivals(len(caches.kv), cpu))
    transfer._rows, transfer._checksum = NoRows(), no_checksum
    transfer._arena = HostArena(HOST_BYTES, lambda address, nbytes: None, lambda address: None)
    transfer._arena.wait()
    return transfer


class Talks:
    """Conversations whose turns are saved."""

    def __init__(self, service: SnapshotService, *, states: bool) -> None:
        self._service, self._states = service, states
        self._said = [list[int]() for _ in range(CHATS)]
        self._parents: list[str | None] = [None] * CHATS
        self._turn = 0

    def turn(self) -> None:
        """Hand over the next turn's captures of everybody."""
        self._turn += 1
        for boundary, more in (("history", USER), ("turn_end", ANSWER)):
            for chat, said in enumerate(self._said):
                start = len(said) if boundary == "history" else len(said) - USER
                said += [(chat * 7919 + self._turn * 104729 + n) % 50000 for n in range(more)]
                self._parents[chat] = self._save(chat, boundary, said, start)

    def wait(self) -> None:
        while self.saving:
            sleep(PAUSE_SECONDS)

    @property
    def saving(self) -> bool:
        return self._service._saver.depth()["queue.captures"] > 0

    def _save(self, chat: int, boundary: str, said: Sequence[int], start: int) -> str:
        snapshot_id = new_id()
        capture = Capture(
            tenant="default",
            conversation_id=f"c{chat}",
            branch_name="main",
            turn_number=self._turn,
            boundary=boundary,
            snapshot_id=snapshot_id,
            parent_id=self._parents[chat],
            token_ids=packed(said),
            pending_ids=(1,),
            position=len(said),
            block_ids=list(range(-(-len(said) // BLOCK))),
            state_slot=0 if self._states else None,
            release=lambda: None,
            user_start=start,
            messages=b'[{"role":"user","content":"hello"}]',
        )
        self._service.save(capture)
        return snapshot_id


@contextmanager
def talks(name: str, scale: int) -> Iterator[Talks]:
    layout = layout_of(name, scale)
    transfer = make_transfer(layout)
    config = SnapshotConfig(tenant_key=bytes(32), gc_interval_seconds=0, host_bytes=HOST_BYTES)
    service = SnapshotService(config, state_abi="ab" * 32, layout=layout, transfer=transfer, memory=transfer._arena)
    assert transfer._arena is not None
    transfer._arena.reclaim = service.make_room
    try:
        yield Talks(service, states=bool(layout.states))
    finally:
        service.close()
        transfer.close()
        del service, transfer
        gc.collect()  # a gigabyte that only cycles hold


@contextmanager
def changed(*places: tuple[Any, str, Any]) -> Iterator[None]:
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    try:
        for owner, name, value in places:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


class NoHash:
    def __init__(self, *_: Any) -> None:
        """Takes no time."""

    def digest(self) -> bytes:
        return bytes(32)

    def hexdigest(self) -> str:
        return "0" * 64


def held(name: str, algorithm: str) -> dict[str, float]:
    algorithms = {**digest._ALGORITHMS}
    if algorithm == "blake3":
        algorithms["blake3"] = lambda data: "0" * 64
    small = (
        (digest, "_ALGORITHMS", algorithms),
        (digest, "hashlib", SimpleNamespace(sha256=NoHash)),
        (digest, "_PIECE", digest._PIECE // SMALL),
        (digest, "_PARALLEL_ABOVE", digest._PARALLEL_ABOVE // SMALL),
        (transfers, "TO_HOST_BYTES", transfers.TO_HOST_BYTES // SMALL),
        (transfers, "GROUP_BYTES", transfers.GROUP_BYTES // SMALL),
    )
    times = []
    with changed(*small), talks(name, SMALL) as chats:
        for turn in range(TURNS):
            began = process_time() - thread_time()
            chats.turn()
            chats.wait()
            if turn >= FIRST_TURNS:
                times.append((process_time() - thread_time() - began) / CHATS / 2 * 1e6)
    return {"us a capture": min(times)}


def submissions(tensor: Tensor, go_on: Iterator[bool]) -> list[float]:
    times = []
    for more in go_on:
        if not more:
            break
        began = perf_counter()
        for _ in range(CALLS):
            tensor.add_(1)
        times.append((perf_counter() - began) * 1e6)
        sleep(PAUSE_SECONDS)
    return times


def beside(name: str) -> dict[str, float]:
    tensor = torch.zeros(16)
    alone, busy, seconds = list[float](), list[float](), 0.0
    with talks(name, 1) as chats:
        for turn in range(TURNS):
            before = submissions(tensor, (n < 150 for n in count()))
            chats.turn()
            began = perf_counter()
            during = submissions(tensor, (chats.saving for _ in count()))
            if turn >= FIRST_TURNS:
                seconds += perf_counter() - began
                alone += before
                busy += during
    mean, longer = statistics.fmean(alone), statistics.fmean(busy) - statistics.fmean(alone)
    p90_alone, p90_beside = (sorted(times)[len(times) * 9 // 10] for times in (alone, busy))
    return {
        "us alone": mean,
        "us longer beside": longer,
        "p90 alone": p90_alone,
        "p90 beside": p90_beside,
        "ms to save a turn": seconds / (TURNS - FIRST_TURNS) * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", default="dense,hybrid")
    parser.add_argument("--digests", default="blake3,sha256")
    parser.add_argument("--cases", default="held,beside")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    process.settle()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}", flush=True)
    algorithms = {**digest._ALGORITHMS}
    for algorithm in args.digests.split(","):
        if algorithm == "sha256":
            digest._ALGORITHMS.pop("blake3", None)
        for name in args.layouts.split(","):
            for case in args.cases.split(","):
                found = [held(name, algorithm) if case == "held" else beside(name) for _ in range(args.repeats)]
                medians = {key: statistics.median(one[key] for one in found) for key in found[0]}
                text = ", ".join(f"{key} {value:.4g}" for key, value in medians.items())
                print(f"{algorithm} {name} {case}: {text} (load {os.getloadavg()[0]:.2f})", flush=True)
        digest._ALGORITHMS.update(algorithms)


if __name__ == "__main__":
    main()
