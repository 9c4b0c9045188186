"""Rotary position embedding: one canonical description per model, and the table of cosines and sines it implies.

The description is also part of a model's identity: snapshots made with other frequencies must never be restored, so
it holds exactly the numbers that the table depends on. Formulas: RoFormer (arXiv 2104.09864), position interpolation
(2306.15595), YaRN (2309.00071), Llama 3.1's frequency-dependent scaling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

RopeSpec = dict[str, float | int | str | bool]
"""Canonical description: "type", "theta", "rotary_dim" and the numbers of that type."""

_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


def canonical_rope(parameters: Mapping[str, Any], head_dim: int) -> RopeSpec:
    """The canonical description of a Hugging Face `rope_parameters` mapping.

    Raises ValueError naming the field for a type that is not supported, a missing number, or one that is no positive
    number.
    """
    kind = str(parameters.get("rope_type", "default"))
    if kind not in _REQUIRED:
        raise ValueError(f"rope_parameters.rope_type {kind!r} is not supported; supported: {', '.join(_REQUIRED)}")
    rotary_dim = int(head_dim * _positive(parameters, "partial_rotary_factor", 1.0))
    spec: RopeSpec = {"type": kind, "theta": _positive(parameters, "rope_theta"), "rotary_dim": rotary_dim}
    for name in _REQUIRED[kind]:
        spec[name] = _positive(parameters, name)
    if kind == "yarn":
        spec["beta_fast"] = _positive(parameters, "beta_fast", 32.0)
        spec["beta_slow"] = _positive(parameters, "beta_slow", 1.0)
        spec["truncate"] = bool(parameters.get("truncate", True))
        spec["attention_factor"] = _yarn_attention_factor(parameters, float(spec["factor"]))
    return spec


def inverse_frequencies(spec: RopeSpec) -> Tensor:
    """[rotary_dim / 2] fp32 angular frequencies, radians per position."""
    dim = int(spec["rotary_dim"])
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    frequencies: Tensor = 1.0 / (float(spec["theta"]) ** exponents)
    if spec["type"] == "linear":
        return frequencies / float(spec["factor"])
    if spec["type"] == "llama3":
        return _llama3(frequencies, spec)
    if spec["type"] == "yarn":
        return _yarn(frequencies, spec)
    return frequencies


def rotary_table(spec: RopeSpec, positions: int, device: torch.device) -> Tensor:
    """[positions, rotary_dim] fp32: cosines of each position's angles, then their sines.

    YaRN's attention factor is part of the table (it scales q and k alike).
    """
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * inverse_frequencies(spec)[None, :]
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return (table * float(spec.get("attention_factor", 1.0))).to(device)


def _positive(parameters: Mapping[str, Any], name: str, default: float | None = None) -> float | int:
    value = parameters.get(name)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"rope_parameters.{name} is missing")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0 or not math.isfinite(value):
        raise ValueError(f"rope_parameters.{name} must be a positive number, got {value!r}")
    return value


def _llama3(frequencies: Tensor, spec: RopeSpec) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between are interpolated."""
    factor, low, high = (float(spec[name]) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    wavelengths = 2 * math.pi / frequencies
    keep = ((float(spec["original_max_position_embeddings"]) / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - keep) * frequencies / factor + keep * frequencies


def _yarn(frequencies: Tensor, spec: RopeSpec) -> Tensor:
    """Dimensions that turn fast are kept, those that turn slowly are interpolated, a linear ramp lies between."""
    dim, theta = int(spec["rotary_dim"]), float(spec["theta"])
    window = float(spec["original_max_position_embeddings"])

    def dimension(turns: float) -> float:
        return dim * math.log(window / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(float(spec["beta_fast"])), dimension(float(spec["beta_slow"]))
    if spec["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    keep = 1.0 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    interpolated = 1.0 / (float(spec["factor"]) * theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    return interpolated * (1.0 - keep) + frequencies * keep


def _yarn_attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    if parameters.get("attention_factor") is not None:
        return float(_positive(parameters, "attention_factor"))

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        numerator, denominator = (float(_positive(parameters, name)) for name in ("mscale", "mscale_all_dim"))
        return mscale(numerator) / mscale(denominator)
    return mscale(1.0)
