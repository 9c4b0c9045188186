"""Mamba2 kernels on the GPU at real sizes (Granite-4.0-H-tiny, Mamba-Codestral groups), against fp32 references."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engram_kernels import StepMetadata
from engram_kernels.causal_conv1d.kernel import causal_conv1d
from engram_kernels.causal_conv1d.reference import causal_conv1d as conv_reference
from engram_kernels.gated_rms_norm.kernel import gated_rms_norm
from engram_kernels.gated_rms_norm.reference import gated_rms_norm as norm_reference
from engram_kernels.ssd_scan.kernel import ssd_scan
from engram_kernels.ssd_scan.reference import ssd_scan as scan_reference
from engram_kernels.state_update.kernel import state_update
from engram_kernels.state_update.reference import state_update as update_reference
from tests.support.kernel_cases import Sequences, exact_update, make_step, relative_error, with_bounds

BF16 = torch.bfloat16
SHAPES = [(48, 64, 1, 128), (128, 64, 8, 128)]  # heads, channels, groups, state size
SHORT: Sequences = [(300, 300), (1, 1), (77, 400), (2, 40), (64, 128)]
CHUNKS: Sequences = [*SHORT, (1300, 1400), (512, 512), (1025, 1025)]


def _tensors(tokens: int, shape: tuple[int, int, int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    """x, dt, A, B, C, D, dt_bias as views of one product, as a model has them."""
    heads, channels, groups, size = shape
    wide = torch.randn(tokens, heads * channels + 2 * groups * size + heads, device="cuda").to(dtype)
    x, b, c, dt = wide.split([heads * channels, groups * size, groups * size, heads], dim=-1)
    small = [torch.randn(heads, device="cuda") for _ in range(2)]
    forget = -torch.exp(torch.rand(heads, device="cuda") * 3)
    return [
        x.view(tokens, heads, channels), dt, forget, b.view(tokens, groups, size), c.view(tokens, groups, size), *small
    ]  # fmt: skip


def _wide(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.float() for t in tensors]


def _state(meta: StepMetadata, shape: tuple[int, int, int, int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(meta.num_sequences + 2, 3, shape[0], shape[1], shape[3], device="cuda").to(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("batch", [1, 64])
def test_state_update(shape: tuple[int, int, int, int], batch: int) -> None:
    meta, _ = make_step([(1, 2 + n) for n in range(batch)], device="cuda")
    state = _state(meta, shape)
    expected_state = state.clone()
    tensors = _tensors(batch, shape, BF16)
    out = state_update(*tensors, state[:, 1], meta)  # type: ignore[arg-type]
    expected = update_reference(*_wide(tensors), expected_state[:, 1], meta)  # type: ignore[arg-type]
    assert relative_error(out, expected) < 4e-3
    assert relative_error(state, expected_state) < 1e-5


def test_state_of_half_precision() -> None:
    meta, _ = make_step([(1, 5 + n) for n in range(8)], device="cuda")
    state = _state(meta, SHAPES[0], BF16)
    expected_state = state.float()
    tensors = _tensors(8, SHAPES[0], BF16)
    state_update(*tensors, state[:, 0], meta)  # type: ignore[arg-type]
    update_reference(*_wide(tensors), expected_state[:, 0], meta)  # type: ignore[arg-type]
    # A unit is at most 1/128 of a value; what is rounded by chance is off by a third of it or so.
    assert relative_error(state, expected_state) < 4e-3
    assert bool(((state.float() - expected_state).abs() <= 2.0**-7 * expected_state.abs() + 1e-5).all())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_a_bf16_state_is_rounded_by_the_same_chance_as_the_reference_s(
    shape: tuple[int, int, int, int], batch: int
) -> None:
    """Bit by bit: the sums are equal in fp32 however they are computed, so what is left is the hash."""
    meta, _ = make_step([(1, 2 + 1001 * n) for n in range(batch)], device="cuda")
    state = _state(meta, shape, BF16)
    expected_state = state.clone()
    tensors, limit = exact_update(batch, shape, device="cuda")
    state_update(*tensors, state[:, 1], meta, limit)  # type: ignore[arg-type]
    update_reference(*tensors, expected_state[:, 1], meta, limit)  # type: ignore[arg-type]
    assert torch.equal(state.view(torch.int16), expected_state.view(torch.int16))


def test_a_bf16_state_does_not_depend_on_slots_or_company() -> None:
    """Sequences of a step of 64, each alone in another slot: the same state and the same output, bit by bit."""
    meta, _ = make_step([(1, 3 + 7 * n) for n in range(64)], device="cuda")
    state = _state(meta, SHAPES[0], BF16)
    before = state.clone()
    tensors = _tensors(64, SHAPES[0], BF16)
    out = state_update(*tensors, state[:, 0], meta)  # type: ignore[arg-type]
    for n in (0, 17, 63):
        one, _ = make_step([(1, 3 + 7 * n)], device="cuda", seed=n)
        alone = before[meta.state_slots[[n] * 3]]
        mine = [t[n : n + 1] if t.shape[0] == 64 else t for t in tensors]
        assert torch.equal(state_update(*mine, alone[:, 0], one), out[n : n + 1])  # type: ignore[arg-type]
        assert torch.equal(alone[one.state_slots[0], 0], state[meta.state_slots[n], 0])


def test_a_nan_that_the_gpu_makes_stays_one_in_a_bf16_state() -> None:
    """All its bits are set: anything added to them carries into the sign, and what is cut off leaves a zero."""
    meta, _ = make_step([(1, 5 + n) for n in range(4)], device="cuda")
    tensors, limit = exact_update(4, SHAPES[0], device="cuda")
    tensors[0][:, 3] = torch.inf
    state = _state(meta, SHAPES[0], BF16)
    state[:, :, 3] = -torch.inf
    tensors[3] = tensors[3].abs() + 1
    state_update(*tensors, state[:, 0], meta, limit)  # type: ignore[arg-type]
    assert bool(state[meta.state_slots, 0, 3].isnan().all())
    assert bool(state[meta.state_slots, 0, 4:].isfinite().all())


@pytest.mark.parametrize("chunks", [SHORT, CHUNKS], ids=["short", "long"])
def test_a_scan_reads_and_leaves_bf16_states(chunks: Sequences) -> None:
    """Outputs bit by bit as from fp32 states of the same values, final states those states rounded to nearest."""
    meta, _ = make_step(chunks, device="cuda")
    state = _state(meta, SHAPES[0], BF16)
    wide = state.float()
    tensors = _tensors(meta.num_tokens, SHAPES[0], BF16)
    out = ssd_scan(*tensors, state[:, 1], meta, 256)  # type: ignore[arg-type]
    assert torch.equal(out, ssd_scan(*tensors, wide[:, 1], meta, 256))  # type: ignore[arg-type]
    assert torch.equal(state, wide.to(BF16))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("chunks", [SHORT, CHUNKS], ids=["short", "long"])
@pytest.mark.parametrize(("dtype", "limit"), [(BF16, 6e-3), (torch.float16, 2e-3), (torch.float32, 1e-5)], ids=str)
def test_scan(shape: tuple[int, int, int, int], chunks: Sequences, dtype: torch.dtype, limit: float) -> None:
    meta, _ = make_step(chunks, device="cuda")
    state = _state(meta, shape)
    expected_state = state.clone()
    tensors = _tensors(meta.num_tokens, shape, dtype)
    out = ssd_scan(*tensors, state[:, 2], meta, 256)  # type: ignore[arg-type]
    expected = scan_reference(*_wide(tensors), expected_state[:, 2], meta, 256)  # type: ignore[arg-type]
    assert relative_error(out, expected) < limit
    assert relative_error(state, expected_state) < min(limit, 1.5e-3)


@pytest.mark.parametrize("spare", [0, 600])
def test_a_recorded_step_knows_bounds_only(spare: int) -> None:
    meta, _ = make_step([(1, 5), (1, 900), *CHUNKS], device="cuda")
    bounded = with_bounds(meta, spare)
    tokens = meta.num_tokens
    x = torch.randn(tokens + spare, 3328, device="cuda").to(BF16)
    weight, bias = (torch.randn(*s, device="cuda").to(BF16) for s in ((3328, 4), (3328,)))
    conv = torch.randn(meta.num_sequences + 2, 2, 3328, 3, device="cuda").to(BF16)
    expected_conv = conv.float()
    out = causal_conv1d(x, weight, bias, conv[:, 1], bounded)[:tokens]
    expected = conv_reference(x[:tokens].float(), weight.float(), bias.float(), expected_conv[:, 1], meta)
    assert relative_error(out, expected) < 4e-3
    assert relative_error(conv, expected_conv) < 4e-3
    tokens -= meta.num_decodes
    tensors = _tensors(tokens + spare, SHAPES[0], BF16)
    real = [part[:tokens] if part.shape[0] == tokens + spare else part for part in tensors]
    state = _state(meta, SHAPES[0])
    expected_state = state.clone()
    out = ssd_scan(*tensors, state[:, 1], bounded.prefills(), 256)[:tokens]  # type: ignore[arg-type]
    wide = scan_reference(*_wide(real), expected_state[:, 1], meta.prefills(), 256)  # type: ignore[arg-type]
    assert relative_error(out, wide) < 6e-3
    assert relative_error(state, expected_state) < 1.5e-3


def test_scan_in_pieces_equals_scan_in_one() -> None:
    """A prompt in chunks leaves the state that the whole prompt leaves: what prefix caching and snapshots stand on."""
    tensors = _tensors(700, SHAPES[0], BF16)
    whole, _ = make_step([(700, 700)], device="cuda")
    state = _state(whole, SHAPES[0])
    pieces_state = state.clone()
    out = ssd_scan(*tensors, state[:, 0], whole, 256)  # type: ignore[arg-type]
    outs, start = [], 0
    for count in (256, 1, 300, 143):
        piece, _ = make_step([(count, start + count)], device="cuda")
        piece = dataclasses.replace(piece, state_slots=whole.state_slots)
        part = [t[start : start + count] if t.shape[0] == 700 else t for t in tensors]
        outs.append(ssd_scan(*part, pieces_state[:, 0], piece, 256))  # type: ignore[arg-type]
        start += count
    assert relative_error(torch.cat(outs), out) < 4e-3
    assert relative_error(pieces_state, state) < 1e-3


@pytest.mark.parametrize("channels", [3328, 10240])
def test_conv(channels: int) -> None:
    meta, _ = make_step([(1, 5), (1, 900), *CHUNKS], device="cuda")
    wide = torch.randn(meta.num_tokens, channels + 100, device="cuda").to(BF16)
    x = wide[:, 60 : channels + 60]
    weight, bias = (torch.randn(*s, device="cuda").to(BF16) for s in ((channels, 4), (channels,)))
    state = torch.randn(meta.num_sequences + 2, 2, channels, 3, device="cuda").to(BF16)
    expected_state = state.float()
    out = causal_conv1d(x, weight, bias, state[:, 1], meta)
    expected = conv_reference(x.float(), weight.float(), bias.float(), expected_state[:, 1], meta)
    assert relative_error(out, expected) < 4e-3
    assert torch.equal(state.float(), expected_state)


@pytest.mark.parametrize(("width", "groups"), [(3072, 1), (8192, 8)])
def test_gated_norm(width: int, groups: int) -> None:
    wide = torch.randn(50, width + 77, device="cuda").to(BF16)
    x, weight = torch.randn(50, width, device="cuda").to(BF16), torch.randn(width, device="cuda").to(BF16)
    gate = wide[:, 70 : width + 70]
    expected = norm_reference(x.double(), gate.double(), weight.double(), 1e-5, groups)
    assert relative_error(gated_rms_norm(x, gate, weight, 1e-5, groups), expected) < 4e-3
