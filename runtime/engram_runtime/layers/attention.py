"""Causal self-attention over the paged KV cache, with grouped queries."""

from __future__ import annotations

from torch import Tensor, nn

from engram_kernels import StepMetadata
from engram_runtime.layers.last_tokens import LastTokens
from engram_runtime.layers.linear import FusedLinear, Linear
from engram_runtime.layers.norm import RMSNorm
from engram_runtime.layers.weights import Build, Targets


class Attention(nn.Module):
    """q, k and v in one product, rotation if the model has one, append to the cache, attend, project.

    heads, kv_heads, head_dim: H, K, D. scale: multiplies the scores. rope: [positions, rotary_dim] table, None for
    models without position embedding. qk_norm_eps: normalise each head of q and k before the rotation (Qwen3).
    """

    def __init__(
        self,
        build: Build,
        hidden_size: int,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        rope: Tensor | None,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        self._rope_attention = build.ops.rope_attention
        self._rope_append = build.ops.rope_append
        self._paged_attention = build.ops.paged_attention
        self.heads, self.kv_heads, self.head_dim, self.scale = heads, kv_heads, head_dim, scale
        self.rope = nn.Buffer(rope, persistent=False) if rope is not None else None
        sizes = {"q_proj": heads * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}
        self.qkv_proj = FusedLinear(build, hidden_size, sizes, bias=qkv_bias)
        self.o_proj = Linear(build, heads * head_dim, hidden_size, bias=out_bias)
        self.q_norm = RMSNorm(build, head_dim, qk_norm_eps) if qk_norm_eps is not None else None
        self.k_norm = RMSNorm(build, head_dim, qk_norm_eps) if qk_norm_eps is not None else None

    def forward(self, x: Tensor, meta: StepMetadata, kv: Tensor, last: LastTokens | None = None) -> Tensor:
        """x[T, M] -> [T, M], or [S, M] of the last tokens; writes all new keys and values into kv[2, NB, K, 16, D]."""
        tokens = x.shape[0]
        q, k, v = self.qkv_proj.split(self.qkv_proj(x))
        q = q.view(tokens, self.heads, self.head_dim)
        k = k.view(tokens, self.kv_heads, self.head_dim)
        v = v.view(tokens, self.kv_heads, self.head_dim)
        norms: tuple[Tensor, Tensor, float] | tuple[()] = ()
        if self.q_norm is not None and self.k_norm is not None:
            norms = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        if last is None:
            attended = self._rope_attention(q, k, v, self.rope, kv, meta, self.scale, *norms)
        else:
            q = self._rope_append(q, k, v, meta.positions, self.rope, kv, meta.slots, *norms)
            attended = self._paged_attention(q[last.rows], kv, last.meta, self.scale)
        projected: Tensor = self.o_proj(attended.flatten(1))
        return projected

    def targets(self, key: str) -> Targets:
        """Targets of q_proj, k_proj, v_proj, o_proj (and q_norm, k_norm) under `key`."""
        found = {**self.qkv_proj.targets(key), **self.o_proj.targets(f"{key}.o_proj")}
        if self.q_norm is not None and self.k_norm is not None:
            found |= {**self.q_norm.targets(f"{key}.q_norm"), **self.k_norm.targets(f"{key}.k_norm")}
        return found
