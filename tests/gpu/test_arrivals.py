"""Steps that are queued while the restore they go on from is still on its way, on a GPU: they wait for each layer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engram_kernels import Ops
from engram_runtime.executor.device import transfer as transfers
from engram_runtime.executor.device.executor import DeviceExecutor
from engram_runtime.executor.device.graphs import CudaRecorder
from engram_runtime.executor.memory import CacheRequest, plan_caches
from engram_runtime.executor.plan import RowOpen, RowSampling, Sampled, SequencePlan, StepPlan
from engram_runtime.loader.model import load_model
from tests.support.tiny import make_tiny

CUDA = torch.device("cuda")
LENGTH, NEW = 200, 7
PROMPT = tuple((7 * i) % 500 for i in range(LENGTH + NEW))
WIDTH = -(-len(PROMPT) // 16)
GREEDY = RowSampling(temperature=0.0)
PAUSE = 10_000_000
"""Clock cycles: some milliseconds."""


def make(path: Path, *, record: bool) -> DeviceExecutor:
    ops = Ops.bind(CUDA, torch.bfloat16)
    model = load_model(path, device="cuda", dtype="bfloat16", ops=ops)
    geometry = plan_caches(model.spec, CacheRequest(4, 256, 2048, 4, 16), 1 << 32)
    recorder = CudaRecorder() if record else None
    return DeviceExecutor(model, ops, geometry, CUDA, max_num_seqs=4, recorder=recorder)


def chunk(step: int, row: int, start: int, blocks: tuple[int, ...], **plan: Any) -> StepPlan:
    sequence = SequencePlan(row, start, PROMPT[start:], blocks, row, True)
    return StepPlan(step, (sequence,), opens=(RowOpen(row, GREEDY, PROMPT),), **plan)


def blocks_of(row: int) -> tuple[int, ...]:
    return tuple(range(row * WIDTH, (row + 1) * WIDTH))


@pytest.mark.parametrize("record", [True, False], ids=["recorded", "launched"])
@pytest.mark.parametrize("family", ["qwen3", "granite"])
def test_a_step_waits_for_each_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, record: bool
) -> None:
    executor = make(make_tiny(family, tmp_path, dtype=torch.bfloat16), record=record)
    transfer = executor.transfer
    assert transfer.reserve(64 << 20).wait(60)  # copies from pinned memory wait for nobody
    executor.submit(StepPlan(0, (SequencePlan(0, 0, PROMPT[:LENGTH], blocks_of(0), 0, False),), opens=(
        RowOpen(0, GREEDY, PROMPT),
    )))  # fmt: skip
    executor.collect()
    pieces = [(first, transfer.read_kv(blocks_of(0), first, count)) for first, count in ((0, 90), (90, LENGTH - 90))]
    state = transfer.read_state(0)
    monkeypatch.setattr(transfers, "LAYERS_BYTES", 1)
    queue_part = transfer._queue_part

    def slowly(*args: Any) -> None:
        with transfer._in.on(transfer._in.kernels):
            torch.cuda._sleep(PAUSE)
        queue_part(*args)

    expected: Sampled | None = None
    for step, late in enumerate((False, False, True, True, True), 1):
        row = step % 2 + 1
        with torch.inference_mode():
            for layer in executor._caches.kv:
                layer[:, list(blocks_of(row))] = 77.0
        torch.cuda.synchronize()
        monkeypatch.setattr(transfer, "_queue_part", slowly if late else queue_part)
        ticket = transfer.write(blocks_of(row), pieces, row if state else None, state)
        whole = transfer._arriving[ticket].whole._event
        if not late:
            transfer.settle()
        plan = chunk(step, row, LENGTH, blocks_of(row), after=ticket, closes=(row,) if step > 2 else ())
        executor.submit(plan)
        assert whole is not None
        assert whole.query() is not late, "the copy was over before the step was queued: nothing was shown"
        found = executor.collect().sampled[row]
        transfer.settle()
        expected = expected or found
        assert found == expected, step
    assert not record or executor.recorded > 0
    executor.close()


def test_a_step_ahead_of_its_restore_holds_nobody_up_for_long(tmp_path: Path) -> None:
    """Steps that follow no restore, or one that is over, run while another restore is on its way."""
    executor = make(make_tiny("qwen3", tmp_path, dtype=torch.bfloat16), record=True)
    transfer = executor.transfer
    assert transfer.reserve(64 << 20).wait(60)
    executor.submit(chunk(0, 0, 0, blocks_of(0)))
    executor.collect()
    pieces = [(0, transfer.read_kv(blocks_of(0), 0, LENGTH))]
    old = transfer.write(blocks_of(1), pieces, None, {})
    transfer.settle()
    for step in (1, 2):
        executor.submit(chunk(step, 1, LENGTH, blocks_of(1), after=old, closes=(1,) if step > 1 else ()))
        executor.collect()
    with transfer._in.on(transfer._in.kernels):
        torch.cuda._sleep(200 * PAUSE)
    new = transfer.write(blocks_of(2), pieces, None, {})
    for step, after in ((3, 0), (4, old)):
        executor.submit(chunk(step, 1, LENGTH, blocks_of(1), after=after, closes=(1,)))
        executor.collect()
        event = transfer._arriving[new].whole._event
        assert event is not None
        assert not event.query()
    transfer.settle()
    executor.close()


def test_what_never_comes_ends_in_an_error() -> None:
    """In a process of its own, which cannot use its card afterwards."""
    script = (
        "import torch; from engram_runtime.executor.device.gather import hold\n"
        "reached, ticket = torch.tensor([3, 1], device='cuda'), torch.tensor([2], device='cuda')\n"
        "hold(reached, 0, ticket, 1000); torch.cuda.synchronize(); print('open', flush=True)\n"
        "hold(reached, 1, ticket, 1000); torch.cuda.synchronize(); print('passed', flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["open"], done.stderr[-500:]
    assert done.returncode != 0
    assert "CUDA" in done.stderr
