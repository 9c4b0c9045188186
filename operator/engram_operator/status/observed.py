"""What a model's status is made of: everything that was read, nothing that was decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, Protocol

from engram_operator.status.pods import Object, Trouble, diagnose, is_ready, ordinal

# Serving: pods are wanted. Suspended: by the user, or zero replicas. Asleep: none until the next request.
Mode = Literal["Serving", "Suspended", "Asleep", "Deleting"]
Snapshots = Literal["Disabled", "LocalOnly", "Store"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the spec as it stands is not in force: the reason and message of Accepted=False."""

    reason: str
    message: str


class StoreReport(Protocol):
    @property
    def reachable(self) -> bool: ...
    @property
    def reason(self) -> str: ...
    @property
    def message(self) -> str: ...


class CountsReport(Protocol):
    """Times in Unix seconds; None: not known, or it never happened."""

    @property
    def count(self) -> int | None: ...
    @property
    def total_bytes(self) -> int | None: ...
    @property
    def last_success_time(self) -> float | None: ...
    @property
    def last_failure_time(self) -> float | None: ...
    @property
    def last_error(self) -> str | None: ...


class Report(Protocol):
    """What an engine says about itself."""

    @property
    def state_abi(self) -> str | None: ...
    @property
    def model_digest(self) -> str | None: ...
    @property
    def architecture(self) -> str | None: ...
    @property
    def weight_bytes(self) -> int | None: ...
    @property
    def state_bytes(self) -> int | None: ...
    @property
    def store(self) -> StoreReport | None: ...
    @property
    def snapshots(self) -> CountsReport | None: ...


@dataclass(frozen=True, slots=True)
class Observed:
    """One look at the cluster.

    `wanted`: pods that should run now. `warnings`: notes of Warning events by (kind, name), newest last. `engines`:
    the answers, by pod; a pod that did not answer is not in it. `since`: when the pods' template was last changed.
    `pending`: what an operator upgrade would change in running pods and does not. `notice`: more for Accepted's
    message when it is True. Tuples of pods in any order.
    """

    model: Object
    mode: Mode
    wanted: int
    served_name: str
    source: str  # the model's URI
    snapshots: Snapshots
    deadline_seconds: int
    refused: Refusal | None = None
    stateful_set: Object | None = None
    pods: tuple[Object, ...] = ()
    warnings: Mapping[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    engines: Mapping[str, Report] = field(default_factory=dict)
    since: datetime | None = None
    pending: str | None = None
    notice: str = ""

    @property
    def namespace(self) -> str:
        return str(self.model["metadata"].get("namespace") or "default")

    @property
    def name(self) -> str:
        return str(self.model["metadata"]["name"])

    @property
    def status(self) -> Object:
        """The status as it was written last."""
        return self.model.get("status") or {}

    def by_ordinal(self) -> list[Object]:
        return sorted(self.pods, key=lambda pod: (ordinal(pod), str(pod["metadata"]["name"])))

    def ready(self) -> list[Object]:
        return [pod for pod in self.by_ordinal() if is_ready(pod)]

    def troubles(self) -> list[Trouble]:
        """One per pod that is not ready, by ordinal."""
        found = []
        for pod in self.by_ordinal():
            name = str(pod["metadata"]["name"])
            notes = list(self.warnings.get(("Pod", name), ()))
            claims = [
                claim for kind, claim in self.warnings if kind == "PersistentVolumeClaim" and claim in _claims(pod)
            ]
            for claim in sorted(claims):
                notes += self.warnings["PersistentVolumeClaim", claim]
            if (trouble := diagnose(pod, notes)) is not None:
                found.append(trouble)
        return found


def _claims(pod: Object) -> set[str]:
    volumes = (pod.get("spec") or {}).get("volumes") or ()
    return {v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v}
