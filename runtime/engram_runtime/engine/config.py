"""Engine configuration: validated before anything is loaded, immutable afterwards.

An option that this backend cannot honour is a ValueError here, never a warning later. Values that depend on the model
(window, pool sizes) stay None until the executor has seen it and are reported in `EngineStats`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engram_runtime.executor.plan import MOST_STEPS_TOGETHER
from engram_runtime.models.spec import STATE_DTYPES

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes are in tokens, slots or bytes as the name says; None means: derived from the model and the memory."""

    model: str
    tokenizer: str | None = None
    dtype: str = "auto"
    state_dtype: str = "float32"
    """Of recurrent (ssm) states, in memory and in snapshots. Models without state take the default only."""
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    kv_cache_tokens: int | None = None
    state_slots: int | None = None
    """Running recurrent states; None: max_num_seqs. Ignored by models without state."""
    checkpoint_slots: int | None = None
    """Recurrent states kept at boundaries; None: a share of the memory budget."""
    swap_bytes: int = 1 << 30
    """Host memory for preempted requests; 0: always recompute."""
    op_overrides: Mapping[str, str] = field(default_factory=dict)
    seed: int | None = None
    """Makes requests without a seed reproducible run to run; None: drawn from the system."""
    turn_end_grace_seconds: float = 0.3
    """How long a durable save of turn_end waits for a next_history of the same turn to replace it."""
    restore_timeout_seconds: float = 10.0
    """The least that a restore gets, however little it saves; a long prefix gets as long as prefilling it takes."""
    refuse_slow_restores: bool = False
    """Prefill instead where the measured rates say that a restore would take longer."""
    progress: bool = True
    gpu_memory_utilization: float | None = None
    """Share of the card that weights, steps and caches take together; None: 0.9. Refused on a CPU."""
    use_cuda_graph: bool | None = None
    """Record decode steps; None: where the ops allow it."""
    decode_steps_per_launch: int = 1
    """Decode steps launched as one while nobody waits; a request that comes meanwhile waits for all of them."""
    tensor_parallel_size: int = 1
    quantization: str | None = None

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("model must be the path of a checkpoint folder, got an empty string")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.state_dtype not in STATE_DTYPES:
            raise ValueError(f"state_dtype must be one of {', '.join(STATE_DTYPES)}, got {self.state_dtype!r}")
        if self.device not in DEVICES:
            raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {self.device!r}")
        for name, low in (("max_model_len", 2), ("kv_cache_tokens", 16), ("state_slots", 1), ("checkpoint_slots", 1)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise ValueError(f"{name} must be >= {low}, got {value}")
        if not 1 <= self.decode_steps_per_launch <= MOST_STEPS_TOGETHER:
            raise ValueError(
                f"decode_steps_per_launch must be 1 to {MOST_STEPS_TOGETHER}, got {self.decode_steps_per_launch}"
            )
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be >= 1, got {self.max_num_seqs}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens must be >= max_num_seqs ({self.max_num_seqs}) so that every running "
                f"sequence can decode in one step, got {self.max_num_batched_tokens}"
            )
        for name in ("swap_bytes", "turn_end_grace_seconds"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        if self.restore_timeout_seconds <= 0:
            raise ValueError(f"restore_timeout_seconds must be > 0, got {self.restore_timeout_seconds}")
        if self.state_slots is not None and self.state_slots < self.max_num_seqs:
            raise ValueError(f"state_slots must be >= max_num_seqs ({self.max_num_seqs}), got {self.state_slots}")
        self._refuse_what_is_not_built()

    def check_steps_together(self, most: int) -> None:
        """ValueError when no more than `most` decode steps can be launched as one, and more are asked for."""
        if self.decode_steps_per_launch > max(1, most):
            raise ValueError(
                f"decode_steps_per_launch={self.decode_steps_per_launch} cannot be honoured: it takes recorded steps "
                "on a GPU and a model without recurrent state"
            )

    def _refuse_what_is_not_built(self) -> None:
        if self.device == "cpu" and self.use_cuda_graph:
            raise ValueError("use_cuda_graph=True cannot be honoured: there are no CUDA graphs on a CPU")
        if self.device == "cpu" or self.use_cuda_graph is False:
            self.check_steps_together(1)
        if self.device == "cpu" and self.gpu_memory_utilization is not None:
            raise ValueError(f"gpu_memory_utilization is for GPUs, device is cpu; got {self.gpu_memory_utilization}")
        if self.tensor_parallel_size != 1:
            raise ValueError(
                f"tensor_parallel_size must be 1 on this backend (one process), got {self.tensor_parallel_size}"
            )
        if self.quantization is not None:
            raise ValueError(f"quantization is not available on this backend, got {self.quantization!r}")
