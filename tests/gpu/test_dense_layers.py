"""Norms, rotary with KV append, activation, embedding, linear layers, logits: GPU against higher precision."""

from __future__ import annotations

import pytest
import torch

from engram_kernels.embedding.kernel import embedding
from engram_kernels.gated_linear.kernel import Tile, Warpgroups, Wide, gated_linear, run_wide, wide_plan
from engram_kernels.gated_linear.kernel import plan as gated_plan
from engram_kernels.launch import multiprocessors
from engram_kernels.linear.kernel import MAX_ROWS, Cooperative, Gemv, Stream, linear, plan, run, run_gated
from engram_kernels.logits.kernel import logits
from engram_kernels.rms_norm.kernel import add_rms_norm, rms_norm
from engram_kernels.rms_norm.reference import rms_norm as rms_norm_reference
from engram_kernels.rope_append.kernel import rope_append
from engram_kernels.rope_append.reference import rope_append as rope_append_reference
from engram_kernels.silu_and_mul.kernel import silu_and_mul
from engram_kernels.tuning import load_table
from tests.support.kernel_cases import relative_error

BF16 = torch.bfloat16


def _random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(BF16)


@pytest.mark.parametrize("rows", [1, 3, 64, 2000])
@pytest.mark.parametrize("width", [128, 1024, 1536, 4096, 5120])
def test_norms(rows: int, width: int) -> None:
    x, residual, weight = _random(rows, width), _random(rows, width), _random(width)
    assert relative_error(rms_norm(x, weight, 1e-6), rms_norm_reference(x.double(), weight.double(), 1e-6)) < 3e-3
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    expected = rms_norm_reference((x + residual).double(), weight.double(), 1e-6)
    assert relative_error(normed, expected) < 3e-3


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (16, 8, 128), (9, 3, 64), (28, 4, 128)])
@pytest.mark.parametrize("tokens", [1, 5, 900])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("rotated", [1.0, 0.5, 0.0])
def test_rope_append(heads: int, kv_heads: int, dim: int, tokens: int, norm: bool, rotated: float) -> None:
    wide = _random(tokens, (heads + 2 * kv_heads) * dim)
    sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
    q, k, v = (part.view(tokens, -1, dim) for part in wide.split(sizes, dim=-1))
    positions = torch.randint(0, 5000, (tokens,), device="cuda")
    blocks = tokens // 16 + 8
    slots = torch.randperm(blocks * 16, device="cuda")[:tokens]
    half = int(dim * rotated) // 2
    angle = torch.randn(5000, half, device="cuda")
    cos_sin = torch.cat((angle.cos(), angle.sin()), dim=-1) if half else None
    weights = (_random(dim), _random(dim)) if norm else (None, None)
    kv = torch.zeros(2, blocks, kv_heads, 16, dim, device="cuda", dtype=BF16)
    expected_kv = torch.zeros(2, blocks, kv_heads, 16, dim, device="cuda", dtype=torch.float32)
    out = rope_append(q, k, v, positions, cos_sin, kv, slots, *weights)
    wider = [None if w is None else w.float() for w in weights]
    expected = rope_append_reference(
        q.float(), k.float(), v.float(), positions, cos_sin, expected_kv, slots, wider[0], wider[1]
    )
    assert relative_error(out, expected) < 3e-3
    assert relative_error(kv, expected_kv) < 3e-3
    assert torch.equal(kv == 0, expected_kv.to(BF16) == 0)


@pytest.mark.parametrize("shape", [(1, 6144), (7, 24576), (1000, 3072)])
def test_silu_and_mul(shape: tuple[int, int]) -> None:
    x = _random(*shape)
    gate, up = x.double().chunk(2, dim=-1)
    assert relative_error(silu_and_mul(x), torch.nn.functional.silu(gate) * up) < 3e-3


def test_embedding() -> None:
    weight = _random(151936, 1024)
    ids = torch.randint(0, 151936, (77,), device="cuda")
    assert torch.equal(embedding(ids, weight), weight[ids])


@pytest.mark.parametrize(("n", "k"), [(4096, 1024), (1024, 3072), (6144, 4096), (4096, 12288), (1000, 1536), (48, 272)])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 16, 33, 64, 65, 200, 300, 500])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(n: int, k: int, rows: int, bias: bool) -> None:
    x, weight = _random(rows, k), _random(n, k, scale=0.05)
    b = _random(n) if bias else None
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())
    for _ in range(3):
        assert relative_error(linear(x, weight, b), expected) < 3e-3


def _fewest(rows: int) -> int:
    """The fewest rows that an entry for `rows` serves."""
    return rows // 2 + 1 if rows <= MAX_ROWS else rows - 63


TUNED = sorted(load_table("nvidia_h200").get("linear", {}))


@pytest.mark.parametrize("key", TUNED)
def test_every_shipped_tuning(key: str) -> None:
    """A tile can be wrong on the GPU and right in the interpreter: every entry of the table runs here."""
    rows, n, k = (int(part.partition("=")[2]) for part in key.split(","))
    choice = plan(rows, n, k, multiprocessors(torch.empty(0, device="cuda")))
    if choice is None:
        return
    for count in {rows, _fewest(rows)}:
        x, weight = _random(count, k), _random(n, k, scale=0.05)
        rounded = isinstance(choice, Cooperative)
        y = torch.full((count, n), float("nan"), device="cuda", dtype=BF16 if rounded else torch.float32)
        run(choice, x, weight, None, y)
        expected = x.float() @ weight.float().t()
        assert relative_error(y, expected) < (3e-3 if rounded else 1e-3)
    if isinstance(choice, Gemv):
        assert choice.bk * 4 >= k


@pytest.mark.parametrize("rows", [2, 5, 8, 9, 16, 33, 64])
@pytest.mark.parametrize(("bk", "split", "stages"), [(128, 1, 4), (128, 3, 3), (64, 2, 8), (256, 1, 3)])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_weight_stream(rows: int, bk: int, split: int, stages: int, gated: bool, bias: bool) -> None:
    k, n = 1536, 1000
    x, weight = _random(rows, k), _random(2 * n if gated else n, k, scale=0.05)
    b = _random(weight.shape[0]) if bias else None
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())
    if gated:
        expected = torch.nn.functional.silu(expected[:, :n]) * expected[:, n:]
    choice = Stream(max(8, 1 << (rows - 1).bit_length()), bk, split, stages)
    if gated and choice.bm == 64 and bk == 256:
        return  # does not fit into shared memory
    for _ in range(2):  # twice: the first call must leave the counters at zero
        y = torch.full((rows, n), float("nan"), device="cuda", dtype=BF16)
        (run_gated if gated else run)(choice, x, weight, b, y)
        assert relative_error(y, expected) < 3e-3


COOPERATIVE = {  # the choice: rows
    Cooperative(1, 8, 4, 6): (3, 8),
    Cooperative(3, 16, 1, 8): (16, 5),
    Cooperative(2, 64, 2, 7): (64, 33),
    Cooperative(1, 128, 1, 8): (65, 128, 200),
    Cooperative(4, 128, 1, 4): (100, 257),
    Cooperative(2, 128, 4, 3): (90, 256),
    Cooperative(3, 256, 1, 4): (129, 256, 512),
    Cooperative(1, 256, 2, 2): (250,),
    Cooperative(3, 64, 2, 7): (70,),
    Cooperative(4, 128, 2, 4): (128,),
}


@pytest.mark.parametrize("choice", COOPERATIVE, ids=str)
@pytest.mark.parametrize("n", [1000, 3072])  # the first one is no multiple of any share
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("bias", "dtype"), [(False, BF16), (True, BF16), (False, torch.float16)])
def test_cooperative(choice: Cooperative, n: int, gated: bool, bias: bool, dtype: torch.dtype) -> None:
    k = 1536
    weight = _random(2 * n if gated else n, k, scale=0.05).to(dtype)
    b = _random(weight.shape[0]).to(dtype) if bias else None
    for rows in COOPERATIVE[choice]:
        wide = _random(rows, k + 64).to(dtype)
        x = wide[:, :k]  # rows further apart than they are long
        expected = torch.nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())
        if gated:
            expected = torch.nn.functional.silu(expected[:, :n]) * expected[:, n:]
        for _ in range(2):  # twice: the first call must leave the counters at zero
            y = torch.full((rows + 1, n), float("nan"), device="cuda", dtype=dtype)
            (run_gated if gated else run)(choice, x, weight, b, y[:rows])
            assert relative_error(y[:rows], expected) < 3e-3
            assert torch.isnan(y[rows]).all()
        alone = torch.empty(1, n, device="cuda", dtype=dtype)
        (run_gated if gated else run)(choice, x[rows - 1 :], weight, b, alone)
        assert torch.equal(alone[0], y[rows - 1])  # whatever is beside it


def test_a_cooperative_kernel_does_not_widen() -> None:
    x, weight = _random(8, 512), _random(64, 512)
    with pytest.raises(ValueError, match=r"writes torch\.bfloat16 as it reads, not torch\.float32"):
        run(Cooperative(1, 8, 1, 4), x, weight, None, torch.empty(8, 64, device="cuda"))


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 40, 64, 100, 200, 250, 512])
@pytest.mark.parametrize(("n", "k"), [(3072, 1024), (12288, 4096), (1024, 1536), (100, 96)])
def test_gated_linear(rows: int, n: int, k: int) -> None:
    x, weight = _random(rows, k), _random(2 * n, k, scale=0.05)
    gate, up = (x.double() @ weight.double().t()).chunk(2, dim=-1)
    assert relative_error(gated_linear(x, weight), torch.nn.functional.silu(gate) * up) < 4e-3


GATED_TUNED = sorted(load_table("nvidia_h200").get("gated_linear", {}))


@pytest.mark.parametrize("key", GATED_TUNED)
def test_every_shipped_gated_tuning(key: str) -> None:
    rows, n, k = (int(part.partition("=")[2]) for part in key.split(","))
    for count in {rows, _fewest(rows)}:
        choice = gated_plan(count, n, k, True)
        x, weight = _random(count, k), _random(2 * n, k, scale=0.05)
        gate, up = (x.float() @ weight.float().t()).chunk(2, dim=-1)
        expected = torch.nn.functional.silu(gate) * up
        assert relative_error(gated_linear(x, weight), expected) < 4e-3
        if choice is not None:
            y = torch.full((count, n), float("nan"), device="cuda", dtype=BF16)
            run_gated(choice, x, weight, None, y)
            assert relative_error(y, expected) < 4e-3


WIDE_TUNED = sorted(load_table("nvidia_h200").get("gated_linear.wide", {}))


@pytest.mark.parametrize("key", WIDE_TUNED)
def test_every_shipped_wide_tile(key: str) -> None:
    rows, n, k = (int(part.partition("=")[2]) for part in key.split(","))
    for count in {rows, rows // 2 + 1, rows - 1}:
        choice = wide_plan(count, n, k, 132)
        assert choice is not None
        x, weight = _random(count, k), _random(2 * n, k, scale=0.05)
        y = torch.full((count, n), float("nan"), device="cuda", dtype=BF16)
        run_wide(choice, x, weight, y)
        assert not torch.isnan(y).any()
        some = torch.arange(0, count, -(-count // 300), device="cuda")
        gate, up = (x[some].float() @ weight.float().t()).chunk(2, dim=-1)
        assert relative_error(y[some], torch.nn.functional.silu(gate) * up) < 4e-3


@pytest.mark.parametrize("rows", [65, 128, 257, 1000])
@pytest.mark.parametrize("k", [192, 256, 1536])
@pytest.mark.parametrize(
    "tile",
    [
        Tile(128, 128, 64, 3, 8, 8), Tile(128, 64, 64, 3, 4, 4), Tile(64, 64, 64, 3, 4, 16), Warpgroups(1),
        Warpgroups(2), Warpgroups(8),
    ],
)  # fmt: skip
def test_wide_tiles_of_awkward_rows(rows: int, k: int, tile: Wide) -> None:
    if isinstance(tile, Warpgroups) and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs compute capability 9.0")
    n = 1024
    x, weight = _random(rows, k), _random(2 * n, k, scale=0.05)
    y = torch.full((rows, n), float("nan"), device="cuda", dtype=BF16)
    run_wide(tile, x, weight, y)
    gate, up = (x.double() @ weight.double().t()).chunk(2, dim=-1)
    assert relative_error(y, torch.nn.functional.silu(gate) * up) < 4e-3


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_three_warpgroups_take_several_tiles_each_and_repeat_bit_by_bit(dtype: torch.dtype) -> None:
    """8 to 9 tiles a program, of three steps and more, the last wave not full."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs compute capability 9.0")
    rows, n = 10_000, 2816
    for k in (192, 256, 320):
        x = _random(rows, k).to(dtype)
        weight = _random(2 * n, k, scale=0.05).to(dtype)
        outs = []
        for group in (8, 8, 8, 3):
            y = torch.full((rows, n), float("nan"), device="cuda", dtype=dtype)
            run_wide(Warpgroups(group), x, weight, y)
            outs.append(y)
        gate, up = (x.float() @ weight.float().t()).chunk(2, dim=-1)
        assert relative_error(outs[0], torch.nn.functional.silu(gate) * up) < 4e-3
        assert all(torch.equal(out, outs[0]) for out in outs[1:])


@pytest.mark.parametrize("rows", [1, 4, 64, MAX_ROWS + 1])
def test_logits_keep_fp32(rows: int) -> None:
    hidden, weight = _random(rows, 1024), _random(20000, 1024, scale=0.05)
    out = logits(hidden, weight)
    assert out.dtype == torch.float32
    assert relative_error(out, hidden.double() @ weight.double().t()) < 1e-4


def test_a_chain_of_dependent_launches_is_bitwise_repeatable() -> None:
    """GEMVs that load weights early, split tiles that count arrivals: 50 runs of a chain in one graph agree."""
    weights = [_random(2048, 2048, scale=0.02) for _ in range(4)]
    norm = _random(2048)

    def chain(x: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = rms_norm(linear(x, weight), norm, 1e-6)
        return x

    for rows in (1, 4, 16, 64):
        x = _random(rows, 2048)
        expected = chain(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [chain(x) for _ in range(50)]
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for out in outs)


def test_cooperative_kernels_one_after_the_other_repeat_bit_by_bit() -> None:
    """Weights asked for while the kernel before still computes, counters left at zero, a recorded chain replayed."""
    weights = [_random(2048, 2048, scale=0.02) for _ in range(4)]
    gates = [_random(4096, 2048, scale=0.02) for _ in range(4)]
    choices = (Cooperative(1, 64, 2, 8), Cooperative(3, 128, 1, 5), Cooperative(2, 128, 4, 5))

    def chain(x: torch.Tensor) -> torch.Tensor:
        for step, (weight, gate) in enumerate(zip(weights, gates, strict=True)):
            y, z = torch.empty_like(x), torch.empty_like(x)
            run(choices[step % 3], x, weight, None, y)
            run_gated(choices[(step + 1) % 3], y, gate, None, z)
            x = z + x
        return x

    for rows in (64, 128):
        x = _random(rows, 2048)
        expected = chain(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [chain(x) for _ in range(10)]
        for _ in range(3):
            graph.replay()
            torch.cuda.synchronize()
            assert all(torch.equal(out, expected) for out in outs)
