"""The words of the registry: an implementation, the place it should run, and the choice that was made.

Nothing here needs torch. A probe answers with a reason rather than a bool, so that a refusal can always be explained.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Implementation = Callable[..., Any]


class BackendUnavailable(ValueError):
    """A backend was asked for by name and cannot run; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Place:
    """A device kind and the dtype of the model on it."""

    device: str
    """"cpu", "cuda", ..."""
    dtype: str
    """"float32", "bfloat16", ..."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability, for example (9, 0)."""

    @classmethod
    def of(cls, device: torch.device | str, dtype: torch.dtype | str) -> Place:
        """Describe a torch device and dtype, or their names; asks the driver only about a CUDA device."""
        kind = str(device).partition(":")[0]
        capability: tuple[int, int] | None = None
        if kind == "cuda":
            capability = importlib.import_module("torch").cuda.get_device_capability(device)
        return cls(kind, str(dtype).removeprefix("torch."), capability)


Probe = Callable[[Place], str | None]
"""Why an implementation cannot run at a place; None when it can."""


def anywhere(place: Place) -> str | None:
    """The probe of the references: plain torch runs wherever torch does."""
    return None


def cuda_capability(major: int, minor: int = 0, *, dtypes: tuple[str, ...] = ("bfloat16", "float16")) -> Probe:
    """A probe for Triton kernels: a CUDA device of at least this capability, one of these dtypes, triton installed."""

    def probe(place: Place) -> str | None:
        if place.device != "cuda" or place.capability is None:
            return f"needs a CUDA device, this is {place.device}"
        if place.capability < (major, minor):
            return f"needs compute capability {major}.{minor}, this is {place.capability[0]}.{place.capability[1]}"
        if place.dtype not in dtypes:
            return f"needs dtype {' or '.join(dtypes)}, this is {place.dtype}"
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        return None

    return probe


@dataclass(frozen=True, slots=True)
class OpSpec:
    """One implementation of one op. The target is "module:function", imported only when it is chosen."""

    op: str
    backend: str
    target: str | Implementation
    probe: Probe = anywhere
    priority: int = 0
    """The runnable implementation with the highest priority is taken; references have 0."""

    def load(self) -> Implementation:
        """Import the target. Raises BackendUnavailable when that fails."""
        if not isinstance(self.target, str):
            return self.target
        module, _, name = self.target.partition(":")
        try:
            loaded: Implementation = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise BackendUnavailable(f"{self.op}={self.backend}: cannot load {self.target}: {error}") from error
        return loaded


@dataclass(frozen=True, slots=True)
class Choice:
    """Which backend serves an op, and why."""

    op: str
    backend: str
    why: str
