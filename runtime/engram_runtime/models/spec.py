"""What the rest of the runtime needs to know about a model: sizes of its caches and what identifies its state.

No tensors here: the scheduler, the memory planner and the snapshot identity all work from this description.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

_ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
STATE_DTYPES = ("float32", "bfloat16")
"""What ssm states may be kept in."""


def item_size(dtype: object) -> int:
    """Bytes of one element of a dtype given as a name ("bfloat16") or as a torch dtype. ValueError for others."""
    name = str(dtype).removeprefix("torch.")
    if name not in _ITEM_SIZES:
        raise ValueError(f"dtype must be one of {', '.join(_ITEM_SIZES)}, got {name!r}")
    return _ITEM_SIZES[name]


@dataclass(frozen=True, slots=True)
class StateSpec:
    """Recurrent state of one sequence: `num_layers` times one ssm and one conv tensor."""

    num_layers: int
    ssm_shape: tuple[int, int, int]
    """(H, P, N): heads, head dim, state size."""
    conv_shape: tuple[int, int]
    """(C, W - 1): channels, taps kept."""
    chunk_size: int
    """Tokens per chunk of the scan."""
    ssm_dtype: str = "float32"
    conv_dtype: str = "float32"
    """The model's dtype: the convolution's inputs are activations."""

    def bytes(self) -> int:
        """Size of one sequence's state, all layers."""
        ssm = math.prod(self.ssm_shape) * item_size(self.ssm_dtype)
        conv = math.prod(self.conv_shape) * item_size(self.conv_dtype)
        return self.num_layers * (ssm + conv)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Dimensions of a built model."""

    architecture: str
    """The config's model_type."""
    dtype: str
    """Of weights and activations: "float32", "bfloat16" or "float16"."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    layer_types: tuple[str, ...]
    """"attention" or "mamba" per layer."""
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    state: StateSpec | None
    rope: Mapping[str, float | int | str | bool] | None
    """Canonical description of the position embedding; None for models without one."""
    config: Mapping[str, Any]
    """The config fields that the forward pass depends on, as JSON values."""
    quantization: None = None

    def with_state_dtype(self, dtype: str) -> ModelSpec:
        """The same model with its ssm states kept in one of STATE_DTYPES. ValueError for others, and when there is no
        state that anything but the default could be asked for."""
        if dtype not in STATE_DTYPES:
            raise ValueError(f"state_dtype must be one of {', '.join(STATE_DTYPES)}, got {dtype!r}")
        if self.state is not None:
            return replace(self, state=replace(self.state, ssm_dtype=dtype))
        if dtype != STATE_DTYPES[0]:
            raise ValueError(
                f"state_dtype {dtype} cannot be honoured: this model ({self.architecture}) has no recurrent state"
            )
        return self

    @property
    def num_attention_layers(self) -> int:
        return self.layer_types.count("attention")

    def kv_bytes_per_token(self, dtype: object = None) -> int:
        """Bytes of keys and values of one token over all attention layers; dtype defaults to the model's."""
        elements = 2 * self.num_attention_layers * self.num_kv_heads * self.head_dim
        return elements * item_size(dtype or self.dtype)

    def state_bytes(self) -> int:
        """Bytes of recurrent state of one sequence; 0 for models without."""
        return self.state.bytes() if self.state is not None else 0

    def abi_fields(self) -> dict[str, Any]:
        """JSON values that two models must share before one may read the other's state (beside equal weights)."""
        state = self.state
        return {
            "architecture": self.architecture,
            "dtype": self.dtype,
            "layer_types": list(self.layer_types),
            "kv": [self.num_kv_heads, self.head_dim],
            "rope": dict(self.rope) if self.rope is not None else None,
            "state": None
            if state is None
            else {
                "ssm": [*state.ssm_shape, state.ssm_dtype],
                "conv": [*state.conv_shape, state.conv_dtype],
            },
            "config": dict(self.config),
            "quantization": self.quantization,
        }
