"""A restore's layers as they arrive on the device, and the steps that follow close behind them.

The next step of a conversation needs a layer's keys and values only when it comes to that layer. So a restore is copied
layer by layer, and after every few layers its number is left on the device; a recorded step waits there, between two
kernels, until the number of the restore it follows has come. The step may be queued while most of the copy is still
under way, and computes the first layers meanwhile. Numbers only go up and restores are copied one after another, so a
step that follows none (0), or one that is over, waits for nothing.

Whoever submits such a step has queued the whole restore before: a step that waits for something queued behind it would
wait for ever.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engram_runtime.models.caches import Caches

MOST_GATES = 8
"""Places where a recorded step waits, each a kernel of a microsecond or two."""

Hold = Callable[[Tensor, int, Tensor], None]
"""reached [gates] int64, a gate, ticket [1] int64: queue a wait until reached[gate] >= ticket."""


def hold_reference(reached: Tensor, gate: int, ticket: Tensor) -> None:
    """Where everything is done when it is queued there is nothing to wait for: RuntimeError if there were."""
    if int(reached[gate]) < int(ticket):
        raise RuntimeError(f"restore {int(ticket)} has not come to gate {gate}, and never will")


class Arrivals:
    """Gates of a model with that many attention layers: gate g is in front of its first layer."""

    def __init__(self, layers: int, device: torch.device) -> None:
        self.gates = min(MOST_GATES, layers)
        self._first = [-(-gate * layers // self.gates) for gate in range(self.gates + 1)] if layers else [0]
        self._reached = torch.zeros(self.gates, dtype=torch.int64, device=device)
        self._hold: Hold = hold_reference
        if device.type == "cuda":
            # By name, because other machines need not have triton.
            self._hold = importlib.import_module("engram_runtime.executor.device.gather").hold

    def first_layer(self, gate: int) -> int:
        """Of the layers behind a gate; the number of layers for the gate after the last one."""
        return self._first[gate]

    def announce(self, first: int, end: int, ticket: int) -> None:
        """Queue behind their copies: the layers of gates [first, end) of a restore are there."""
        self._reached[first:end] = ticket

    def hold(self, layer: int, ticket: Tensor) -> None:
        """Queue in front of a layer: wait for the restore `ticket` [1] int64, where a gate is."""
        if layer in self._first:
            self._hold(self._reached, self._first.index(layer), ticket)


@dataclass(slots=True)
class ArrivingCaches(Caches):
    """The caches of a step that may follow a restore closely. Its recurrent states are waited for before the step."""

    arrivals: Arrivals = field(kw_only=True)
    ticket: Tensor = field(kw_only=True)
    """[1] int64 on the device."""

    def pages(self, layer: int) -> Tensor:
        self.arrivals.hold(layer, self.ticket)
        return self.kv[layer]
