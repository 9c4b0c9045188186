"""What the host and a recorded decode tell each other, without a copy between two steps.

A copy to or from the device between two graphs costs the second one about 10 us of waiting, however few bytes it moves
(measured on an H200, where a step of Qwen3-0.6B takes 660). So a recorded decode fetches its plan from pinned host
memory by its first kernel, and its last one leaves the tokens there. Both find their place by a count on the device,
which the host follows: one write, one run.
"""

from __future__ import annotations

import importlib
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engram_runtime.executor.device.staging import host_buffer
from engram_runtime.executor.plan import MOST_STEPS_TOGETHER

SLOTS = 5 * MOST_STEPS_TOGETHER
"""One launch is being read, one waits, one is being written; before that, two may be recorded, which runs them."""


class Fetch(Protocol):
    def __call__(self, plans: Tensor, tick: Tensor, plan: Tensor) -> None:
        """plan [n] takes the first n words of plans [SLOTS, words], int64, at the count `tick` [1] int64."""


class Publish(Protocol):
    def __call__(
        self,
        chosen: tuple[Tensor, Tensor] | None,
        found: tuple[Tensor, Tensor],
        last: Tensor,
        feed: Tensor,
        tick: Tensor,
    ) -> None:
        """chosen (token ids [R] int64, log-probabilities [R] fp32) go to found, the same [SLOTS, R or more], at the
        count `tick`; tokens also to last[feed]. Then `tick` is one more. chosen None: only that."""


def fetch_reference(plans: Tensor, tick: Tensor, plan: Tensor) -> None:
    plan.copy_(plans[int(tick) % SLOTS, : plan.numel()])


def publish_reference(
    chosen: tuple[Tensor, Tensor] | None, found: tuple[Tensor, Tensor], last: Tensor, feed: Tensor, tick: Tensor
) -> None:
    if chosen is not None:
        slot = int(tick) % SLOTS
        for values, host in zip(chosen, found, strict=True):
            host[slot, : values.numel()] = values
        last.scatter_(0, feed, chosen[0])
    tick += 1


class Ring:
    """`words`: int64 words of the longest plan; `rows`: of the largest decode."""

    def __init__(self, words: int, rows: int, device: torch.device) -> None:
        self._plans = host_buffer((SLOTS, words), torch.int64, device)
        self._plans.zero_()
        self._written = self._plans.numpy()
        self._found = (
            host_buffer((SLOTS, rows), torch.int64, device),
            host_buffer((SLOTS, rows), torch.float32, device),
        )
        self._tick = torch.zeros(1, dtype=torch.int64, device=device)
        self._count = 0
        self._fetch: Fetch = fetch_reference
        self._publish: Publish = publish_reference
        if device.type == "cuda":
            # By name, because other machines need not have triton.
            kernels = importlib.import_module("engram_runtime.executor.device.gather")
            self._fetch, self._publish = kernels.fetch, kernels.publish

    # The host

    def write(self, words: np.ndarray) -> tuple[Tensor, Tensor]:
        """The plan of the step that runs next, which must follow; where its (token ids [rows] int64, log-probabilities
        [rows] fp32) will be until SLOTS more were written."""
        slot = self._count % SLOTS
        self._count += 1
        self._written[slot, : words.size] = words.reshape(-1)
        return self._found[0][slot], self._found[1][slot]

    # The device

    def fetch(self, plan: Tensor) -> None:
        """Queue: what was written for this step into plan [n] int64, on the device."""
        self._fetch(self._plans, self._tick, plan)

    def publish(self, chosen: tuple[Tensor, Tensor] | None, last: Tensor, feed: Tensor) -> None:
        """Queue, as the step's last work: see `Publish`."""
        self._publish(chosen, self._found, last, feed, self._tick)
