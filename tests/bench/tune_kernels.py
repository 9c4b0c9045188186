"""Search launch parameters of attention, scan and experts on this GPU; results in the form of a tuning table.

    PYTHONPATH=kernels:. python tests/bench/tune_kernels.py [--parts decode,chunk,prefill,scan,experts]

These are the entries for shapes that no table lists; `engram autotune` searches those of one model. A candidate
takes the place of what its kernel module asks for parameters, for the length of a measurement. Its output is compared
with a higher precision before it is timed. Winners minimise the sum of times relative to the best over the listed
shapes.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

from engram_kernels.autotune.attention import COMPANY, DECODE_TILES, LONGER
from engram_kernels.experts import kernel as experts_kernel
from engram_kernels.experts.plan import SMALL_PAIRS, Choice, Direct, Grouped, Small
from engram_kernels.experts.reference import experts as experts_reference
from engram_kernels.paged_attention import kernel as attention
from engram_kernels.paged_attention.plan import Split, Tile
from engram_kernels.route.reference import route
from engram_kernels.ssd_scan import kernel as scan_kernel
from engram_kernels.ssd_scan.reference import ssd_scan as scan_reference
from tests.bench.gpu_timing import save, time_us
from tests.support.kernel_cases import attention_fp64, make_step, relative_error

BF16 = torch.bfloat16
Config = dict[str, Any]
Case = tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor], list[Callable[[], object]]]


Make = Callable[..., Any]
"""(candidate, what the kernel asks with) -> its parameters."""


def search(module: Any, asks: str, make: Make, configs: list[Config], cases: dict[str, Case], limit: float) -> Config:
    """Time every right configuration on every case; print the best of each case and return the best of all."""
    plain = getattr(module, asks)
    times: dict[int, dict[str, float]] = {}
    expected = {name: reference() for name, (_, reference, _) in cases.items()}
    try:
        for number, config in enumerate(configs):
            setattr(module, asks, functools.partial(make, config))
            found = {}
            for name, (checked, _, calls) in cases.items():
                try:
                    error = relative_error(checked(), expected[name])
                    if not error < limit:
                        print("WRONG", name, config, error, flush=True)
                        break
                    found[name] = 1.0 if "--compile-only" in sys.argv else time_us(calls, 2.0)
                except Exception as failure:
                    print("FAIL", name, config, repr(failure)[:120], flush=True)
                    break
            if len(found) == len(cases):
                times[number] = found
    finally:
        setattr(module, asks, plain)
    for name in cases:
        ranked = sorted(times, key=lambda number: times[number][name])[:4]
        print(name, [(round(times[n][name], 1), list(configs[n].values())) for n in ranked], flush=True)
    best_of = {name: min(found[name] for found in times.values()) for name in cases}
    winner = min(times, key=lambda number: sum(times[number][name] / best_of[name] for name in cases))
    return {**configs[winner], "us": {name: round(us, 1) for name, us in times[winner].items()}}


def _attention_case(pool: torch.Tensor, seqs: list[tuple[int, int]], heads: int, sets: int) -> Case:
    meta, needed = make_step(seqs, device="cuda")
    sets = max(1, min(sets, pool.shape[1] // needed))
    order = torch.randperm(pool.shape[1], device="cuda").int()
    steps = []
    for i in range(sets):
        tables = order[i * needed + meta.block_tables.long().clamp(max=needed - 1)]
        steps.append(type(meta)(**{**{f: getattr(meta, f) for f in meta.__dataclass_fields__}, "block_tables": tables}))
    q = torch.randn(meta.num_tokens, heads, 128, device="cuda", dtype=BF16)
    picked = torch.unique(torch.randint(0, meta.num_tokens, (24,), device="cuda"))
    return (
        lambda: attention.paged_attention(q, pool, steps[0], 0.088)[picked],
        lambda: attention_fp64(q, pool, steps[0], 0.088, picked),
        [lambda m=m: attention.paged_attention(q, pool, m, 0.088) for m in steps],
    )


def _split(config: Config, *shape: object) -> Split:
    return Split(**config)


def _tile(config: Config, *shape: object) -> Tile:
    return Tile(**config)


def _pool(pages: int) -> torch.Tensor:
    return torch.randn(2, pages, 8, 16, 128, device="cuda", dtype=BF16)


def decode(size: str, batch: int, contexts: tuple[int, ...]) -> Config:
    pool = _pool(61_000)
    cases = {
        f"{batch}x{context}": _attention_case(pool, [(1, context)] * batch, 32, max(2, 16 // batch))
        for context in contexts
    }
    if batch >= COMPANY:
        cases["a long one"] = _attention_case(pool, [(1, LONGER * 500), *[(1, 500)] * (batch - 1)], 32, 2)
    configs = [
        {"keys": keys, "stages": stages, "warps": warps, "waves": waves, "merge": merge}
        for keys, stages, warps in DECODE_TILES
        for waves in (1, 2, 4, 8)
        for merge in ((16, 64) if batch == 1 else (16,))
    ]
    return {f"size={size},rows=16": search(attention, "split_plan", _split, configs, cases, 6e-3)}


def chunk() -> Config:
    pool = _pool(61_000)
    found = {}
    for size, seqs in (("tiny", {"40@2500": [(40, 2540)], "120@8000": [(120, 8120)], "20@500": [(20, 520)]}),
                       ("small", {"16x40@2500": [(40, 2540)] * 16})):  # fmt: skip
        cases = {name: _attention_case(pool, list(s), 32, 4) for name, s in seqs.items()}
        configs = [
            {"keys": keys, "stages": stages, "warps": warps, "waves": waves, "merge": 16}
            for keys, stages, warps in ((64, 2, 4), (64, 3, 4), (32, 3, 4), (128, 2, 8), (64, 2, 8), (128, 2, 4))
            for waves in (1, 2, 4)
        ]
        found[f"size={size},rows=64"] = search(attention, "split_plan", _split, configs, cases, 6e-3)
    return {"paged_attention.split_kv chunk": found}


def prefill() -> Config:
    pool = _pool(20_000)
    seqs = {"4096": [(4096, 4096)], "1000@3000": [(1000, 4000)]}
    cases = {name: _attention_case(pool, case, 32, 1) for name, case in seqs.items()}
    tiles = ((64, 64, 3, 4), (128, 64, 3, 8), (128, 64, 2, 8), (128, 32, 3, 4), (128, 128, 2, 8))
    configs = [
        {"queries": queries, "keys": keys, "stages": stages, "warps": warps, "ahead": ahead}
        for queries, keys, stages, warps in tiles
        for ahead in (False, True)
    ]
    plain = attention.capability
    attention.capability = lambda tensor: (8, 0)
    try:
        found = search(attention, "prefill_plan", _tile, configs, cases, 6e-3)
        return {"paged_attention.prefill": {"dtype=half,dim=128": found}}
    finally:
        attention.capability = plain


def scan() -> Config:
    heads, channels, size = 48, 64, 128
    cases = {}
    for name, seqs in (("8192", [(8192, 8192)]), ("40", [(40, 400)]), ("16x512", [(512, 512)] * 16)):
        meta, _ = make_step(seqs, device="cuda")
        tokens = meta.num_tokens
        x = torch.randn(tokens, heads, channels, device="cuda", dtype=BF16)
        b, c = (torch.randn(tokens, 1, size, device="cuda", dtype=BF16) for _ in range(2))
        dt = torch.randn(tokens, heads, device="cuda", dtype=BF16)
        forget = -torch.exp(torch.rand(heads, device="cuda") * 3)
        skip, bias = torch.randn(heads, device="cuda"), torch.randn(heads, device="cuda")
        start = torch.randn(meta.num_sequences + 2, heads, channels, size, device="cuda")
        small = (x, dt, forget, b, c, skip, bias)

        def run(small: Any = small, start: torch.Tensor = start, meta: Any = meta) -> torch.Tensor:
            return scan_kernel.ssd_scan(*small, start.clone(), meta, 256)

        def exact(small: Any = small, start: torch.Tensor = start, meta: Any = meta) -> torch.Tensor:
            return scan_reference(*(t.float() for t in small), start.clone(), meta, 256)  # type: ignore[arg-type]

        state = start.clone()
        calls = [lambda small=small, state=state, meta=meta: scan_kernel.ssd_scan(*small, state, meta, 256)]
        cases[name] = (run, exact, calls)
    configs = [
        {"channels": p, "tokens": t, "stages": n, "warps": w}
        for p, t, n, w in itertools.product((32, 64), (32, 64), (1, 2), (4, 8))
    ]
    found = search(scan_kernel, "tuned", lambda config, op, shape: config, configs, cases, 6e-3)
    return {"ssd_scan": {"dtype=bfloat16": found}}


EXPERT_TILES = {  # bm, bn, bn_down, bk, stages, warps
    "decode": [(16, 32, 64, 128, 4, 4), (16, 16, 32, 256, 3, 4), (16, 32, 32, 128, 4, 4), (16, 32, 64, 256, 3, 4),
               (16, 64, 64, 128, 3, 4), (16, 16, 32, 128, 5, 2), (16, 32, 32, 128, 3, 2)],
    "chunk": [(32, 64, 128, 64, 3, 4), (64, 64, 128, 64, 3, 4), (32, 64, 64, 128, 3, 4), (64, 64, 64, 128, 3, 4),
              (32, 32, 64, 128, 3, 4), (64, 128, 128, 64, 3, 4)],
    "prefill": [(128, 64, 128, 64, 3, 8), (64, 64, 128, 64, 4, 4), (128, 128, 256, 64, 3, 8), (64, 128, 128, 64, 3, 8),
                (128, 64, 128, 64, 4, 4), (64, 64, 64, 64, 4, 4)],
}  # fmt: skip


def _experts(config: Config, tokens: int, top: int, *shape: object) -> Choice:
    """As the rules choose, with these tiles; "tokens": up to so many go pair by pair."""
    tiles = {name: value for name, value in config.items() if name != "tokens"}
    if tokens <= config.get("tokens", 0):
        return Direct(**tiles)
    return (Small if tokens * top <= SMALL_PAIRS else Grouped)(**tiles)


def experts() -> Config:
    count, width, inner, top = 64, 1536, 512, 6
    w_in = torch.randn(count, 2 * inner, width, device="cuda", dtype=BF16) * 0.03
    w_out = torch.randn(count, width, inner, device="cuda", dtype=BF16) * 0.03
    found = {}
    for size, sizes in (("decode", (1, 8, 64)), ("chunk", (300, 900)), ("prefill", (2048, 8192))):
        cases = {}
        for tokens in sizes:
            x = torch.randn(tokens, width, device="cuda", dtype=BF16)
            weights, ids = route(torch.randn(tokens, count, device="cuda"), top, "softmax_topk", True)

            def run(x: torch.Tensor = x, weights: torch.Tensor = weights, ids: torch.Tensor = ids) -> torch.Tensor:
                return experts_kernel.experts(x, w_in, w_out, weights, ids)

            def exact(x: torch.Tensor = x, weights: torch.Tensor = weights, ids: torch.Tensor = ids) -> torch.Tensor:
                out = torch.zeros(x.shape, device="cuda")
                for expert in range(count):
                    token, choice = torch.where(ids == expert)
                    gate, up = (x[token].float() @ w_in[expert].float().t()).chunk(2, dim=-1)
                    hidden = torch.nn.functional.silu(gate) * up
                    out.index_add_(0, token, hidden @ w_out[expert].float().t() * weights[token, choice, None])
                return out

            cases[str(tokens)] = (run, exact, [run])
        names = ("bm", "bn", "bn_down", "bk", "stages", "warps")
        configs = [dict(zip(names, shape, strict=True)) for shape in EXPERT_TILES[size]]
        found[f"size={size}"] = search(experts_kernel, "plan", _experts, configs, cases, 6e-3)
    return {"experts": found}


DECODES = {
    "tiny": (1, (512, 2048, 8192)), "small": (8, (512, 2048)), "medium": (64, (512, 2048)), "large": (256, (512, 1500)),
}  # fmt: skip


def direct() -> Config:
    count, width, inner, top = 64, 1536, 512, 6
    w_in = torch.randn(count, 2 * inner, width, device="cuda", dtype=BF16) * 0.03
    w_out = torch.randn(count, width, inner, device="cuda", dtype=BF16) * 0.03
    cases = {}
    for tokens in (1, 2, 4, 8):
        sets = []
        for _ in range(16):  # other experts each time, or the L2 keeps their weights
            x = torch.randn(tokens, width, device="cuda", dtype=BF16)
            sets.append((x, *route(torch.randn(tokens, count, device="cuda"), top, "softmax_topk", True)))
        calls = [lambda s=s: experts_kernel.experts(s[0], w_in, w_out, s[1], s[2]) for s in sets]
        reference = functools.partial(experts_reference, sets[0][0], w_in, w_out, *sets[0][1:])
        cases[str(tokens)] = (calls[0], reference, calls)
    names = ("tokens", "bn", "bn_down", "warps")
    grouped = {"tokens": 0, "bm": 16, "bn": 32, "bn_down": 64, "bk": 128, "stages": 4, "warps": 4}
    shapes = itertools.product((8,), (2, 4, 8), (4, 8, 16), (4, 8))
    configs = [grouped, *(dict(zip(names, shape, strict=True)) for shape in shapes)]
    return {"experts": {"size=direct": search(experts_kernel, "plan", _experts, configs, cases, 6e-3)}}


PARTS: dict[str, Callable[[], Config]] = {
    **{f"decode-{size}": functools.partial(decode, size, *shape) for size, shape in DECODES.items()},
    "chunk": chunk,
    "prefill": prefill,
    "scan": scan,
    "experts": experts,
    "direct": direct,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--compile-only", action="store_true", help="run each candidate once, to fill Triton's cache")
    args = parser.parse_args()
    parts = args.parts.split(",")
    if args.compile_only:
        for part in parts:
            PARTS[part]()
        return
    workers = [
        subprocess.Popen([sys.executable, __file__, "--compile-only", "--parts", part], stdout=subprocess.DEVNULL)
        for part in parts
    ]
    for worker in workers:
        worker.wait()
    print("compiled", flush=True)
    table: Config = {}
    for part in parts:
        table[part] = PARTS[part]()
        torch.cuda.empty_cache()
        save("tune_kernels.json", table)


if __name__ == "__main__":
    main()
