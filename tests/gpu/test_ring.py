"""Plans and tokens that a recorded step reads and writes in pinned host memory, a step ahead of the host."""

from __future__ import annotations

import numpy as np
import torch

from engram_runtime.executor.device.graphs import CudaRecorder
from engram_runtime.executor.device.ring import Ring
from engram_runtime.executor.device.staging import Done

ROWS, WORDS, STEPS = 300, 1800, 200


def test_replays_find_their_own_plans_and_leave_their_own_tokens() -> None:
    device = torch.device("cuda")
    ring = Ring(WORDS, ROWS, device)
    plan = torch.zeros(WORDS, dtype=torch.int64, device=device)
    last = torch.zeros(ROWS + 1, dtype=torch.int64, device=device)
    feed = torch.arange(ROWS - 1, -1, -1, device=device)

    def step() -> tuple[torch.Tensor, ...]:
        ring.fetch(plan)
        tokens = plan[:ROWS] + last[feed]
        ring.publish((tokens, tokens.float() / 4), last, feed)
        return ()

    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        ring.write(np.zeros(WORDS))
        step()
        replay = CudaRecorder().record(step)
        sums = np.zeros(ROWS, dtype=np.int64)
        waiting: list[tuple[Done, tuple[torch.Tensor, torch.Tensor], np.ndarray]] = []
        for number in range(STEPS):
            words = np.arange(WORDS) * (number + 1) % 977
            told = ring.write(words)
            replay()
            sums = sums + words[:ROWS]
            waiting.append((Done(device), told, sums))
            if len(waiting) > 1:
                done, (ids, logprobs), expected = waiting.pop(0)
                done.wait()
                assert ids.tolist() == expected.tolist()
                assert logprobs.tolist() == (expected / 4).tolist()
        torch.cuda.synchronize()
        assert last[feed].tolist() == sums.tolist()
