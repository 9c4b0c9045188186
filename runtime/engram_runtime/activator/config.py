"""Start-up configuration of an activator, validated once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from engram_runtime.server.admin_auth import AdminAccounts

_LABEL = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class ActivatorConfig:
    """Times in seconds, sizes in bytes. ValueError names the field. Port 0 asks the system for a free one."""

    upstream: str = "http://{name}-pods.{namespace}.svc:8000"
    namespace: str = ""
    host: str = "127.0.0.1"
    port: int = 8000
    admin_port: int = 8001
    admin_accounts: AdminAccounts | None = None
    """Who may ask what waits; None: callers on this machine."""
    max_waiting: int = 1024
    """Requests held at once, of all models."""
    max_held_bytes: int = 64 << 20
    """Of their bodies, as far as they have come in."""
    deadline: float = 300.0
    poll_seconds: float = 0.25
    drain_timeout: float = 30.0

    def __post_init__(self) -> None:
        for name in ("port", "admin_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ValueError(f"{name} must be between 0 and 65535, got {getattr(self, name)}")
        for name in ("max_waiting", "max_held_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("deadline", "poll_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")
        if not self.drain_timeout >= 0:
            raise ValueError(f"drain_timeout must be >= 0, got {self.drain_timeout}")
        if self.namespace and _LABEL.fullmatch(self.namespace) is None:
            raise ValueError(f"namespace must be a DNS label, got {self.namespace[:80]!r}")
        if "{name}" not in self.upstream:
            raise ValueError("upstream must hold {name}, the model's")
        if "{namespace}" in self.upstream and not self.namespace:
            raise ValueError("namespace is needed, because upstream holds {namespace}")
        try:
            parts = urlsplit(self.upstream_of("model"))
            _ = parts.port
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(f"upstream must be http://HOST[:PORT] with {{name}} and {{namespace}}: {error}") from error
        if parts.scheme != "http" or not parts.hostname or parts.path or parts.query or parts.username is not None:
            raise ValueError(f"upstream must be http://HOST[:PORT], got {self.upstream[:200]!r}")

    def upstream_of(self, name: str) -> str:
        """Base URL of a model's pods."""
        return self.upstream.format(name=name, namespace=self.namespace)


def model_of(host: str) -> str | None:
    """The first label of a Host header, which is the name of the model's Service; None for what is none."""
    label = host.strip().lower().partition(":")[0].partition(".")[0]
    # A number is an address's first byte: Services begin with a letter.
    return label if _LABEL.fullmatch(label) and label[0].isalpha() else None
