"""What a loaded model is, for those who place, size and describe it."""

from __future__ import annotations

from dataclasses import dataclass, field

from engram_runtime.engine.startup import StartUp


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes in bytes. `weights_digest` and `state_abi` are None where snapshots are off: nobody computed them."""

    architecture: str = ""
    dtype: str = ""
    weights_digest: str | None = None
    weight_bytes: int = 0
    """Of the checkpoint's files."""
    state_abi: str | None = None
    state_bytes: int = 0
    """Recurrent state of one sequence; 0 for a dense model."""
    kv_bytes_per_token: int = 0
    start: StartUp = field(default_factory=StartUp, compare=False)
    """When the parts of loading were over, since the process began."""
