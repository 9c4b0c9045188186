"""Reference state copy: checkpoints of a running state, and running states started from a checkpoint."""

from __future__ import annotations

from torch import Tensor


def copy_state(ssm: Tensor, conv: Tensor, src: Tensor, dst: Tensor) -> None:
    """Copy slots src [n] to dst [n] (int64, dst distinct) of ssm and conv [slots, layers, ...] in place.

    All sources are read before any destination is written.
    """
    ssm[dst] = ssm[src]
    conv[dst] = conv[src]
