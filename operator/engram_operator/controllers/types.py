"""What controllers are to the wiring above them, and what they need from it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Protocol

from engram_operator.builders import BuildSettings
from engram_operator.kube.kinds import Kind
from engram_operator.settings import OperatorSettings

Clock = Callable[[], datetime]
# Look at another object soon: kind, namespace, name.
Enqueue = Callable[[Kind, str, str], None]


class Controller(Protocol):
    """Brings one object of a kind to what it should be, from what is now. Safe to call at any time."""

    @property
    def kind(self) -> Kind: ...

    async def reconcile(self, namespace: str, name: str) -> float | None:
        """Seconds after which to look again; None: the next event or resync is soon enough."""
        ...


def build_settings(settings: OperatorSettings) -> BuildSettings:
    """What the builders need of the installation's choices."""
    return BuildSettings(
        image=settings.image,
        operator_namespace=settings.operator_namespace,
        operator_account=settings.service_account,
        issuer_url=settings.issuer_url,
        image_pull_secrets=settings.image_pull_secrets,
    )
