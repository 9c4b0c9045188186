"""Chooses one implementation per op, once, and can say why.

A registry is a value: adding an implementation returns a new registry, so tests and plugins never change what another
part of the process resolves. Resolution happens when a model is built, not per call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engram_kernels.backends import PARTS, SHIPPED
from engram_kernels.spec import BackendUnavailable, Choice, Implementation, OpSpec, Place, Probe, anywhere

if TYPE_CHECKING:
    import torch

__all__ = ["BackendUnavailable", "Choice", "OpSpec", "Place", "Registry"]


@dataclass(frozen=True, slots=True)
class Registry:
    """An immutable table of implementations."""

    specs: tuple[OpSpec, ...]

    @classmethod
    def default(cls) -> Registry:
        """The implementations that ship with this package."""
        return cls(SHIPPED)

    @property
    def ops(self) -> tuple[str, ...]:
        """Names of all ops, in table order."""
        return tuple(dict.fromkeys(spec.op for spec in self.specs))

    def backends(self, op: str) -> tuple[str, ...]:
        """Names of the backends of an op, highest priority first. Raises ValueError for an unknown op."""
        return tuple(spec.backend for spec in self._candidates(op))

    def register(self, spec: OpSpec) -> Registry:
        """A registry with one more implementation. Raises ValueError when op and backend are already taken."""
        if any((old.op, old.backend) == (spec.op, spec.backend) for old in self.specs):
            raise ValueError(f"backend {spec.backend!r} of op {spec.op!r} is already registered")
        return Registry((*self.specs, spec))

    def with_op(
        self, op: str, backend: str, function: Implementation, *, probe: Probe = anywhere, priority: int = 100
    ) -> Registry:
        """A registry with a callable as one more backend; by default it wins over everything that ships."""
        return self.register(OpSpec(op, backend, function, probe, priority))

    def resolve(
        self, op: str, device: torch.device | str, dtype: torch.dtype | str, forced: str | None = None
    ) -> Implementation:
        """The callable that serves `op` at this device and dtype.

        Raises BackendUnavailable when the forced backend (or, without one, every backend) cannot run, with the reason,
        and ValueError for an unknown op.
        """
        spec, _ = self._choose(op, Place.of(device, dtype), forced)
        return spec.load()

    def explain(
        self,
        device: torch.device | str,
        dtype: torch.dtype | str,
        overrides: Mapping[str, str] | None = None,
    ) -> list[Choice]:
        """The choice for every op and its reason, without loading anything. Raises as `resolve` does."""
        place = Place.of(device, dtype)
        forced = self.checked(overrides)
        choices = []
        for op in self.ops:
            if others := self._other_parts(op, place, forced):
                choices.append(Choice(op, "composed", f"of its parts, because of {', '.join(others)}"))
                continue
            spec, why = self._choose(op, place, forced.get(op))
            choices.append(Choice(op, spec.backend, why))
        return choices

    def is_composed(
        self, op: str, device: torch.device | str, dtype: torch.dtype | str, forced: Mapping[str, str]
    ) -> bool:
        """Whether a fused op has to be put together from its parts at this device and dtype."""
        return bool(self._other_parts(op, Place.of(device, dtype), forced))

    def _other_parts(self, op: str, place: Place, forced: Mapping[str, str]) -> list[str]:
        """Parts of a fused op, as "part=backend", that another backend serves than the op; none when it is forced."""
        if op in forced or not all(part in self.ops for part in PARTS.get(op, ())):
            return []
        whole = self._choose(op, place, None)[0].backend
        parts = {part: self._choose(part, place, forced.get(part))[0].backend for part in PARTS.get(op, ())}
        return [f"{part}={backend}" for part, backend in parts.items() if backend != whole]

    def checked(self, overrides: Mapping[str, str] | None) -> Mapping[str, str]:
        """The overrides, or an empty mapping. Raises ValueError when one names an op that does not exist."""
        for op in overrides or {}:
            self._candidates(op)
        return overrides or {}

    def _candidates(self, op: str) -> list[OpSpec]:
        found = [spec for spec in self.specs if spec.op == op]
        if not found:
            raise ValueError(f"op {op!r} does not exist; known ops: {', '.join(self.ops)}")
        return sorted(found, key=lambda spec: -spec.priority)

    def _choose(self, op: str, place: Place, forced: str | None) -> tuple[OpSpec, str]:
        candidates = self._candidates(op)
        if forced is not None:
            for spec in candidates:
                if spec.backend == forced:
                    if reason := spec.probe(place):
                        raise BackendUnavailable(f"{op}={forced} cannot run: {reason}")
                    return spec, "forced"
            known = ", ".join(spec.backend for spec in candidates)
            raise BackendUnavailable(f"{op}={forced} cannot run: no such backend; {op} has: {known}")
        refused: list[str] = []
        for spec in candidates:
            reason = spec.probe(place)
            if reason is None:
                why = f"priority {spec.priority}" if len(candidates) > 1 else "only backend"
                return spec, "; ".join([why, *refused])
            refused.append(f"{spec.backend} cannot run: {reason}")
        raise BackendUnavailable(f"{op}: {'; '.join(refused)}")
