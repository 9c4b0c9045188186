"""The bundle of ops a model calls, each bound once to an implementation.

The protocols below are the contract of every backend; the docstring of each `reference.py` gives shapes and dtypes.
Shape letters: T tokens of the step, S sequences, H query heads, K key/value heads, D head dim, M model dim, R sampled
rows, V vocabulary, NB blocks, G groups, P state head dim, N state size, E experts, F expert width, C channels, W taps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from engram_kernels.backends import OP_NAMES, PARTS
from engram_kernels.composed import composed
from engram_kernels.registry import Registry

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from engram_kernels.metadata import SampleOutput, SamplingTensors, StepMetadata

RouteMode = Literal["softmax_topk", "topk_softmax"]


class Linear(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...


class GatedLinear(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...


class Embedding(Protocol):
    def __call__(self, ids: Tensor, weight: Tensor) -> Tensor: ...


class RmsNorm(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...


class AddRmsNorm(Protocol):
    def __call__(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]: ...


class Rotary(Protocol):
    def __call__(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]: ...


class KvAppend(Protocol):
    def __call__(self, k: Tensor, v: Tensor, kv: Tensor, slots: Tensor) -> None: ...


class RopeAppend(Protocol):
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        cos_sin: Tensor | None,
        kv: Tensor,
        slots: Tensor,
        q_weight: Tensor | None = None,
        k_weight: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor: ...


class RopeAttention(Protocol):
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor | None,
        kv: Tensor,
        meta: StepMetadata,
        scale: float,
        q_weight: Tensor | None = None,
        k_weight: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor: ...


class PagedAttention(Protocol):
    def __call__(self, q: Tensor, kv: Tensor, meta: StepMetadata, scale: float) -> Tensor: ...


class SiluAndMul(Protocol):
    def __call__(self, x: Tensor) -> Tensor: ...


class Logits(Protocol):
    def __call__(self, hidden: Tensor, weight: Tensor) -> Tensor: ...


class CausalConv1d(Protocol):
    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, conv_state: Tensor, meta: StepMetadata
    ) -> Tensor: ...


class SsdScan(Protocol):
    def __call__(
        self,
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
    ) -> Tensor: ...


class StateUpdate(Protocol):
    def __call__(
        self,
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
    ) -> Tensor: ...


class GatedRmsNorm(Protocol):
    def __call__(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int = 1) -> Tensor: ...


class Route(Protocol):
    def __call__(
        self, router_logits: Tensor, top_k: int, mode: RouteMode, renormalize: bool
    ) -> tuple[Tensor, Tensor]: ...


class Experts(Protocol):
    def __call__(
        self,
        x: Tensor,
        w_in: Tensor,
        w_out: Tensor,
        weights: Tensor,
        ids: Tensor,
        base: Tensor | None = None,
        shared: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor: ...


class Sample(Protocol):
    def __call__(self, logits: Tensor, s: SamplingTensors) -> SampleOutput: ...


class CopyBlocks(Protocol):
    def __call__(self, kv_layers: Sequence[Tensor], src: Tensor, dst: Tensor) -> None: ...


class GatherKv(Protocol):
    def __call__(
        self, kv_layers: Sequence[Tensor], block_ids: Tensor | Sequence[int], first: int, count: int
    ) -> Tensor: ...


class ScatterKv(Protocol):
    def __call__(
        self, packed: Tensor, kv_layers: Sequence[Tensor], block_ids: Tensor | Sequence[int], first: int
    ) -> None: ...


class CopyState(Protocol):
    def __call__(self, ssm: Tensor, conv: Tensor, src: Tensor, dst: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class Ops:
    """One bound implementation per op."""

    linear: Linear
    gated_linear: GatedLinear
    embedding: Embedding
    rms_norm: RmsNorm
    add_rms_norm: AddRmsNorm
    rotary: Rotary
    kv_append: KvAppend
    rope_append: RopeAppend
    rope_attention: RopeAttention
    paged_attention: PagedAttention
    silu_and_mul: SiluAndMul
    logits: Logits
    causal_conv1d: CausalConv1d
    ssd_scan: SsdScan
    state_update: StateUpdate
    gated_rms_norm: GatedRmsNorm
    route: Route
    experts: Experts
    sample: Sample
    copy_blocks: CopyBlocks
    gather_kv: GatherKv
    scatter_kv: ScatterKv
    copy_state: CopyState

    @classmethod
    def bind(
        cls,
        device: torch.device | str,
        dtype: torch.dtype | str,
        overrides: Mapping[str, str] | None = None,
        registry: Registry | None = None,
    ) -> Ops:
        """Resolve every op for a device and the model's dtype; `overrides` maps op names to forced backends.

        Raises ValueError for an override of an unknown op and BackendUnavailable when a backend cannot run.
        """
        table = registry or Registry.default()
        forced = table.checked(overrides)
        bound = {op: table.resolve(op, device, dtype, forced.get(op)) for op in OP_NAMES}
        for op in PARTS:
            if table.is_composed(op, device, dtype, forced):
                bound[op] = composed(op, bound)
        return cls(**bound)
