"""Mamba2 kernels against their references: states in strided views, mixed steps, chunks shorter than the window."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engram_kernels.causal_conv1d.kernel import causal_conv1d
from engram_kernels.causal_conv1d.reference import causal_conv1d as conv_reference
from engram_kernels.gated_rms_norm.kernel import gated_rms_norm
from engram_kernels.gated_rms_norm.reference import gated_rms_norm as norm_reference
from engram_kernels.ssd_scan import kernel as scan_kernel
from engram_kernels.ssd_scan.kernel import ssd_scan
from engram_kernels.ssd_scan.reference import ssd_scan as scan_reference
from engram_kernels.state_update.kernel import launch_plan, state_update
from engram_kernels.state_update.reference import state_update as update_reference
from tests.support.kernel_cases import exact_update, make_step, relative_error, with_bounds


@pytest.mark.parametrize("groups", [1, 3])
def test_gated_norm(groups: int) -> None:
    wide = torch.randn(4, 100)
    x, gate, weight = torch.randn(4, 48), wide[:, 20:68], torch.randn(48)
    assert (
        relative_error(gated_rms_norm(x, gate, weight, 1e-5, groups), norm_reference(x, gate, weight, 1e-5, groups))
        < 1e-6
    )


@pytest.mark.parametrize("bias", [False, True])
def test_conv(bias: bool) -> None:
    meta, _ = make_step([(1, 5), (1, 9), (2, 2), (70, 70), (1, 1), (2, 30), (3, 40)])
    slots, channels = len(meta.query_lens_host) + 2, 70
    x = torch.randn(meta.num_tokens, channels + 10)[:, 3 : channels + 3]
    weight, b = torch.randn(channels, 4), torch.randn(channels) if bias else None
    state = torch.randn(slots, 2, channels, 3)
    expected_state = state.clone()
    out = causal_conv1d(x, weight, b, state[:, 1], meta)
    assert relative_error(out, conv_reference(x, weight, b, expected_state[:, 1], meta)) < 1e-6
    assert relative_error(state, expected_state) < 1e-6


def _tensors(tokens: int, heads: int, channels: int, groups: int, size: int) -> tuple[torch.Tensor, ...]:
    wide = torch.randn(tokens, heads * channels + 2 * groups * size + heads)
    x, b, c, dt = wide.split([heads * channels, groups * size, groups * size, heads], dim=-1)
    return (
        x.view(tokens, heads, channels),
        dt,
        -torch.rand(heads) * 4 - 0.1,
        b.view(tokens, groups, size),
        c.view(tokens, groups, size),
        torch.randn(heads),
        torch.randn(heads),
    )


@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.1, 0.9)])
@pytest.mark.parametrize("shape", [(4, 16, 2, 16), (3, 24, 1, 20)])
def test_state_update(limit: tuple[float, float], shape: tuple[int, int, int, int]) -> None:
    meta, _ = make_step([(1, 5), (1, 2), (1, 77)])
    state = torch.randn(5, 2, shape[0], shape[1], shape[3])
    expected_state = state.clone()
    tensors = _tensors(3, *shape)
    out = state_update(*tensors, state[:, 0], meta, limit)
    assert relative_error(out, update_reference(*tensors, expected_state[:, 0], meta, limit)) < 1e-5
    assert relative_error(state, expected_state) < 1e-5


@pytest.mark.parametrize("shape", [(2, 16, 1, 16), (3, 24, 1, 20)])
@pytest.mark.parametrize("segment", [32, 512])
def test_scan(shape: tuple[int, int, int, int], segment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_kernel, "SEGMENT", segment)
    meta, _ = make_step([(70, 70), (1, 1), (33, 90), (2, 40)])
    state = torch.randn(6, 2, shape[0], shape[1], shape[3])
    expected_state = state.clone()
    tensors = _tensors(meta.num_tokens, *shape)
    out = ssd_scan(*tensors, state[:, 1], meta, 32)
    assert relative_error(out, scan_reference(*tensors, expected_state[:, 1], meta, 32)) < 1e-5
    assert relative_error(state, expected_state) < 1e-5


@pytest.mark.parametrize("spare", [0, 100])
@pytest.mark.parametrize("segment", [32, 512])
def test_a_recorded_step_knows_bounds_only(segment: int, spare: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_kernel, "SEGMENT", segment)
    meta, _ = make_step([(1, 9), (40, 40), (1, 1), (33, 90), (2, 40)])
    bounded = with_bounds(meta, spare)
    x, weight = torch.randn(meta.num_tokens + spare, 20), torch.randn(20, 4)
    x[meta.num_tokens :] = torch.nan
    conv = torch.randn(7, 20, 3)
    expected_conv = conv.clone()
    out = causal_conv1d(x, weight, None, conv, bounded)[: meta.num_tokens]
    assert relative_error(out, conv_reference(x[: meta.num_tokens], weight, None, expected_conv, meta)) < 1e-6
    assert relative_error(conv, expected_conv) < 1e-6
    tokens = meta.num_tokens - meta.num_decodes
    parts = _tensors(tokens + spare, 3, 24, 1, 20)
    per_token = (0, 1, 3, 4)
    for index in per_token:
        parts[index][tokens:] = torch.nan
    real = [part[:tokens] if index in per_token else part for index, part in enumerate(parts)]
    state = torch.randn(7, 2, 3, 24, 20)
    expected_state = state.clone()
    out = ssd_scan(*parts, state[:, 1], bounded.prefills(), 32)[:tokens]
    assert relative_error(out, scan_reference(*real, expected_state[:, 1], meta.prefills(), 32)) < 1e-5
    assert relative_error(state, expected_state) < 1e-5


def test_a_decode_may_leave_its_state_elsewhere() -> None:
    """Old states stay as they were, new ones go to the targets; chunks of the same step are updated in place."""
    meta, _ = make_step([(1, 5), (1, 9), (3, 3)])
    spare = torch.tensor([slot for slot in range(8) if slot not in meta.state_slots.tolist()])
    targets = torch.cat((spare[:2], meta.state_slots[2:]))
    elsewhere = dataclasses.replace(meta, state_targets=targets)
    x, weight = torch.randn(meta.num_tokens, 20), torch.randn(20, 4)
    conv = torch.randn(8, 20, 3)
    expected_conv, before = conv.clone(), conv.clone()
    out = causal_conv1d(x, weight, None, conv, elsewhere)
    assert relative_error(out, conv_reference(x, weight, None, expected_conv, elsewhere)) < 1e-6
    assert relative_error(conv, expected_conv) < 1e-6
    assert torch.equal(conv[meta.state_slots[:2]], before[meta.state_slots[:2]])
    conv_in_place = before.clone()
    causal_conv1d(x, weight, None, conv_in_place, meta)
    assert torch.equal(conv[targets], conv_in_place[meta.state_slots])
    tensors = _tensors(2, 2, 16, 1, 16)
    ssm = torch.randn(8, 2, 16, 16)
    expected_ssm, in_place, old = ssm.clone(), ssm.clone(), ssm.clone()
    out = state_update(*tensors, ssm, elsewhere.decodes())
    assert relative_error(out, update_reference(*tensors, expected_ssm, elsewhere.decodes())) < 1e-6
    assert relative_error(ssm, expected_ssm) < 1e-6
    state_update(*tensors, in_place, meta.decodes())
    assert torch.equal(ssm[targets[:2]], in_place[meta.state_slots[:2]])
    assert torch.equal(ssm[meta.state_slots[:2]], old[meta.state_slots[:2]])


def test_a_fast_decay_costs_no_digits_of_the_state() -> None:
    """What a tile forgets is summed from its end: as a difference of sums from its start the state was 1e-5 off."""
    meta, _ = make_step([(300, 300), (77, 400)])
    x, dt, _, b, c, skip, bias = _tensors(meta.num_tokens, 4, 16, 1, 16)
    tensors = (x, dt, -torch.exp(torch.linspace(0, 3, 4)), b, c, skip, bias)
    state = torch.randn(4, 4, 16, 16)
    expected = state.clone()
    ssd_scan(*tensors, state, meta, 256)
    scan_reference(*tensors, expected, meta, 256)
    assert relative_error(state, expected) < 5e-7


@pytest.mark.parametrize("shape", [(4, 16, 2, 16), (3, 24, 1, 20), (2, 64, 1, 8)])
def test_a_bf16_state_is_rounded_by_the_same_chance_as_the_reference_s(shape: tuple[int, int, int, int]) -> None:
    """Bit by bit: the sums are equal in fp32, so what is left is the hash. The last sequence has no state yet, and one
    leaves its new state elsewhere. What no sequence owns keeps its NaN."""
    meta, _ = make_step([(1, 5), (1, 2), (1, 4097), (1, 70000), (1, 1)])
    targets = meta.state_slots.clone()
    targets[1] = next(slot for slot in range(7) if slot not in targets.tolist())
    meta = dataclasses.replace(meta, state_targets=targets)
    tensors, limit = exact_update(5, shape)
    state = torch.full((7, 2, shape[0], shape[1], shape[3]), torch.nan).bfloat16()
    state[meta.state_slots[:4], 1] = torch.randn(4, shape[0], shape[1], shape[3]).bfloat16()
    expected = state.clone()
    out = state_update(*tensors, state[:, 1], meta, limit)  # type: ignore[arg-type]
    wide = update_reference(*tensors, expected[:, 1], meta, limit)  # type: ignore[arg-type]
    assert relative_error(out, wide) < 1e-6
    assert torch.equal(state.view(torch.int16), expected.view(torch.int16))


def test_a_bf16_state_does_not_depend_on_slots_or_company() -> None:
    """Each of 40 sequences alone in a step, in other slots and other launches: the same bits as together."""
    shape = (2, 64, 1, 16)
    meta, _ = make_step([(1, 3 + 7 * n) for n in range(40)])
    tensors, limit = exact_update(40, shape)
    x, dt, A, b, c, skip, bias = tensors
    states = torch.randn(40, 2, 64, 16).bfloat16()
    together = torch.empty(42, 2, 64, 16).bfloat16()
    together[meta.state_slots] = states
    state_update(x, dt, A, b, c, skip, bias, together, meta, limit)
    assert launch_plan(40, 64, torch.bfloat16) != launch_plan(1, 64, torch.bfloat16)
    for n in (0, 3, 39):
        one, _ = make_step([(1, 3 + 7 * n)], seed=n)
        alone = states[[n, n, n]]
        state_update(x[n : n + 1], dt[n : n + 1], A, b[n : n + 1], c[n : n + 1], skip, bias, alone, one, limit)
        assert torch.equal(alone[one.state_slots[0]], together[meta.state_slots[n]])


def test_what_is_not_finite_stays_in_a_bf16_state() -> None:
    """A NaN whose bits carry into the sign when anything is added to them, infinities, and both zeros."""
    meta, _ = make_step([(1, 5 + n) for n in range(3)])
    (_, dt, A, b, c, skip, bias), limit = exact_update(3, (1, 16, 1, 16))
    x = torch.zeros(3, 1, 16)
    x[:, 0, 1] = torch.nan
    x[:, 0, 2], x[:, 0, 3] = torch.inf, -torch.inf
    x[:, 0, 4] = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    state = torch.zeros(5, 1, 16, 16).bfloat16()
    expected = state.clone()
    state_update(x, dt, A, b.abs(), c, skip, bias, state, meta, limit)
    update_reference(x, dt, A, b.abs(), c, skip, bias, expected, meta, limit)
    written = state[meta.state_slots, 0].float()
    assert bool(written[:, [1, 4]].isnan().all())
    assert bool((written[:, 2] == torch.inf).all())
    assert bool((written[:, 3] == -torch.inf).all())
    assert torch.equal(written[:, [0, *range(5, 16)]], expected[meta.state_slots, 0].float()[:, [0, *range(5, 16)]])


def test_other_states_are_refused() -> None:
    meta, _ = make_step([(1, 5)])
    tensors, limit = exact_update(1, (2, 16, 1, 16))
    with pytest.raises(ValueError, match=r"^ssm_state must be float32 or bfloat16, got float16"):
        state_update(*tensors, torch.zeros(3, 2, 16, 16).half(), meta, limit)  # type: ignore[arg-type]


@pytest.mark.parametrize("segment", [32, 512])
def test_a_scan_reads_and_leaves_bf16_states(segment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that begin, prompts that go on, and one token through the scan: outputs as of fp32 states with the same
    values, final states within a unit of the reference's (the interpreter cuts where the GPU rounds to nearest)."""
    monkeypatch.setattr(scan_kernel, "SEGMENT", segment)
    meta, _ = make_step([(70, 70), (1, 1), (33, 90), (2, 40)])
    shape = (3, 24, 1, 20)
    state = torch.full((6, 2, 3, 24, 20), torch.nan).bfloat16()
    state[meta.state_slots[2:], 1] = torch.randn(2, 3, 24, 20).bfloat16()
    exact = state.float()
    tensors = _tensors(meta.num_tokens, *shape)
    out = ssd_scan(*tensors, state[:, 1], meta, 32)
    assert relative_error(out, scan_reference(*tensors, exact[:, 1], meta, 32)) < 1e-5
    got, wide = state[meta.state_slots, 1].float(), exact[meta.state_slots, 1]
    assert bool(((got - wide).abs() <= 2.0**-7 * wide.abs() + 1e-6).all())
    untouched = [slot for slot in range(6) if slot not in meta.state_slots.tolist()]
    assert bool(state[untouched].isnan().all())


def test_launches_of_a_state_update() -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    assert [launch_plan(n, 64, fp32) for n in (1, 256)] == [(16, 1)] * 2
    assert [launch_plan(n, 64, bf16) for n in (1, 3, 4, 31, 32, 256)] == [(16, 8)] * 2 + [(32, 8)] * 2 + [(64, 8)] * 2
    assert [launch_plan(64, channels, dtype) for channels, dtype in ((24, bf16), (10, bf16), (10, fp32))] == [
        (32, 8),
        (16, 8),
        (16, 1),
    ]
