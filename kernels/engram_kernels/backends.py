"""The implementations that ship, as plain data. A new kernel is one line here and one file in the folder of its op."""

from __future__ import annotations

from engram_kernels.spec import OpSpec, cuda_capability

OP_NAMES: tuple[str, ...] = (
    "linear",
    "gated_linear",
    "embedding",
    "rms_norm",
    "add_rms_norm",
    "rotary",
    "kv_append",
    "rope_append",
    "rope_attention",
    "paged_attention",
    "silu_and_mul",
    "logits",
    "causal_conv1d",
    "ssd_scan",
    "state_update",
    "gated_rms_norm",
    "route",
    "experts",
    "sample",
    "copy_blocks",
    "gather_kv",
    "scatter_kv",
    "copy_state",
)

PARTS: dict[str, tuple[str, ...]] = {
    "gated_linear": ("linear", "silu_and_mul"),
    "rope_attention": ("rope_append", "paged_attention"),
}
"""Fused ops that models call, and the ops that do the same one after the other. Where a part is served by another
backend than the whole would be, the whole is composed of its parts, so that nobody's choice of a part is lost."""

REFERENCES: tuple[OpSpec, ...] = tuple(OpSpec(op, "torch", f"engram_kernels.{op}.reference:{op}") for op in OP_NAMES)

TRITON: tuple[OpSpec, ...] = tuple(
    OpSpec(op, "triton", f"engram_kernels.{op}.kernel:{op}", cuda_capability(8), priority=1) for op in OP_NAMES
)

SHIPPED: tuple[OpSpec, ...] = REFERENCES + TRITON
