"""Search the tiles of gate and up projections of many rows on this GPU, beside the product followed by the activation.

    PYTHONPATH=kernels:. python tests/bench/tune_wide.py [--shapes 12288x4096,...] [--rows 8192] [--kinds warpgroups]

At these sizes a card draws all the power that it may, and what ran just before decides how fast it is: every candidate
runs long enough to reach that state, in turn, three times; the median counts. Each one's output is checked against fp32
first. The winners go to tune_wide.json in the form of a tuning table ("gated_linear.wide" of
kernels/engram_kernels/tuning/<gpu>.json); no entry where the two kernels win.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable, Sequence

import torch

from engram_kernels.autotune.linear import describe
from engram_kernels.gated_linear.kernel import WIDE_KINDS, Tile, Warpgroups, Wide, run_wide, wide_plan
from engram_kernels.silu_and_mul.kernel import silu_and_mul
from tests.bench.gpu_timing import MATMUL_TFLOPS, save, time_us

SHAPES = {"8B": (12288, 4096), "llama": (14336, 4096), "0.6B": (3072, 1024), "granite shared": (1024, 1536)}
ROWS = (512, 1024, 1100, 2048, 2300, 4096, 8192)
"""Powers of two are what a table lists; the others only show what `wide_plan` makes of them."""
WINDOW_MS = 120.0
"""Of one candidate, before it is timed and while it is."""
COPIES = 4
"""Of the weights, in turn: those of a large layer are not in the L2 from one call to the next."""


def candidates(n: int, k: int, current: Wide | None, kinds: Sequence[str]) -> list[Wide]:
    """Today's choice first."""
    tiles = [Tile(128, 128, 64, 3, 8, 8), Tile(128, 128, 64, 3, 8, 16), Tile(128, 128, 64, 4, 8, 16)]
    tiles += [Tile(64, 128, 64, 4, 4, 8), Tile(64, 64, 128, 4, 4, 8)]
    found: list[Wide] = [] if current is None else [current]
    found += tiles if "tile" in kinds else []
    if "warpgroups" in kinds and torch.cuda.get_device_capability()[0] == 9:
        found += [Warpgroups(group) for group in (4, 6, 8, 11, 16)]
    return [choice for choice in dict.fromkeys(found) if choice.misfit(n, k) is None]


def tune(rows: int, n: int, k: int, weights: list[torch.Tensor], kinds: Sequence[str]) -> dict[str, object] | None:
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    y = torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    some = torch.arange(0, rows, max(1, rows // 300), device="cuda")
    gate, up = (x[some].float() @ weights[0].float().t()).chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up

    def two_kernels(i: int) -> object:
        return silu_and_mul(torch.nn.functional.linear(x, weights[i % COPIES]))

    def call_of(choice: Wide) -> Callable[[int], object]:
        return lambda i: run_wide(choice, x, weights[i % COPIES], y)

    calls: dict[Wide | None, Callable[[int], object]] = {None: two_kernels}
    for choice in candidates(n, k, wide_plan(rows, n, k, programs), kinds):
        try:
            y.fill_(float("nan"))
            call_of(choice)(0)
            error = ((y[some].float() - expected).norm() / expected.norm()).item()
        except Exception as failure:
            print("FAIL", rows, n, k, choice, repr(failure)[:150], file=sys.stderr)
            continue
        if not error < 4e-3:
            print("WRONG", rows, n, k, choice, error, flush=True)
            continue
        calls[choice] = call_of(choice)
    seen: dict[Wide | None, list[float]] = {choice: [] for choice in calls}
    for _ in range(3):
        for choice, call in calls.items():
            seen[choice].append(time_us([functools.partial(call, i) for i in range(COPIES)], WINDOW_MS, 1))
    times = {choice: statistics.median(each) for choice, each in seen.items()}
    best = min(times, key=lambda choice: times[choice])
    rate = 4 * rows * n * k / times[best] / 1e6
    shown = " ".join(f"{choice}: {us:.1f}" for choice, us in times.items())
    print(f"{rows} rows, {n}x{k}: {best} {times[best]:.1f} us ({rate / MATMUL_TFLOPS:.0%}); {shown}", flush=True)
    if best is None:
        return None
    return {**describe(best), "us": round(times[best], 1), "cublas_us": round(times[None], 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=",".join(f"{n}x{k}" for n, k in SHAPES.values()))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--kinds", default=",".join(WIDE_KINDS))
    args = parser.parse_args()
    found: dict[str, dict[str, object]] = {}
    for shape in args.shapes.split(","):
        n, k = map(int, shape.split("x"))
        weights = [torch.randn(2 * n, k, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(COPIES)]
        for rows in map(int, args.rows.split(",")):
            entry = tune(rows, n, k, weights, args.kinds.split(","))
            if entry is not None and rows & (rows - 1) == 0:
                found[f"rows={rows},n={n},k={k}"] = entry
            save("tune_wide.json", {"gated_linear.wide": found})


if __name__ == "__main__":
    main()
