"""Ops of Engram: one torch reference each, faster implementations behind the same registry.

Importing this package imports neither torch nor triton: a command line that only prints help must start at once, and a
machine without a GPU must be able to list what it could run. Implementations are loaded when `Ops.bind` resolves them.
"""

from engram_kernels.metadata import PAGE, SampleOutput, SamplingTensors, StepMetadata
from engram_kernels.ops import Ops
from engram_kernels.registry import BackendUnavailable, Choice, OpSpec, Registry

__all__ = [
    "PAGE",
    "BackendUnavailable",
    "Choice",
    "OpSpec",
    "Ops",
    "Registry",
    "SampleOutput",
    "SamplingTensors",
    "StepMetadata",
]
