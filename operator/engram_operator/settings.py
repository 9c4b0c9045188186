"""The one place of this package that reads environment variables."""

from __future__ import annotations

import enum
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """What the local mode takes from its surroundings.

    `state_dir` is $XDG_STATE_HOME/engram. `inherited` is the environment that local processes start from, as a
    container starts from its image's.
    """

    state_dir: Path
    inherited: Mapping[str, str]

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> LocalSettings:
        """ValueError when XDG_STATE_HOME is relative, which the XDG specification forbids."""
        environ = os.environ if environ is None else environ
        home = environ.get("XDG_STATE_HOME") or str(Path(environ.get("HOME") or Path.home()) / ".local" / "state")
        if not Path(home).is_absolute():
            raise ValueError(f"XDG_STATE_HOME must be an absolute path, got {home!r}")
        return cls(Path(home) / "engram", dict(environ))


class RollPolicy(enum.Enum):
    """When a change of what the operator renders, and not of a model's spec, may restart the model's pods."""

    ON_SPEC_CHANGE = "OnSpecChange"
    AUTOMATIC = "Automatic"


@dataclass(frozen=True, slots=True)
class OperatorSettings:
    """The installation's choices, as the chart hands them to the operator's container.

    `image` is the engine's, for models that name none. `watch_namespaces` empty: the whole cluster. Durations in
    seconds. `identity` tells one replica from another; `admin_token_file` holds the token that engines take.
    """

    image: str
    identity: str
    operator_namespace: str = "engram-system"
    service_account: str = "engram"
    watch_namespaces: tuple[str, ...] = ()
    image_pull_secrets: tuple[str, ...] = ()
    roll_policy: RollPolicy = RollPolicy.ON_SPEC_CHANGE
    resync_s: float = 300.0
    workers: int = 8
    lease_name: str = "engram"
    lease_duration_s: float = 15.0
    lease_renew_s: float = 10.0
    lease_retry_s: float = 2.0
    metrics_port: int = 8080
    log_level: str = "INFO"
    admin_token_file: Path = Path("/var/run/secrets/engram.dev/token")
    issuer_url: str = "https://kubernetes.default.svc"

    @property
    def lease_namespace(self) -> str:
        """Where the lease lies: in the operator's namespace, or where that is not watched, in the first that is.

        The lease must be among what is watched, because the watch of it proves that watches are alive.
        """
        if not self.watch_namespaces or self.operator_namespace in self.watch_namespaces:
            return self.operator_namespace
        return self.watch_namespaces[0]

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> OperatorSettings:
        """ValueError names the variable that is missing or makes no sense."""
        environ = os.environ if environ is None else environ
        image = environ.get("ENGRAM_IMAGE", "")
        if not image:
            raise ValueError("ENGRAM_IMAGE is required: the engine image of models that name none")
        fields: dict[str, Any] = {}
        for name, variable in (
            ("operator_namespace", "POD_NAMESPACE"),
            ("service_account", "POD_SERVICE_ACCOUNT"),
            ("lease_name", "ENGRAM_LEASE_NAME"),
            ("issuer_url", "ENGRAM_TOKEN_ISSUER"),
        ):
            if value := environ.get(variable):
                fields[name] = value
        for name, variable in (
            ("resync_s", "ENGRAM_RESYNC_SECONDS"),
            ("lease_duration_s", "ENGRAM_LEASE_DURATION_SECONDS"),
            ("lease_renew_s", "ENGRAM_LEASE_RENEW_SECONDS"),
            ("lease_retry_s", "ENGRAM_LEASE_RETRY_SECONDS"),
        ):
            if value := environ.get(variable):
                fields[name] = _positive(variable, value)
        for name, variable, most in (
            ("metrics_port", "ENGRAM_METRICS_PORT", 65535),
            ("workers", "ENGRAM_WORKERS", 256),
        ):
            if value := environ.get(variable):
                number = _positive(variable, value)
                if number != int(number) or number > most:
                    raise ValueError(f"{variable} must be a whole number up to {most}, got {value!r}")
                fields[name] = int(number)
        for name, variable in (
            ("watch_namespaces", "ENGRAM_WATCH_NAMESPACES"),
            ("image_pull_secrets", "ENGRAM_IMAGE_PULL_SECRETS"),
        ):
            fields[name] = tuple(part.strip() for part in environ.get(variable, "").split(",") if part.strip())
        if value := environ.get("ENGRAM_ADMIN_TOKEN_FILE"):
            fields["admin_token_file"] = Path(value)
        if value := environ.get("ENGRAM_ROLL_MODELS"):
            if value not in {policy.value for policy in RollPolicy}:
                raise ValueError(f"ENGRAM_ROLL_MODELS must be OnSpecChange or Automatic, got {value!r}")
            fields["roll_policy"] = RollPolicy(value)
        if value := environ.get("ENGRAM_LOG_LEVEL"):
            if value.upper() not in LOG_LEVELS:
                raise ValueError(f"ENGRAM_LOG_LEVEL must be one of {', '.join(LOG_LEVELS).lower()}, got {value!r}")
            fields["log_level"] = value.upper()
        settings = cls(image=image, identity=environ.get("POD_NAME") or socket.gethostname(), **fields)
        if not settings.lease_retry_s < settings.lease_renew_s < settings.lease_duration_s:
            raise ValueError(
                "ENGRAM_LEASE_RETRY_SECONDS < ENGRAM_LEASE_RENEW_SECONDS < ENGRAM_LEASE_DURATION_SECONDS must hold, got"
                f" {settings.lease_retry_s:g}, {settings.lease_renew_s:g}, {settings.lease_duration_s:g}"
            )
        return settings


def _positive(variable: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0.0 < number < float("inf"):
        raise ValueError(f"{variable} must be a number above 0, got {value!r}")
    return number
