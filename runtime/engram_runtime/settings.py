"""The one place where the runtime reads environment variables.

Everything else takes values as arguments, so a test or an embedding application can run two differently configured
runtimes in one process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Settings:
    """`state_dir` and `cache_dir` follow the XDG base directories; the rest are defaults of client commands."""

    state_dir: Path
    cache_dir: Path
    base_url: str | None = None
    """ENGRAM_BASE_URL: server that `engram chat` and `engram snapshots` talk to."""
    api_key: str | None = None
    """ENGRAM_API_KEY: key they send."""
    pod_namespace: str | None = None
    """POD_NAMESPACE: where `engram activator` runs, as the operator sets it."""
    hf_endpoint: str | None = None
    """HF_ENDPOINT: the model hub, or a mirror of it, that `engram fetch` asks."""
    hf_token: str | None = field(default=None, repr=False)
    """HF_TOKEN: what it shows there."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Settings:
        env = os.environ if environ is None else environ
        return cls(
            state_dir=_xdg(env, "XDG_STATE_HOME", ".local/state") / "engram",
            cache_dir=_xdg(env, "XDG_CACHE_HOME", ".cache") / "engram",
            base_url=env.get("ENGRAM_BASE_URL") or None,
            api_key=env.get("ENGRAM_API_KEY") or None,
            pod_namespace=env.get("POD_NAMESPACE") or None,
            hf_endpoint=env.get("HF_ENDPOINT") or None,
            hf_token=env.get("HF_TOKEN") or None,
        )


def _xdg(env: Mapping[str, str], name: str, fallback: str) -> Path:
    value = env.get(name, "")
    # The XDG specification says that a relative path is to be ignored.
    if value and Path(value).is_absolute():
        return Path(value)
    home = env.get("HOME", "")
    return (Path(home) if home else Path.home()) / fallback
