"""Search launch parameters of small linear layers on this GPU: GEMV, weight stream, split-K tiles or cuBLAS per shape
and row count; and of the gated layers, whose n is that of their output.

    PYTHONPATH=kernels:. python tests/bench/tune_linear.py [--shapes 4096x1024,...] [--gated 3072x1024,...] [--rows 1,4]

Every candidate's output is checked against fp32 before it is timed; the winners go to tune_linear.json in the form of a
tuning table ("linear" and "gated_linear" of kernels/engram_kernels/tuning/<gpu>.json). Workers compile the candidates
first, in parallel, into Triton's cache. --kinds stream tries only that kind beside the entry that the table has.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence

import torch

from engram_kernels.autotune.candidates import FP32_KINDS, KINDS, ROWS, call, candidates
from engram_kernels.autotune.linear import describe
from engram_kernels.gated_linear.kernel import without_plan
from engram_kernels.linear.kernel import Choice, Gemv
from tests.bench.gpu_timing import COPY_TBS, save, time_us

SHAPES = {  # N x K of the models in bars.md
    "0.6B qkv": (4096, 1024), "0.6B o": (1024, 2048), "0.6B gate_up": (6144, 1024), "0.6B down": (1024, 3072),
    "0.6B head": (151936, 1024), "8B qkv": (6144, 4096), "8B o": (4096, 4096), "8B gate_up": (24576, 4096),
    "8B down": (4096, 12288), "8B head": (151936, 4096), "llama gate_up": (28672, 4096), "llama down": (4096, 14336),
    "llama head": (128256, 4096), "granite in": (6448, 1536), "granite out": (1536, 3072),
    "granite shared in": (2048, 1536), "granite shared out": (1536, 1024), "granite router": (64, 1536),
    "granite qkv": (2560, 1536), "granite o": (1536, 1536), "granite head": (100352, 1536),
}  # fmt: skip
GATED = {"0.6B": (3072, 1024), "8B": (12288, 4096), "llama": (14336, 4096), "granite shared": (1024, 1536)}


HEAD = 100_000
"""A layer with more outputs is the vocabulary projection, which returns fp32."""


def _of(n: int, kinds: Sequence[str]) -> list[str]:
    return [kind for kind in kinds if n <= HEAD or kind in FP32_KINDS]


def compile_share(
    cases: list[tuple[int, int, bool]], rows: list[int], kinds: Sequence[str], part: int, parts: int
) -> None:
    """Compile every parts-th distinct kernel by running it once on a short weight matrix."""
    distinct: dict[object, tuple[Choice, int, int, bool, bool]] = {}
    for n, k, gated in cases:
        for count in rows:
            for choice in candidates(count, n, k, gated, _of(n, kinds)):
                head = n > HEAD
                key = (choice, head, gated, (count, k) if isinstance(choice, Gemv) else None)
                distinct.setdefault(key, (choice, count, k, head, gated))
    for choice, count, k, head, gated in list(distinct.values())[part::parts]:
        x = torch.zeros(count, k, dtype=torch.bfloat16, device="cuda")
        weight = torch.zeros(256, k, dtype=torch.bfloat16, device="cuda")
        width = 128 if gated else 256
        y = torch.empty(count, width, dtype=torch.float32 if head else torch.bfloat16, device="cuda")
        try:
            call(choice, x, weight, y, gated)
        except Exception as error:
            print("cannot compile", choice, repr(error)[:200], file=sys.stderr)


def tune(
    n: int, k: int, gated: bool, rows: int, weights: list[torch.Tensor], kinds: Sequence[str]
) -> dict[str, object]:
    """The table entry of one shape and row count, with its time in microseconds and that of what would run without an
    entry: cuBLAS, or for a gated layer whatever serves its product, and the activation."""
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    dtype = torch.float32 if n > HEAD else torch.bfloat16
    y = torch.empty(rows, n, dtype=dtype, device="cuda")
    expected = x.float() @ weights[0].float().t()
    if gated:
        expected = torch.nn.functional.silu(expected[:, :n]) * expected[:, n:]
    many = [weights[i % len(weights)] for i in range(max(len(weights), 8))]
    if gated:
        before = time_us([lambda w=w: without_plan(x, w) for w in many])
    elif dtype == torch.float32:
        before = time_us([lambda w=w: torch.mm(x, w.t(), out_dtype=torch.float32) for w in many])
    else:
        before = time_us([lambda w=w: torch.mm(x, w.t(), out=y) for w in many])
    best: tuple[float, Choice | None] = (before, None)
    shown = []
    for choice in candidates(rows, n, k, gated, _of(n, kinds)):
        try:
            y.fill_(float("nan"))
            call(choice, x, weights[0], y, gated)
            error = ((y.float() - expected).norm() / expected.norm()).item()
            if not error < 4e-3:
                print("WRONG", n, k, rows, choice, error, flush=True)
                continue
            us = time_us([lambda w=w, c=choice: call(c, x, w, y, gated) for w in many], 2.0)
        except Exception as failure:
            print("FAIL", n, k, rows, choice, repr(failure)[:150], flush=True)
            continue
        shown.append(f"{us:.1f}")
        if us < best[0]:
            best = (us, choice)
    us, found = best
    entry = describe(found)
    rate = weights[0].numel() * 2 / us / 1e6
    print(f"{'gated ' if gated else ''}{n}x{k} rows {rows}: {us:.2f} us ({rate / COPY_TBS:.0%}), before {before:.2f}, ")
    print(f"   {entry}; tried {' '.join(shown)}", flush=True)
    return {**entry, "us": round(us, 2), "before_us" if gated else "cublas_us": round(before, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=",".join(f"{n}x{k}" for n, k in SHAPES.values()))
    parser.add_argument("--gated", default=",".join(f"{n}x{k}" for n, k in GATED.values()))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop starting new shapes after this long")
    parser.add_argument("--compile", default="", help="part/parts: only fill the compile cache")
    args = parser.parse_args()
    cases = [
        (*map(int, shape.split("x")), gated)
        for shapes, gated in ((args.shapes, False), (args.gated, True))
        for shape in filter(None, shapes.split(","))
    ]
    rows = [int(count) for count in args.rows.split(",")]
    kinds = args.kinds.split(",")
    if args.compile:
        part, parts = map(int, args.compile.split("/"))
        compile_share(cases, rows, kinds, part, parts)
        return
    began = time.monotonic()
    workers = [
        subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--compile", f"{part}/{args.workers}"])
        for part in range(args.workers)
    ]
    for worker in workers:
        worker.wait()
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    tables: dict[str, dict[str, object]] = {"linear": {}, "gated_linear": {}}
    for n, k, gated in cases:
        if time.monotonic() - began > args.seconds:
            print(f"out of time before {n}x{k}", flush=True)
            break
        height = 2 * n if gated else n
        copies = max(2, min(24, -(-(320 << 20) // (height * k * 2))))
        weights = [torch.randn(height, k, device="cuda", dtype=torch.bfloat16) * 0.05 for _ in range(copies)]
        for count in rows:
            tables["gated_linear" if gated else "linear"][f"rows={count},n={n},k={k}"] = tune(
                n, k, gated, count, weights, kinds
            )
        del weights
        save("tune_linear.json", tables)


if __name__ == "__main__":
    main()
