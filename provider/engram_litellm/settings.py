"""Every environment variable of the provider, read in this one place.

LiteLLM users set variables at any time before a call, also after `import engram_litellm`, so settings are read per
call (about 10 us) instead of once at import; a `Settings` value is frozen and hashable, which lets the provider keep
its discovery and tracker exactly as long as the settings that made them stay the same.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MODES = ("auto", "stateless", "explicit")
PROXY_TENANTS = ("off", "key", "team", "user")
DISCOVERIES = ("auto", "service", "off")
SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment says. Times are seconds, sizes are bytes."""

    api_base: str | None = None  # ENGRAM_API_BASE, else ENGRAM_BASE_URL
    endpoints: tuple[str, ...] = ()  # ENGRAM_ENDPOINTS: "url" or "name=url", comma separated
    api_key: str | None = None  # ENGRAM_API_KEY
    mode: str = "auto"  # ENGRAM_STATEFUL_MODE
    auto_save: bool = True  # ENGRAM_AUTO_SAVE
    tracker_redis_url: str | None = None  # ENGRAM_TRACKER_REDIS_URL
    tracker_ttl: float = 86400.0  # ENGRAM_TRACKER_TTL
    discovery: str = "auto"  # ENGRAM_DISCOVERY: "service" for meshes (no pod addresses), "off" for none
    namespace: str | None = None  # ENGRAM_NAMESPACE, else the service account's
    service: str | None = None  # ENGRAM_SERVICE: name of the model's Service when it is not the served name
    cluster_domain: str = "cluster.local"  # ENGRAM_CLUSTER_DOMAIN
    proxy_tenant: str = "off"  # ENGRAM_PROXY_TENANT: what a delegating LiteLLM proxy names as the tenant
    wait: float = 30.0  # ENGRAM_WAIT_SECONDS: how long a call waits when every discovered replica is away
    delta_min_bytes: int = 65536  # ENGRAM_DELTA_MIN_BYTES: shorter histories are always sent in full
    endpoints_file: str = ""  # local mode's list, in $XDG_STATE_HOME
    kubernetes_api: str | None = None  # from KUBERNETES_SERVICE_HOST and _PORT
    service_account: str = SERVICE_ACCOUNT
    ca_file: str | None = None  # SSL_CERT_FILE

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Settings:
        """Read `env` (default: the process environment). ValueError names the variable that is wrong."""
        env = os.environ if env is None else env
        host, port = env.get("KUBERNETES_SERVICE_HOST"), env.get("KUBERNETES_SERVICE_PORT", "443")
        return cls(
            api_base=env.get("ENGRAM_API_BASE") or env.get("ENGRAM_BASE_URL") or None,
            endpoints=tuple(part.strip() for part in env.get("ENGRAM_ENDPOINTS", "").split(",") if part.strip()),
            api_key=env.get("ENGRAM_API_KEY") or None,
            mode=_choice(env, "ENGRAM_STATEFUL_MODE", MODES),
            auto_save=_flag(env, "ENGRAM_AUTO_SAVE", True),
            tracker_redis_url=env.get("ENGRAM_TRACKER_REDIS_URL") or None,
            tracker_ttl=_number(env, "ENGRAM_TRACKER_TTL", 86400.0),
            discovery=_choice(env, "ENGRAM_DISCOVERY", DISCOVERIES),
            namespace=env.get("ENGRAM_NAMESPACE") or None,
            service=env.get("ENGRAM_SERVICE") or None,
            cluster_domain=env.get("ENGRAM_CLUSTER_DOMAIN") or "cluster.local",
            proxy_tenant=_choice(env, "ENGRAM_PROXY_TENANT", PROXY_TENANTS),
            wait=_number(env, "ENGRAM_WAIT_SECONDS", 30.0),
            delta_min_bytes=int(_number(env, "ENGRAM_DELTA_MIN_BYTES", 65536.0)),
            endpoints_file=_endpoints_file(env),
            kubernetes_api=f"https://{_bracketed(host)}:{port}" if host else None,
            service_account=env.get("ENGRAM_SERVICE_ACCOUNT_DIR") or SERVICE_ACCOUNT,
            ca_file=env.get("SSL_CERT_FILE") or None,
        )


def parse_flag(name: str, value: object) -> bool:
    """A boolean from a request field or a variable; ValueError names it."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError(f"{name} must be true or false, got {value!r}")


def parse_mode(name: str, value: object) -> str:
    """One of `MODES`; ValueError names the field."""
    if value not in MODES:
        raise ValueError(f"{name} must be one of {', '.join(MODES)}, got {value!r}")
    return str(value)


def _flag(env: Mapping[str, str], name: str, default: bool) -> bool:
    value = env.get(name)
    return parse_flag(name, value) if value else default


def _choice(env: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str:
    value = env.get(name) or allowed[0]
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
    return value


def _number(env: Mapping[str, str], name: str, default: float) -> float:
    value = env.get(name)
    if not value:
        return default
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise ValueError(f"{name} must be a number >= 0, got {value!r}")
    return number


def _endpoints_file(env: Mapping[str, str]) -> str:
    state = env.get("XDG_STATE_HOME")
    base = Path(state) if state else Path(env.get("HOME") or "/") / ".local" / "state"
    return str(base / "engram" / "endpoints.json")


def _bracketed(host: str) -> str:
    """An IPv6 address needs brackets in a URL."""
    return f"[{host}]" if ":" in host else host
