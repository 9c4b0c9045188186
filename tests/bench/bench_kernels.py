"""Every kernel against its limit on this GPU: time, share of the floor, and the library's time where there is one.

    PYTHONPATH=kernels:. python tests/bench/bench_kernels.py [--parts decode,prefill,linear,small,sample,state,moe,kv]

Outputs of the timed shapes are checked against a higher precision in the same run where that is affordable; a wrong one
is reported as an error instead of a time. Results: kernels.json (see gpu_timing.save).
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch

from engram_kernels.causal_conv1d.kernel import causal_conv1d
from engram_kernels.copy_state.kernel import copy_state
from engram_kernels.embedding.kernel import embedding
from engram_kernels.experts.kernel import experts
from engram_kernels.gated_rms_norm.kernel import gated_rms_norm
from engram_kernels.gather_kv.kernel import gather_kv
from engram_kernels.launch import multiprocessors
from engram_kernels.linear.kernel import linear, plan
from engram_kernels.logits.kernel import logits
from engram_kernels.metadata import SamplingTensors
from engram_kernels.paged_attention import kernel as attention
from engram_kernels.rms_norm.kernel import add_rms_norm
from engram_kernels.rope_append.kernel import rope_append
from engram_kernels.route.kernel import route
from engram_kernels.sample.kernel import sample
from engram_kernels.scatter_kv.kernel import scatter_kv
from engram_kernels.silu_and_mul.kernel import silu_and_mul
from engram_kernels.ssd_scan.kernel import ssd_scan
from engram_kernels.ssd_scan.reference import ssd_scan as ssd_scan_reference
from engram_kernels.state_update.kernel import state_update
from engram_kernels.state_update.reference import state_update as state_update_reference
from tests.bench.gpu_timing import COPY_TBS, MATMUL_TFLOPS, save, time_us
from tests.support.kernel_cases import attention_fp64, make_step, relative_error

BF16 = torch.bfloat16
Row = dict[str, Any]


def _random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16) * scale


def _memory_row(name: str, us: float, moved: int, **more: Any) -> Row:
    floor = moved / COPY_TBS / 1e6
    row = {"name": name, "us": round(us, 2), "floor_us": round(floor, 2), "percent": round(100 * floor / us), **more}
    print(row, flush=True)
    return row


def decode() -> list[Row]:
    """Paged decode attention, 8 KV heads of 128, group 4 (8B) and 2 (0.6B)."""
    rows = []
    pool = torch.empty(2, 270_000, 8, 16, 128, device="cuda", dtype=BF16)
    for part in pool.view(2, 27, -1).unbind(1):
        part.normal_()
    for batch, context in ((1, 512), (1, 2048), (1, 8192), (1, 32768), (8, 512), (8, 2048), (8, 8192), (64, 512),
                           (64, 2048), (64, 8192), (256, 512), (256, 2048)):  # fmt: skip
        pages = batch * -(-context // 16)
        sets = max(1, min(16, 600_000_000 // (batch * context * 4096), 270_000 // pages))
        # A batch that fits lives in 4 GB of the pool, as an allocator that reuses blocks would leave it.
        order = torch.randperm(61_000 if sets * pages <= 61_000 else 270_000, device="cuda").int()
        meta, _ = make_step([(1, context)] * batch, device="cuda")
        steps = []
        for i in range(sets):
            tables = torch.zeros_like(meta.block_tables)
            tables[:, : pages // batch] = order[i * pages : (i + 1) * pages].view(batch, -1)
            steps.append(_with_tables(meta, tables))
        for group in (4, 2):
            q = _random(batch, 8 * group, 128)
            us = time_us([lambda m=m, q=q: attention.paged_attention(q, pool, m, 0.088) for m in steps])
            error = relative_error(
                attention.paged_attention(q, pool, steps[0], 0.088)[:4],
                attention_fp64(q[:4], pool, _first(steps[0], min(4, batch)), 0.088),
            )
            rows.append(
                _memory_row(f"decode batch {batch} context {context} group {group}", us, batch * context * 4096,
                            error=round(error, 5))
            )  # fmt: skip
    return rows


def _with_tables(meta: Any, tables: torch.Tensor) -> Any:
    return dataclasses.replace(meta, block_tables=tables)


def _first(meta: Any, count: int) -> Any:
    return dataclasses.replace(
        meta, query_lens_host=meta.query_lens_host[:count], seq_lens_host=meta.seq_lens_host[:count]
    )


def prefill() -> list[Row]:
    """Causal prefill attention, 32 heads on 8, and short chunks on a history."""
    rows = []
    cases = {
        "8192": [(8192, 8192)], "4 x 2048": [(2048, 2048)] * 4, "2048 at 30720": [(2048, 32768)],
        "32768": [(32768, 32768)], "40 at 2500": [(40, 2540)], "16 x 40 at 2500": [(40, 2540)] * 16,
        "128 at 8000": [(128, 8128)],
    }  # fmt: skip
    for name, seqs in cases.items():
        meta, pool = make_step(seqs, device="cuda")
        kv = _random(2, pool, 8, 16, 128)
        q = _random(meta.num_tokens, 32, 128)
        flops = sum(4 * 128 * 32 * (new * (total - new) + new * (new + 1) / 2) for new, total in seqs)
        us = time_us([lambda q=q, kv=kv, m=meta: attention.paged_attention(q, kv, m, 0.088)], 20.0)
        out = attention.paged_attention(q, kv, meta, 0.088)
        picked = torch.unique(torch.randint(0, meta.num_tokens, (48,), device="cuda"))
        error = relative_error(out[picked], attention_fp64(q, kv, meta, 0.088, picked))
        row = {"name": f"prefill {name}", "us": round(us, 1), "tflops": round(flops / us / 1e6, 1),
               "percent": round(100 * flops / us / 1e6 / MATMUL_TFLOPS), "error": round(error, 5)}  # fmt: skip
        if len(seqs) == 1 and seqs[0][0] == seqs[0][1]:
            k, v = (_random(1, 32, seqs[0][1], 128) for _ in range(2))
            wide = q.transpose(0, 1)[None].contiguous()
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
                library = time_us(
                    [
                        lambda q=wide, k=k, v=v: torch.nn.functional.scaled_dot_product_attention(
                            q, k, v, is_causal=True
                        )
                    ],
                    20.0,
                )
            row["cudnn_tflops"] = round(flops / library / 1e6, 1)
        print(row, flush=True)
        rows.append(row)
    return rows


def linear_layers() -> list[Row]:
    """Linear layers as the registry serves them, beside cuBLAS."""
    shapes = {
        "0.6B qkv": (4096, 1024), "0.6B o": (1024, 2048), "0.6B gate_up": (6144, 1024), "0.6B down": (1024, 3072),
        "8B qkv": (6144, 4096), "8B o": (4096, 4096), "8B gate_up": (24576, 4096), "8B down": (4096, 12288),
        "0.6B head": (151936, 1024), "8B head": (151936, 4096),
    }  # fmt: skip
    rows = []
    for name, (n, k) in shapes.items():
        weights = [_random(n, k, scale=0.05) for _ in range(max(2, min(24, -(-(320 << 20) // (n * k * 2)))))]
        many = [weights[i % len(weights)] for i in range(max(8, len(weights)))]
        op: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = logits if n > 100_000 else linear
        for count in (1, 4, 8, 64, 256):
            x = _random(count, k)
            us = time_us([lambda w=w, x=x, op=op: op(x, w) for w in many])
            cublas = time_us([lambda w=w, x=x: torch.mm(x, w.t()) for w in many])
            error = relative_error(op(x, weights[0]), x.float() @ weights[0].float().t())
            chosen = plan(count, n, k, multiprocessors(x))
            rows.append(
                _memory_row(f"{name} rows {count}", us, 2 * (n * k + count * (n + k)), cublas_us=round(cublas, 2),
                            kernel=type(chosen).__name__ if chosen else "cuBLAS", error=round(error, 5))
            )  # fmt: skip
    return rows


def small() -> list[Row]:
    """The ops between the products: bytes moved once, at decode and prefill sizes."""
    rows = []
    for tokens in (1, 64, 8192):
        x, residual, weight = (
            [_random(tokens, 4096) for _ in range(4)],
            _random(tokens, 4096),
            _random(4096),
        )
        us = time_us([lambda x=x, r=residual, w=weight: add_rms_norm(x, r, w, 1e-6) for x in x])
        rows.append(_memory_row(f"add_rms_norm {tokens} x 4096", us, 4 * tokens * 4096 * 2))
        wide = [_random(tokens, 24576) for _ in range(4)]
        us = time_us([lambda w=w: silu_and_mul(w) for w in wide])
        rows.append(_memory_row(f"silu_and_mul {tokens} x 24576", us, 3 * tokens * 12288 * 2))
        qkv = [_random(tokens, 48 * 128) for _ in range(4)]
        kv = torch.zeros(2, tokens // 16 + 4, 8, 16, 128, device="cuda", dtype=BF16)
        positions = torch.arange(tokens, device="cuda")
        table = torch.randn(8192, 128, device="cuda")
        norm = _random(128)

        def fused(w: torch.Tensor, p: torch.Tensor = positions, t: torch.Tensor = table, c: torch.Tensor = kv,
                  n: torch.Tensor = norm) -> None:  # fmt: skip
            q, k, v = (part.view(w.shape[0], -1, 128) for part in w.split([4096, 1024, 1024], dim=-1))
            rope_append(q, k, v, p, t, c, p, n, n)

        us = time_us([lambda w=w, f=fused: f(w) for w in qkv])
        rows.append(_memory_row(f"rope_append with norms {tokens} x (32 + 8 + 8) x 128", us, 4 * tokens * 48 * 128))
        ids, vocabulary = torch.randint(0, 151936, (tokens,), device="cuda"), _random(151936, 1024)
        us = time_us([lambda i=ids, v=vocabulary: embedding(i, v)])
        rows.append(_memory_row(f"embedding {tokens} x 1024", us, 2 * tokens * 1024 * 2))
    return rows


def sampling() -> list[Row]:
    """Sampling of 152k logits: greedy, with noise, with every cut; top-p where few tokens survive and in a flat row."""
    rows = []
    for count in (1, 64, 256):
        values = [torch.randn(count, 151936, device="cuda") * 3 for _ in range(2)]
        flat = [value * 0.4 for value in values]
        noise: dict[str, Any] = {
            "temperature": torch.ones(count, device="cuda"),
            "seeds": torch.arange(count, device="cuda"),
            "positions": torch.arange(count, device="cuda"),
        }
        nucleus = {"top_p": torch.full((count,), 0.9, device="cuda")}
        cuts: dict[str, Any] = {
            **nucleus,
            "top_k": torch.full((count,), 50, device="cuda"),
            "min_p": torch.full((count,), 0.01, device="cuda"),
        }
        for name, given, fields in (
            ("greedy", values, {}),
            ("temperature", values, noise),
            ("top-k, top-p, min-p", values, {**noise, **cuts}),
            ("top-p", values, {**noise, **nucleus}),
            ("top-p of a flat row", flat, {**noise, **nucleus}),
        ):
            s = SamplingTensors(**fields)
            us = time_us([lambda v=v, s=s: sample(v, s) for v in given])
            rows.append(_memory_row(f"sample {count} x 151936, {name}", us, 4 * count * 151936))
    return rows


def state_space() -> list[Row]:
    """Granite-4.0-H-tiny's recurrent layer: state update, scan, convolution, gated norm."""
    rows = []
    heads, channels, size, conv = 48, 64, 128, 3328

    def operands(tokens: int) -> tuple[torch.Tensor, ...]:
        return (
            _random(tokens, heads, channels), _random(tokens, heads), -torch.rand(heads, device="cuda") * 4 - 0.1,
            _random(tokens, 1, size), _random(tokens, 1, size), torch.randn(heads, device="cuda"),
            torch.randn(heads, device="cuda"),
        )  # fmt: skip

    for batch in (1, 8, 64, 256):
        sets = max(2, min(24, 512 // batch))
        state = torch.randn(batch * sets + 2, heads, channels, size, device="cuda")
        meta, _ = make_step([(1, 100)] * batch, device="cuda")
        order = torch.randperm(batch * sets, device="cuda")
        steps = [
            dataclasses.replace(meta, state_slots=order[i * batch : (i + 1) * batch].contiguous()) for i in range(sets)
        ]
        small = operands(batch)
        before, check = state.clone(), steps[0]
        out = state_update(*small, state, check)  # type: ignore[arg-type]
        exact = state_update_reference(*(t.float() for t in small), before, check)  # type: ignore[arg-type]
        us = time_us([lambda m=m, s=small, st=state: state_update(*s, st, m) for m in steps])
        moved = 2 * batch * heads * channels * size * 4
        rows.append(_memory_row(f"state_update batch {batch}", us, moved, error=round(relative_error(out, exact), 5)))
    for name, seqs in (("8192", [(8192, 8192)]), ("40", [(40, 2540)]), ("16 x 512", [(512, 512)] * 16)):
        meta, _ = make_step(seqs, device="cuda")
        small = operands(meta.num_tokens)
        state = torch.randn(len(seqs) + 2, heads, channels, size, device="cuda")
        before = state.clone()
        out = ssd_scan(*small, state, meta, 256)  # type: ignore[arg-type]
        exact = ssd_scan_reference(*(t.float() for t in small), before, meta, 256)  # type: ignore[arg-type]
        us = time_us([lambda m=meta, s=small, st=state: ssd_scan(*s, st, m, 256)], 10.0)
        moved = (
            meta.num_tokens * (2 * heads * channels + 2 * size + heads) * 2
            + 2 * len(seqs) * heads * channels * size * 4
        )
        rows.append(_memory_row(f"ssd_scan {name}", us, moved, error=round(relative_error(out, exact), 5)))
        x, weight, bias = _random(meta.num_tokens, 6448)[:, 3072:6400], _random(conv, 4), _random(conv)
        window = _random(len(seqs) + 2, conv, 3)
        us = time_us([lambda m=meta, x=x, w=weight, b=bias, c=window: causal_conv1d(x, w, b, c, m)], 10.0)
        rows.append(_memory_row(f"causal_conv1d {name}", us, 2 * meta.num_tokens * conv * 2))
        gate, scale = _random(meta.num_tokens, 6448)[:, :3072], _random(3072)
        wide = _random(meta.num_tokens, 3072)
        us = time_us([lambda x=wide, g=gate, s=scale: gated_rms_norm(x, g, s, 1e-5)])
        rows.append(_memory_row(f"gated_rms_norm {name}", us, 3 * meta.num_tokens * 3072 * 2))
    return rows


def mixture() -> list[Row]:
    """Routing and experts of Granite-4.0-H-tiny (64 experts, 6 a token); floor: weights of the experts reached."""
    rows = []
    count, width, inner, top = 64, 1536, 512, 6
    w_in, w_out = _random(count, 2 * inner, width, scale=0.03), _random(count, width, inner, scale=0.03)
    for tokens in (1, 8, 64, 512, 2048, 8192):
        x, router = _random(tokens, width), _random(tokens, count)
        weights, ids = route(router, top, "softmax_topk", True)
        us = time_us([lambda r=router: route(r, top, "softmax_topk", True)])
        rows.append(_memory_row(f"route {tokens}", us, tokens * count * 2))
        us = time_us([lambda x=x, w=weights, i=ids: experts(x, w_in, w_out, w, i)], 10.0)
        reached = len(ids.unique())
        flops = 6 * tokens * top * width * inner
        row = _memory_row(f"experts {tokens}", us, reached * 3 * width * inner * 2 + 2 * tokens * width * 2)
        rows.append({**row, "tflops": round(flops / us / 1e6, 1)})
    return rows


def copies() -> list[Row]:
    """Snapshot gather and scatter of Qwen3-8B's and Granite's keys and values, and a state copy."""
    rows = []
    for name, layers, heads, tokens in (
        ("Qwen3-8B", 36, 8, 100), ("Qwen3-8B", 36, 8, 4096), ("Qwen3-8B", 36, 8, 16384),
        ("Granite-tiny", 4, 4, 100), ("Granite-tiny", 4, 4, 65536),
    ):  # fmt: skip
        blocks = tokens // 16 + 1
        pools = [_random(2, blocks + 50, heads, 16, 128) for _ in range(layers)]
        table = torch.randperm(blocks + 50, device="cuda")[:blocks].int()
        packed = gather_kv(pools, table, 3, tokens)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for label, call in (
            ("gather_kv", lambda p=pools, b=table, t=tokens: gather_kv(p, b, 3, t)),
            ("scatter_kv", lambda p=pools, b=table, k=packed: scatter_kv(k, p, b, 3)),
        ):
            times = []
            for _ in range(12):
                torch.cuda.synchronize()
                start.record()
                call()
                end.record()
                torch.cuda.synchronize()
                times.append(start.elapsed_time(end) * 1e3)
            moved = 2 * packed.numel() * 2
            rows.append(_memory_row(f"{label} {name} {tokens} tokens, launch included", sorted(times)[6], moved))
        del pools
    ssm = torch.randn(6, 36, 48, 64, 128, device="cuda")
    conv = _random(6, 36, 3328, 3)
    src, dst = torch.tensor([0], device="cuda"), torch.tensor([3], device="cuda")
    us = time_us([lambda: copy_state(ssm, conv, src, dst)])
    rows.append(_memory_row("copy_state Granite-tiny, one slot", us, 2 * (ssm[0].numel() * 4 + conv[0].numel() * 2)))
    return rows


PARTS: dict[str, Callable[[], list[Row]]] = {
    "decode": decode, "prefill": prefill, "linear": linear_layers, "small": small, "sample": sampling,
    "state": state_space, "moe": mixture, "kv": copies,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS))
    results: dict[str, Any] = {}
    began = time.monotonic()
    for part in parser.parse_args().parts.split(","):
        results[part] = PARTS[part]()
        torch.cuda.empty_cache()
        save("kernels.json", {"seconds": round(time.monotonic() - began), "results": results})


if __name__ == "__main__":
    main()
