"""Reference Mamba2 scan (state-space duality, arXiv 2405.21060, section 6) over a varlen batch.

Inside a chunk the recurrence is a masked matrix product; between chunks a state is carried. Decays are differences of
prefix sums, which cancel badly after a token that forgets almost everything, so the sums are kept in fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from engram_kernels.metadata import StepMetadata


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    ssm_state: Tensor,
    meta: StepMetadata,
    chunk_size: int,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    """h <- exp(dt A) h + dt B x; y = C h + D x, for every sequence of `meta` -> y [T, H, P] in x's dtype.

    x [T, H, P]; dt [T, H], before bias, softplus and clamping to dt_limit; A, D, dt_bias [H] with A < 0; B and C
    [T, G, N], a group serving H / G consecutive heads. ssm_state [slots, H, P, N] (a view of one layer is fine) is read
    where `has_state` is set, taken as zeros where it is not, and written in place at `state_slots`. It is fp32 within a
    chunk; a bf16 one is rounded to nearest where the chunk ends. That is enough: it happens once a chunk, whose tokens
    have been summed in fp32 by then, and not once a token as in `state_update`, which has to round by chance.
    """
    step = F.softplus(dt.float() + dt_bias.float()).clamp(*dt_limit)
    carried = torch.where(meta.has_state[:, None, None, None], ssm_state[meta.state_slots], 0.0).float()
    y = torch.empty_like(x)
    finals = []
    start = 0
    for query_len, state in zip(meta.query_lens_host, carried, strict=True):
        end = start + query_len
        for first in range(start, end, chunk_size):
            chunk = slice(first, min(first + chunk_size, end))
            out, state = _scan_chunk(
                x[chunk].float(), step[chunk], A.float(), B[chunk].float(), C[chunk].float(), state
            )
            y[chunk] = out + D.float()[:, None] * x[chunk].float()
        finals.append(state)
        start = end
    if finals:
        ssm_state[meta.state_slots] = torch.stack(finals).to(ssm_state.dtype)
    return y


def _scan_chunk(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk of q tokens, all fp32, from state [H, P, N] -> (y [q, H, P] without the skip, the state after it)."""
    length, heads, _ = x.shape
    groups = B.shape[1]
    total = (dt * A).double().cumsum(0).T  # [H, q] log-decay from the chunk's start up to and including a token
    future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
    decay = (total[:, :, None] - total[:, None, :]).float().masked_fill(future, -torch.inf).exp()
    scores = torch.einsum("ign,jgn->gij", C, B).repeat_interleave(heads // groups, dim=0)
    dx = x * dt[..., None]
    y = torch.einsum("hij,jhp->ihp", scores * decay, dx)

    B_heads = B.repeat_interleave(heads // groups, dim=1)
    C_heads = C.repeat_interleave(heads // groups, dim=1)
    from_start = total.float().exp()
    y += torch.einsum("ihn,hpn,hi->ihp", C_heads, state, from_start)
    to_end = (total[:, -1:] - total).float().exp()
    added = torch.einsum("jhp,jhn,hj->hpn", dx, B_heads, to_end)
    return y, state * from_start[:, -1, None, None] + added
