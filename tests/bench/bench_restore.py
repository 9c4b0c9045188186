"""Restores from each tier and the cost of saves, through the whole engine.

    make bench-gpu PART=restore        (or: tests/bench/bench_restore.py [--models Granite-4.0-H-tiny,...])

Restore: a conversation is computed once and saved; then its next turn (40 new tokens) arrives while its memory is on
the GPU, only on the host, or only on disk after a restart of everything but the process (new engine, empty host tier,
page cache dropped). Measured: the restore, its bytes and rate, and the time to the first token; of the host tier also
that of a turn that starts only when all of its history is there. The restored keys,
values and states are compared with the original ones bit by bit; how often 8 greedy tokens are those of the
conversation that was never evicted is counted. Floors: the link (55.4 GB/s), for disks the rate at which this disk's
files are read directly, measured here.

Save: the turns of 100 tokens that 16 chats leave behind, while 16 other sequences decode: what a save adds to the
decode steps around it, what saves at the rate of those chats cost, and when a saved turn can be found. Results:
restore.json.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engram_kernels.gather_kv.kernel import gather_kv
from engram_runtime.engine.core import LLMEngine
from engram_runtime.engine.sampling_params import SamplingParams
from engram_runtime.engine.turns import TurnSpec
from engram_runtime.executor.device.executor import DeviceExecutor
from engram_runtime.models.base import CausalLM
from engram_runtime.snapshots.io import digest
from engram_runtime.snapshots.policy.ids import new_id
from engram_runtime.snapshots.types import Capture, SaveResult, SnapshotConfig
from tests.bench import bench_step
from tests.bench.engine_runs import Ask, Run, drive, make_engine, percentile, random_tokens
from tests.bench.gpu_timing import save

LENGTHS = {"Granite-4.0-H-tiny": (4096, 26_624, 64_187), "Qwen3-8B": (4096, 26_624)}
TURN, ROUNDS, DISK_ROUNDS = 40, 5, 2
LINK_GBS = 55.4
HOST_BAR_GBS, GPU_BAR_MS, DISK_BAR_PERCENT, LONG_BAR_MS = 45.0, 0.5, 80, 40.0
BATCH, DECODE, DELTA = 16, 260, 100
WINDOW = 20
"""Decode steps in which the cost of one save is looked for."""


def config_over(folder: Path) -> SnapshotConfig:
    return SnapshotConfig(
        tenant_key=bytes(range(32)), host_bytes=24 << 30, disk_path=folder, disk_bytes=40 << 30, gc_interval_seconds=0
    )


class Conversation:
    """A computed history, and its next turn as often as it is asked for."""

    def __init__(self, engine: LLMEngine, model: CausalLM, length: int) -> None:
        self.name, self._model = f"c{length}", model
        spec = TurnSpec(conversation_id=self.name)
        run = drive(engine, {self.name: Ask(random_tokens(model, length, length), 2, spec)})[self.name]
        self.tokens = [*random_tokens(model, length, length), *run.tokens]
        self.position = len(self.tokens) - 1
        self._asked = 0

    def turn(self, engine: LLMEngine, seed: int) -> Run:
        self._asked += 1
        spec = TurnSpec(conversation_id=self.name, candidates=(self.position,), save=False)
        prompt = self.tokens + random_tokens(self._model, TURN, seed)
        return drive(engine, {f"{self.name}-{self._asked}": Ask(prompt, 8, spec)})[f"{self.name}-{self._asked}"]

    def memory(self, engine: LLMEngine, executor: DeviceExecutor) -> tuple[Tensor, Tensor | None]:
        """Packed keys and values, and the recurrent state, as the GPU tier holds them now."""
        match = engine._cache.match("default", self.tokens, self.position)
        if match.position != self.position:
            raise RuntimeError(f"the GPU tier holds {match.position} of {self.position} tokens")
        caches = executor._caches
        state = None if match.state is None or caches.ssm is None else caches.ssm[match.state].clone()
        return gather_kv(caches.kv, match.blocks, 0, self.position), state


def evict(engine: LLMEngine) -> None:
    """Take every block and state that nobody holds, and give them back: the prefix index is empty."""
    for pool in (engine._cache.blocks, engine._cache.states):
        pool.release(pool.allocate(pool.available) or [])


def restores(
    engine: LLMEngine,
    executor: DeviceExecutor,
    talk: Conversation,
    original: tuple[Tensor, Tensor | None],
    answers: dict[int, list[int]],
    prepare: Callable[[], None],
    tier: str,
    rounds: int = ROUNDS,
) -> dict[str, Any]:
    """Median of some restores from one tier. RuntimeError when the restored bytes are not the original ones."""
    ttft, spent, nbytes, same_answers = [], [], 0, 0
    for seed in range(rounds + 1):
        prepare()
        run = talk.turn(engine, seed)
        report = run.last.turn if run.last is not None else None
        if report is None or report.tier != tier or report.restored_tokens != talk.position:
            raise RuntimeError(f"{talk.name}: not restored from {tier}: {report}")
        same_answers += run.tokens == answers[seed]
        nbytes = report.bytes
        ttft.append(run.ttft_ms)
        spent.append(report.restore_time_ms)
    kv, state = talk.memory(engine, executor)
    same = torch.equal(kv, original[0]) and (
        original[1] is None if state is None else original[1] is not None and torch.equal(state, original[1])
    )
    if not same:
        raise RuntimeError(f"{talk.name}: other bytes after a restore from {tier}")
    restore = statistics.median(spent[1:])
    return {
        "tier": tier, "tokens": talk.position, "bytes": nbytes, "restore_ms": round(restore, 2),
        "worst_ms": round(max(spent[1:]), 2), "gb_per_s": round(nbytes / restore / 1e6, 1),
        "ttft_ms": round(statistics.median(ttft[1:]), 2), "bit_exact": True,
        "same_answers": f"{same_answers} of {rounds + 1}",
    }  # fmt: skip


@contextmanager
def copied_before_it_starts(engine: LLMEngine) -> Iterator[None]:
    """No turn starts while its history is still on its way: what that is worth is the difference."""
    restorer = engine._restorer
    assert restorer is not None
    poll = restorer.poll
    restorer.poll = lambda *, alone: poll(alone=False)  # type: ignore[method-assign]
    yield
    restorer.poll = poll  # type: ignore[method-assign]


def gpu_tier(engine: LLMEngine, executor: DeviceExecutor, talk: Conversation) -> tuple[dict[str, Any], dict[int, Any]]:
    """The turn while everything is on the card: from the moment when the engine's thread has the request until its
    first step is handed over, and the answers that every other tier must give."""
    calls, ttft, answers, submitted = [], [], {}, list[float]()
    submit = executor.submit

    def timed(plan: Any) -> None:
        submitted.append(time.perf_counter())
        submit(plan)

    executor.submit = timed  # type: ignore[method-assign]
    # Warm-up turns of their own: seed -n makes the tokens of seed n, and a turn that was computed before is one decode.
    for seed in (*range(101, 116), *range(ROUNDS + 1)):
        submitted.clear()
        run = talk.turn(engine, seed)
        calls.append((submitted[0] - run.added) * 1e3)
        ttft.append(run.ttft_ms)
        answers[seed] = run.tokens
    executor.submit = submit  # type: ignore[method-assign]
    row = {
        "tier": "gpu", "tokens": talk.position, "restore_ms": round(statistics.median(calls[3:]), 3),
        "worst_ms": round(max(calls[3:]), 3), "ttft_ms": round(statistics.median(ttft[3:]), 2),
        "bar_ms": GPU_BAR_MS, "met": statistics.median(calls[3:]) <= GPU_BAR_MS,
    }  # fmt: skip
    return row, answers


def drop_page_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def disk_rate(folder: Path, threads: int = 4, chunk: int = 4 << 20) -> float:
    """GB/s at which the largest file below `folder` is read past the page cache."""
    path = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    size = path.stat().st_size // chunk * chunk
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def read(part: int) -> None:
        buffer = mmap.mmap(-1, chunk)
        for offset in range(part * chunk, size, threads * chunk):
            os.preadv(descriptor, [buffer], offset)

    workers = [threading.Thread(target=read, args=(part,)) for part in range(threads)]
    started = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - started
    os.close(descriptor)
    return size / seconds / 1e9


def measure(model: CausalLM, name: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    lengths = LENGTHS[name]
    window, room = max(lengths) + 600, 2 * max(lengths) + 40_000

    def start() -> tuple[LLMEngine, DeviceExecutor]:
        made = make_engine(model, BATCH, window, room, snapshots=config_over(folder), checkpoints=48)
        arena = made[1].transfer._arena
        if arena is None or not arena.wait(120):  # a server pins its memory once, beside its first requests
            raise RuntimeError("the host's memory was not pinned in time")
        return made

    engine, executor = start()
    service = engine.snapshots
    assert service is not None
    saves = saving(engine, model, name)
    rows: list[dict[str, Any]] = []
    kept: list[tuple[Conversation, tuple[Tensor, Tensor | None], dict[int, list[int]]]] = []
    for length in lengths:
        talk = Conversation(engine, model, length)
        engine.flush()
        if not service.flush(120):
            raise RuntimeError("the conversation was not saved in time")
        original = talk.memory(engine, executor)
        row, answers = gpu_tier(engine, executor, talk)
        rows.append(row)
        print(name, row, flush=True)
        with copied_before_it_starts(engine):
            after_all = restores(engine, executor, talk, original, answers, lambda: evict(engine), "host")
        row = restores(engine, executor, talk, original, answers, lambda: evict(engine), "host")
        row["ttft_after_all_ms"] = after_all["ttft_ms"]
        floor = row["bytes"] / LINK_GBS / 1e6
        row.update(floor_ms=round(floor, 2), percent_of_floor=round(100 * floor / row["restore_ms"]))
        row.update(bar_gb_per_s=HOST_BAR_GBS, met=row["gb_per_s"] >= HOST_BAR_GBS)
        if length == 64_187:
            row.update(bar_ttft_ms=LONG_BAR_MS, met_ttft=row["ttft_ms"] <= LONG_BAR_MS)
        rows.append(row)
        print(name, row, flush=True)
        kept.append((talk, original, answers))
    engine.close()
    del engine, executor, service
    engine, executor = start()
    rate = disk_rate(folder)
    for talk, original, answers in kept[-2:]:

        def empty() -> None:
            evict(engine)
            engine.snapshots._shared.host.clear()  # type: ignore[union-attr]
            drop_page_cache(folder)

        row = restores(engine, executor, talk, original, answers, empty, "disk", DISK_ROUNDS)
        row.update(disk_gb_per_s=round(rate, 2), percent_of_floor=round(100 * row["gb_per_s"] / rate))
        row.update(bar_percent=DISK_BAR_PERCENT, met=row["percent_of_floor"] >= DISK_BAR_PERCENT)
        rows.append(row)
        print(name, row, flush=True)
    engine.close()
    for row in rows:
        row["model"] = name
    return {"restore": rows, "save": saves}


# Saves beside decode


def decoding(engine: LLMEngine, model: CausalLM, seed: int, each_step: Callable[[int], None]) -> list[float]:
    """BATCH sequences decode DECODE tokens; milliseconds between the steps in which everybody decoded."""
    for number in range(BATCH):
        params = SamplingParams(temperature=0.0, max_tokens=DECODE, ignore_eos=True)
        engine.add_request(f"d{seed}-{number}", random_tokens(model, 512, seed + number), params)
    intervals, last, steps = list[float](), 0.0, 0
    while engine.has_unfinished_requests:
        outputs = engine.step()
        now = time.perf_counter()
        if len(outputs) == BATCH:
            if last:
                intervals.append((now - last) * 1e3)
            last = now
            each_step(steps)
            steps += 1
        else:
            last = 0.0
    return intervals


def saving(engine: LLMEngine, model: CausalLM, name: str) -> list[dict[str, Any]]:
    """What saves of one turn cost 16 sequences that decode."""
    service = engine.snapshots
    assert service is not None
    blocks = engine._cache.blocks.allocate(-(-DELTA // 16))
    slots = engine._cache.states.allocate(1) if engine._cache.has_state else None
    assert blocks is not None
    done: list[float] = []

    def capture(number: int) -> None:
        began = time.perf_counter()

        def told(result: SaveResult) -> None:
            if not result.tiers:
                raise RuntimeError(f"a save was dropped: {result.reason}")
            done.append((time.perf_counter() - began) * 1e3)

        service.save(
            Capture(
                tenant="default", conversation_id=f"s{number}", branch_name="main", turn_number=1,
                boundary="turn_end", snapshot_id=new_id(), parent_id=None,
                token_ids=random_tokens(model, DELTA, 77 + number), pending_ids=(), position=DELTA, block_ids=blocks,
                state_slot=slots[0] if slots else None, release=lambda: None, durable=False, on_done=told,
            )
        )  # fmt: skip

    decoding(engine, model, 1, lambda step: None)
    capture(0)
    service.gathered(10)
    count = 1
    alone = decoding(engine, model, 2, lambda step: None)
    done.clear()

    def now_and_then(step: int) -> None:
        nonlocal count
        if step % (2 * WINDOW) == WINDOW - 1:
            capture(count)
            count += 1

    singly = decoding(engine, model, 3, now_and_then)
    service.gathered(10)
    durable = list(done)

    def as_chats_do(step: int) -> None:
        nonlocal count
        if step % (60 // BATCH) == 0:  # 16 chats whose answers have 60 tokens
            capture(count)
            count += 1

    often = decoding(engine, model, 4, as_chats_do)
    service.gathered(10)
    again = decoding(engine, model, 5, lambda step: None)
    # Steps grow with their sequences, and more of a dense model than of others.
    drift = statistics.median(windows(alone, every=1))
    pairs = [pair - drift for pair in windows(singly)]
    engine._cache.blocks.release(blocks)
    if slots:
        engine._cache.states.release(slots)
    base = statistics.fmean([*trimmed(alone), *trimmed(again)])
    loss = 100 * (statistics.fmean(trimmed(often)) / base - 1)
    row = {
        "model": name, "batch": BATCH, "turn_tokens": DELTA,
        "bytes": DELTA * model.spec.kv_bytes_per_token() + model.spec.state_bytes(),
        "checksum": "BLAKE3" if digest.HAVE_BLAKE3 else "SHA-256",
        "step_ms": round(base, 3), "stall_ms": round(statistics.median(pairs), 3),
        "worst_stall_ms": round(max(pairs), 3), "bar_stall_ms": 0.3, "met_stall": statistics.median(pairs) <= 0.3,
        "loss_percent": round(loss, 2), "steps_between_saves": 60 // BATCH, "bar_loss_percent": 2.0,
        "met_loss": loss <= 2.0, "host_ms": round(statistics.median(durable), 2),
        "host_p95_ms": round(percentile(durable, 0.95), 2), "bar_host_ms": 10.0,
        "met_host": statistics.median(durable) <= 10.0,
    }  # fmt: skip
    print(row, flush=True)
    return [row]


def windows(intervals: Sequence[float], every: int = 2 * WINDOW) -> list[float]:
    """By how much WINDOW steps took longer than the WINDOW steps before them, at each place of a save."""
    return [
        sum(intervals[at : at + WINDOW]) - sum(intervals[at - WINDOW : at])
        for at in range(WINDOW, len(intervals) - WINDOW + 1, every)
    ]


def trimmed(values: Sequence[float]) -> list[float]:
    """Without the slowest hundredth: pauses of a virtual machine are not the engine's."""
    return sorted(values)[: max(1, len(values) * 99 // 100)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="Granite-4.0-H-tiny,Qwen3-8B")
    args = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {"restore": [], "save": []}
    for name in args.models.split(","):
        folder = Path(tempfile.mkdtemp(prefix="engram-bench-"))
        try:
            with torch.no_grad():
                model = bench_step.build(name, positions=max(LENGTHS[name]) + 1000)
            for part, rows in measure(model, name, folder).items():
                results[part] += rows
            save("restore.json", {"results": results})
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        del model
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
