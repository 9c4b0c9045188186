"""The Mamba2 mixer (arXiv 2405.21060): a short causal convolution, then a selective state space scan.

One step mixes sequences that decode one token (a state update) with chunks of prompts (a chunked scan that starts from
the state left by the chunk before); both read and write the running states in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engram_kernels import StepMetadata
from engram_runtime.layers.last_tokens import LastTokens
from engram_runtime.layers.linear import Linear
from engram_runtime.layers.weights import Build, Target, Targets


@dataclass(frozen=True, slots=True)
class StateStep:
    """A step split at the border between decodes and prefill chunks; made once per step, used by every layer."""

    whole: StepMetadata
    decodes: StepMetadata | None
    prefills: StepMetadata | None

    @classmethod
    def of(cls, meta: StepMetadata) -> StateStep:
        return cls(
            whole=meta,
            decodes=meta.decodes() if meta.num_decodes else None,
            prefills=meta.prefills() if meta.num_decodes < meta.num_sequences else None,
        )


@dataclass(frozen=True, slots=True)
class Mamba2Shape:
    """heads H, head_dim P, state_size N, groups G, conv_width W; chunk_size tokens per chunk of the scan."""

    heads: int
    head_dim: int
    state_size: int
    groups: int
    conv_width: int
    chunk_size: int
    dt_limit: tuple[float, float] = (0.0, float("inf"))

    @property
    def inner(self) -> int:
        """Width of x and of the gate, H * P."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: x, B and C side by side."""
        return self.inner + 2 * self.groups * self.state_size


class Mamba2Mixer(nn.Module):
    """A, D and dt_bias stay in fp32 whatever the model's dtype: they enter exponentials."""

    def __init__(
        self,
        build: Build,
        hidden_size: int,
        shape: Mamba2Shape,
        *,
        norm_eps: float,
        norm_groups: int = 1,
        conv_bias: bool = True,
        proj_bias: bool = False,
    ) -> None:
        super().__init__()
        self._causal_conv1d = build.ops.causal_conv1d
        self._ssd_scan = build.ops.ssd_scan
        self._state_update = build.ops.state_update
        self._gated_rms_norm = build.ops.gated_rms_norm
        self.shape, self.norm_eps, self.norm_groups = shape, norm_eps, norm_groups
        self.in_proj = Linear(build, hidden_size, shape.inner + shape.channels + shape.heads, bias=proj_bias)
        self.conv_weight = build.parameter(shape.channels, shape.conv_width)
        self.conv_bias = build.parameter(shape.channels) if conv_bias else None
        self.A = build.parameter(shape.heads, dtype=torch.float32)
        self.D = build.parameter(shape.heads, dtype=torch.float32)
        self.dt_bias = build.parameter(shape.heads, dtype=torch.float32)
        self.norm_weight = build.parameter(shape.inner)
        self.out_proj = Linear(build, shape.inner, hidden_size, bias=proj_bias)

    def forward(self, x: Tensor, step: StateStep, ssm: Tensor, conv: Tensor, last: LastTokens | None = None) -> Tensor:
        """x[T, M] -> [T, M], or [S, M] of the last tokens; advances ssm[slots, H, P, N] and conv[slots, C, W - 1] of
        the step's slots by all tokens."""
        s = self.shape
        gate, conv_in, dt = self.in_proj(x).split_with_sizes([s.inner, s.channels, s.heads], dim=-1)
        mixed = self._causal_conv1d(conv_in, self.conv_weight, self.conv_bias, conv, step.whole)
        inner, b, c = mixed.split_with_sizes([s.inner, s.groups * s.state_size, s.groups * s.state_size], dim=-1)
        y = self._scan(
            inner.reshape(-1, s.heads, s.head_dim),
            dt,
            b.reshape(-1, s.groups, s.state_size),
            c.reshape(-1, s.groups, s.state_size),
            step,
            ssm,
        )
        if last is not None:
            y, gate = y[last.rows], gate[last.rows]
        normed = self._gated_rms_norm(y.flatten(1), gate, self.norm_weight, self.norm_eps, self.norm_groups)
        projected: Tensor = self.out_proj(normed)
        return projected

    def _scan(self, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, step: StateStep, ssm: Tensor) -> Tensor:
        """Decodes by one state update, prefill chunks by the chunked scan: x[T, H, P] -> y[T, H, P]."""
        border = step.whole.decode_tokens
        limit = self.shape.dt_limit
        parts: list[Tensor] = []
        if step.decodes is not None:
            first = slice(0, border)
            parts.append(
                self._state_update(
                    x[first], dt[first], self.A, b[first], c[first], self.D, self.dt_bias, ssm, step.decodes, limit
                )
            )
        if step.prefills is not None:
            rest = slice(border, None)
            chunk = self.shape.chunk_size
            parts.append(
                self._ssd_scan(
                    x[rest], dt[rest], self.A, b[rest], c[rest], self.D, self.dt_bias, ssm, step.prefills, chunk, limit
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def targets(self, key: str) -> Targets:
        """Targets under `key`, named as Hugging Face's Mamba2 layers name them."""
        found = {
            **self.in_proj.targets(f"{key}.in_proj"),
            **self.out_proj.targets(f"{key}.out_proj"),
            f"{key}.conv1d.weight": Target(self.conv_weight.unsqueeze(1)),
            f"{key}.A_log": Target(self.A, transform=lambda log: -torch.exp(log.float())),
            f"{key}.D": Target(self.D),
            f"{key}.dt_bias": Target(self.dt_bias),
            f"{key}.norm.weight": Target(self.norm_weight),
        }
        if self.conv_bias is not None:
            found[f"{key}.conv1d.bias"] = Target(self.conv_bias)
        return found
