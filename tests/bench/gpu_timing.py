"""How GPU time is measured here: graphs of rotated operands, medians, and a record of what was measured where.

A graph removes launch gaps of the host; rotating over several copies of the weights keeps the L2 from holding them,
which would make a small layer look twice as fast as it is in a model.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

COPY_TBS = 4.26
"""Device copy rate of the H200 in TB/s, read and write counted (bars.md): 100 % of a memory-bound kernel."""
MATMUL_TFLOPS = 805.0
"""8192^3 bf16 product on the H200: 100 % of a compute-bound kernel."""


def time_us(calls: Sequence[Callable[[], object]], budget_ms: float = 4.0, rounds: int = 3) -> float:
    """Median microseconds of one call; all `calls` (one per rotated operand set) are captured into one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in (calls[0], calls[-1]):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def measure(replays: int) -> float:
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / replays

    measure(1)
    replays = max(1, int(budget_ms / max(measure(1), 1e-3)))
    measure(replays)  # discarded: short windows read up to 15 % slower on large reads
    times = sorted(measure(replays) for _ in range(rounds))
    return times[rounds // 2] / len(calls) * 1e3


def environment() -> dict[str, str]:
    """What a figure depends on: GPU, driver-independent versions, date."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def save(name: str, content: dict[str, Any]) -> Path:
    """Write results to $OUT when it is set, else to tests/bench/results; the environment is added."""
    folder = Path(os.environ.get("OUT") or Path(__file__).parent / "results")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(json.dumps({"environment": environment(), **content}, indent=1) + "\n", encoding="utf-8")
    return path
