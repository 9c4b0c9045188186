"""Plans and tokens in host memory: every step finds its own, however far the host is ahead."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from engram_runtime.engine.config import EngineConfig
from engram_runtime.engine.core import LLMEngine
from engram_runtime.engine.sampling_params import SamplingParams
from engram_runtime.executor.device import gather, pending
from engram_runtime.executor.device.pending import Pending
from engram_runtime.executor.device.ring import SLOTS, Ring, fetch_reference, publish_reference
from engram_runtime.executor.device.staging import Packer
from engram_runtime.executor.plan import RowOpen, RowSampling, SequencePlan, StepPlan
from tests.support.device_step import load_tiny, make_executor
from tests.support.tiny import make_tiny

CPU = torch.device("cpu")


def with_kernels(ring: Ring) -> Ring:
    ring._fetch, ring._publish = gather.fetch, gather.publish  # in the interpreter
    return ring


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_each_step_gets_what_was_written_for_it(kernels: bool, ahead: int) -> None:
    ring = Ring(words=40, rows=6, device=CPU)
    if kernels:
        with_kernels(ring)
    last = torch.zeros(9, dtype=torch.int64)
    told: list[tuple[Tensor, Tensor]] = []
    for number in range(3 * SLOTS + 2):
        while len(told) < number + ahead:
            told.append(ring.write(np.full((2, 5), 100 + len(told))))
        plan = torch.full((10,), -1, dtype=torch.int64)
        ring.fetch(plan)
        assert plan.tolist() == [100 + number] * 10
        tokens = torch.tensor([number, number + 1, number + 2])
        ring.publish((tokens, tokens / 8), last, torch.tensor([2, 0, 7]))
        ids, logprobs = told[number]
        assert ids[:3].tolist() == tokens.tolist()
        assert logprobs[:3].tolist() == (tokens / 8).tolist()
        assert last[[2, 0, 7]].tolist() == tokens.tolist()


def test_a_step_that_chooses_nothing_counts_too() -> None:
    ring = with_kernels(Ring(words=4, rows=2, device=CPU))
    last = torch.full((3,), 5)
    for value in (7, 8):
        ring.write(np.array([value]))
    ring.publish(None, last, torch.tensor([0, 1]))
    plan = torch.zeros(1, dtype=torch.int64)
    ring.fetch(plan)
    assert plan.item() == 8
    assert last.tolist() == [5, 5, 5]


@pytest.mark.parametrize("count", [1, 1024, 1025, 2500])
def test_the_fetching_kernel_equals_its_reference(count: int) -> None:
    plans = torch.arange(SLOTS * 3000).view(SLOTS, 3000)
    for tick in (0, SLOTS - 1, 5 * SLOTS + 3):
        found, expected = torch.full((2, count + 1), -1)
        for plan, function in ((found, gather.fetch), (expected, fetch_reference)):
            function(plans, torch.tensor([tick]), plan[:-1])
        assert torch.equal(found, expected)
        assert found[-1] == -1


@pytest.mark.parametrize("count", [1, 256, 300])
def test_the_publishing_kernel_equals_its_reference(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    tokens = torch.randint(0, 1 << 40, (count,), generator=generator)
    chosen = tokens, torch.rand(count, generator=generator)
    feed = torch.randperm(400, generator=generator)[:count]
    results = []
    for function in (gather.publish, publish_reference):
        found = torch.zeros(SLOTS, 320, dtype=torch.int64), torch.zeros(SLOTS, 320)
        last, tick = torch.zeros(400, dtype=torch.int64), torch.tensor([SLOTS + 2])
        function(chosen, found, last, feed, tick)
        results.append((*found, last, tick))
    for name, a, b in zip(("tokens", "logprobs", "last", "tick"), *results, strict=True):
        assert torch.equal(a, b), name
    assert results[0][3].item() == SLOTS + 3


@pytest.mark.parametrize("family", ["llama", "granite"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_decode_waits_for_a_copy(
    family: str, temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ops = load_tiny(make_tiny(family, tmp_path))
    executor = make_executor("recorded", model, ops, seqs=3, window=160, tokens=2048)
    engine = LLMEngine(
        EngineConfig("tiny", max_num_seqs=3, max_num_batched_tokens=64, seed=0, progress=False),
        executor,
        vocab_size=model.spec.vocab_size,
    )
    copies: list[int] = []
    flush = Packer.flush
    monkeypatch.setattr(Packer, "flush", lambda self, into=None: (copies.append(len(self)), flush(self, into))[1])
    monkeypatch.setattr(pending, "to_host", lambda value: (copies.append(-1), value.clone())[1])
    for name in "abc":
        params = SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True)
        engine.add_request(name, list(range(9)), params)
    decodes = 0
    while engine.has_unfinished_requests:
        before = len(copies)
        outputs = engine.step()
        if len(outputs) == 3 and min(len(output.token_ids) for output in outputs) > 2:
            assert len(copies) == before
            decodes += 1
    assert decodes > 30
    engine.close()


class Interrupted(BaseException):
    """As a keyboard's: whoever drives the engine may catch it and go on."""


@pytest.mark.parametrize("where", ["recording", "queueing", "queueing several"])
def test_after_a_step_that_failed_nobody_gets_the_plan_of_another(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ops = load_tiny(make_tiny("llama", tmp_path))
    executor = make_executor("recorded", model, ops, seqs=2, window=64, tokens=256)
    blocks = (0, 1), (2, 3)
    opens = tuple(RowOpen(row, RowSampling(), tuple(range(4, 9))) for row in range(2))
    prompts = [SequencePlan(row, 0, tuple(range(4, 9)), blocks[row], 0, True) for row in range(2)]
    executor.submit(StepPlan(0, tuple(prompts), opens=opens))
    executor.collect()

    def fail(*arguments: object) -> None:
        raise Interrupted

    decodes = [StepPlan(1 + n, (SequencePlan(0, 5 + n, None, blocks[0], 0, True),)) for n in range(2)]
    places = {"recording": (model, "forward"), "queueing": (executor._memory, "move")}
    with monkeypatch.context() as broken:
        broken.setattr(*places.get(where, (Pending, "expect")), fail)
        with pytest.raises(Interrupted):
            executor.submit_together(decodes) if where == "queueing several" else executor.submit(decodes[0])
    with pytest.raises(RuntimeError, match=r"^a step before this one failed while it was queued"):
        executor.submit(StepPlan(2, (SequencePlan(1, 5, None, blocks[1], 0, True),)))
    executor.close()
