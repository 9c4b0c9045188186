"""Steps recorded once per shape and way of sampling, and replayed. The shape of a decode step is its batch size.

Steps with prompts have many shapes, and recording one takes two or three times as long as launching it. So one is
recorded when it comes for the second time, and while all that is kept is in use, others are launched.

A graph is recorded the first time its shape is needed, after the same step has run once on spare rows (so every
kernel is compiled and every workspace exists), the largest decode before any other: all graphs share one memory pool,
and what the largest one needs serves the smaller ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engram_kernels import Registry
from engram_runtime.executor.device.mixed import MixedShape
from engram_runtime.executor.device.sampling import Way


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """`steps` decodes of `batch` sequences, one behind the other."""

    batch: int
    steps: int


Shape = int | DecodeRun | MixedShape
Step = Callable[[], tuple[Tensor, ...]]
"""Launches one step; everything it reads and returns stays at the same addresses from call to call."""

MOST_MIXED = 128
"""Recorded steps with prompts that are kept; each takes the driver about a megabyte of the card's memory."""
SIGHTINGS = 2
IDLE = 1000
"""Steps with prompts after which a recorded one that served none of them makes way for another."""
MOST_SEEN = 4096
"""Shapes whose sightings are counted before counting begins anew."""
UNRECORDABLE = ("rope_attention", "paged_attention", "sample", "experts")
"""Ops whose torch reference asks the device or the host for lengths while it runs."""


class Recorder(Protocol):
    """Turns a step into something that repeats it, without running it."""

    def record(self, step: Step) -> Step: ...


class CudaRecorder:
    """CUDA graphs in one memory pool. Call it on the stream that the replays will use."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, step: Step) -> Step:
        torch.cuda.current_stream().synchronize()  # so that a graph may be dropped as soon as this one is there
        graph = torch.cuda.CUDAGraph()
        # Other threads copy snapshots meanwhile: what they do is no part of the graph and does not spoil it.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            outputs = step()
        finally:
            graph.capture_end()

        def replay() -> tuple[Tensor, ...]:
            graph.replay()
            return outputs

        return replay


def batch_sizes(most: int) -> tuple[int, ...]:
    """Sizes graphs are recorded for, ascending: powers of two to 64, then steps that waste little, then `most`."""
    sizes = [1, 2, 4, 8, 16, 32, 64, *range(96, 257, 32), *range(320, most + 1, 64)]
    return (*(size for size in sizes if size < most), most)


class StepGraphs:
    """`build(shape, way)` gives the step to record; `rest(shape)` points its inputs at spare rows."""

    def __init__(
        self, most: int, recorder: Recorder, build: Callable[[Shape, Way], Step], rest: Callable[[Shape], None]
    ) -> None:
        self.sizes = batch_sizes(most)
        self._recorder, self._build, self._rest = recorder, build, rest
        self._recorded: dict[tuple[Shape, Way], Step] = {}
        self._used: dict[tuple[Shape, Way], int] = {}
        """When each of the mixed ones was used last, in that order."""
        self._seen: dict[tuple[Shape, Way], int] = {}
        """How often mixed ones that are not recorded came."""
        self._steps = 0
        """Mixed ones so far."""

    def __len__(self) -> int:
        return len(self._recorded)

    def size_for(self, sequences: int) -> int:
        """The smallest recorded size that holds this many sequences."""
        return self.sizes[bisect_left(self.sizes, sequences)]

    def serves(self, shape: MixedShape, way: Way) -> bool:
        """Whether a step that is due now is to be taken from `get`; otherwise it is launched. Ask once a step."""
        key = shape, way
        self._steps += 1
        if key in self._recorded:
            return True
        if len(self._seen) >= MOST_SEEN:
            self._seen.clear()
        self._seen[key] = self._seen.get(key, 0) + 1
        if self._seen[key] < SIGHTINGS:
            return False
        return len(self._used) < MOST_MIXED or self._steps - next(iter(self._used.values())) > IDLE

    def get(self, shape: Shape, way: Way) -> Step:
        """The replay of a step; recorded now if need be, which overwrites the step's inputs with spare rows."""
        if not self._recorded and not isinstance(shape, MixedShape):
            self._record(self.sizes[-1], way)
        if (shape, way) not in self._recorded:
            self._record(shape, way)
        if isinstance(shape, MixedShape):
            self._used.pop((shape, way), None)
            self._used[shape, way] = self._steps
        return self._recorded[shape, way]

    def clear(self) -> None:
        for kept in (self._recorded, self._used, self._seen):
            kept.clear()

    def _record(self, shape: Shape, way: Way) -> None:
        step = self._build(shape, way)
        self._rest(shape)
        step()
        self._recorded[shape, way] = self._recorder.record(step)
        self._seen.pop((shape, way), None)
        if isinstance(shape, MixedShape) and len(self._used) >= MOST_MIXED:
            oldest = next(iter(self._used))
            del self._recorded[oldest], self._used[oldest]


def why_not_recorded(
    device: torch.device, dtype: torch.dtype, overrides: Mapping[str, str] | None, registry: Registry | None
) -> str | None:
    """Why decode steps cannot be recorded with these ops; None when they can."""
    if device.type != "cuda":
        return f"there are no CUDA graphs on {device.type}"
    chosen = (registry or Registry.default()).explain(device, dtype, overrides)
    plain = [choice.op for choice in chosen if choice.op in UNRECORDABLE and choice.backend == "torch"]
    return f"the torch backend of {', '.join(plain)} waits for the device" if plain else None
