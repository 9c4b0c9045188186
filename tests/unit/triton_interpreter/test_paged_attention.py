"""Paged attention kernels against fp64, on steps that mix lengths, chunk positions and group sizes."""

from __future__ import annotations

import pytest
import torch

from engram_kernels.paged_attention import kernel
from engram_kernels.paged_attention.plan import Split, Tile
from engram_kernels.rope_attention.kernel import rope_attention
from engram_kernels.rope_attention.reference import rope_attention as rope_attention_reference
from tests.support.kernel_cases import Sequences, attention_fp64, filled_cache, make_step, relative_error, with_bounds

CASES: dict[str, tuple[Sequences, int, int, int]] = {  # sequences, query heads, kv heads, head size
    "decodes": ([(1, 2), (1, 33), (1, 150), (1, 16)], 4, 2, 16),
    "one long decode": ([(1, 700)], 2, 2, 16),
    "odd group and head size": ([(1, 40), (5, 29), (3, 3)], 6, 2, 24),
    "mixed": ([(1, 70), (40, 40), (17, 90), (1, 1)], 4, 1, 16),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_step_matches_fp64(name: str, dtype: torch.dtype) -> None:
    seqs, heads, kv_heads, dim = CASES[name]
    meta, pool = make_step(seqs)
    kv = filled_cache(meta, pool, kv_heads, dim, dtype)
    q = torch.randn(meta.num_tokens, heads, dim).to(dtype)
    out = kernel.paged_attention(q, kv, meta, dim**-0.5)
    assert out.dtype == dtype
    assert relative_error(out, attention_fp64(q, kv, meta, dim**-0.5)) < (1e-5 if dtype == torch.float32 else 2e-3)


@pytest.mark.parametrize("waves", [1, 2, 5])
@pytest.mark.parametrize(
    "lengths",
    [[96] * 4, [48, 49, 47, 80, 81], [700, 3, 3, 3, 3, 3], [33, 64, 65, 97, 160, 161, 512], [1] * 9 + [300]],
    ids=str,
)
def test_every_piece_of_a_rounded_plan_has_a_program(lengths: list[int], waves: int) -> None:
    """Lengths of half a piece, one and a half, and of many: none may need more programs than were launched."""
    seqs = [(1, length) for length in lengths]
    meta, pool = make_step(seqs)
    kv = filled_cache(meta, pool, 1, 16, torch.float32)
    q = torch.randn(len(seqs), 2, 16)
    out = torch.full_like(q, torch.nan)
    kernel.run_split(Split(16, 1, 4, waves, 4), q, kv, out, meta, 0, len(seqs), len(seqs), 1, 0.25, None)
    assert relative_error(out, attention_fp64(q, kv, meta, 0.25)) < 1e-5


@pytest.mark.parametrize("ahead", [False, True])
def test_long_chunks_match_fp64(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "prefill_plan", lambda *shape: Tile(32, 32, 1, 4, ahead))
    monkeypatch.setattr(kernel, "SHORT_CHUNK", 0)
    meta, pool = make_step([(50, 50), (33, 140), (1, 1), (64, 65)])
    kv = filled_cache(meta, pool, 2, 16, torch.float32)
    q = torch.randn(meta.num_tokens, 4, 16)
    out = kernel.paged_attention(q, kv, meta, 0.25)
    assert relative_error(out, attention_fp64(q, kv, meta, 0.25)) < 1e-5


@pytest.mark.parametrize("spare", [0, 40])
@pytest.mark.parametrize("short", [0, 256])
def test_a_recorded_step_knows_bounds_only(short: int, spare: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "prefill_plan", lambda *shape: Tile(32, 32, 1, 4, False))
    monkeypatch.setattr(kernel, "SHORT_CHUNK", short)
    meta, pool = make_step([(1, 20), (1, 2), (34, 34), (5, 40), (1, 1)])
    kv = filled_cache(meta, pool, 2, 16, torch.float32)
    q = torch.randn(meta.num_tokens, 4, 16)
    padded = torch.cat((q, q.new_full((spare, 4, 16), torch.nan)))
    out = kernel.paged_attention(padded, kv, with_bounds(meta, spare), 0.25)
    assert relative_error(out[: meta.num_tokens], attention_fp64(q, kv, meta, 0.25)) < 1e-5


def test_query_heads_may_be_a_view_of_a_wider_row() -> None:
    meta, pool = make_step([(1, 20), (4, 9)])
    kv = filled_cache(meta, pool, 2, 16, torch.float32)
    wide = torch.randn(meta.num_tokens, 8 * 16)
    q = wide[:, : 4 * 16].view(-1, 4, 16)
    out = kernel.paged_attention(q, kv, meta, 0.25)
    assert relative_error(out, attention_fp64(q, kv, meta, 0.25)) < 1e-5


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("rot", [24, 8, 0])
@pytest.mark.parametrize("seqs", [[(1, 2), (1, 33), (1, 150), (1, 16)], [(1, 700)], [(1, 20), (3, 9)]], ids=str)
def test_rotation_and_append_inside_attention(seqs: Sequences, rot: int, norm: bool) -> None:
    meta, pool = make_step(seqs)
    kv = filled_cache(meta, pool, 2, 24, torch.float32, poison=7.0)
    tokens = torch.arange(meta.num_tokens)
    kv[:, meta.slots[tokens] // 16, :, meta.slots[tokens] % 16] = torch.nan  # what the step itself has to append
    expected_kv = kv.clone()
    wide = torch.randn(meta.num_tokens, (6 + 2 + 2) * 24)
    q, k, v = (part.view(meta.num_tokens, -1, 24) for part in wide.split([144, 48, 48], dim=-1))
    angle = torch.randn(1000, rot // 2)
    cos_sin = torch.cat((angle.cos(), angle.sin()), dim=-1) if rot else None
    weights = (torch.randn(24), torch.randn(24)) if norm else ()
    out = rope_attention(q, k, v, cos_sin, kv, meta, 0.2, *weights)
    expected = rope_attention_reference(q, k, v, cos_sin, expected_kv, meta, 0.2, *weights)
    assert relative_error(out, expected) < 1e-5
    assert relative_error(kv, expected_kv) < 1e-6
