"""Reference single-token Mamba2 update: `ssd_scan` for sequences with one new token, without the chunk machinery."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from engram_kernels.metadata import StepMetadata
from engram_kernels.state_update.rounding import stored


def state_update(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    ssm_state: Tensor,
    meta: StepMetadata,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    """h <- exp(dt A) h + dt B x; y = C h + D x, one token per sequence -> y [S, H, P] in x's dtype.

    Tensors as in `ssd_scan` with T = S: `meta` holds decodes only. The state is read at
    `state_slots` and written at `written_slots` (the same ones unless the step says otherwise). A bf16 state is rounded
    by chance when it is written (`rounding.py`); y is computed from the state before that. ValueError for a state that
    is neither fp32 nor bf16.
    """
    step = F.softplus(dt.float() + dt_bias.float()).clamp(*dt_limit)
    repeats = x.shape[1] // B.shape[1]
    B_heads = B.float().repeat_interleave(repeats, dim=1)
    C_heads = C.float().repeat_interleave(repeats, dim=1)
    x_fp32 = x.float()
    state = torch.where(meta.has_state[:, None, None, None], ssm_state[meta.state_slots], 0.0).float()
    decay = torch.exp(step * A.float())
    state = state * decay[..., None, None] + (x_fp32 * step[..., None])[..., None] * B_heads[:, :, None]
    ssm_state[meta.written_slots] = stored(state, meta.seq_lens, ssm_state.dtype)
    y = torch.einsum("shpn,shn->shp", state, C_heads) + D.float()[:, None] * x_fp32
    return y.to(x.dtype)
