"""The one place of this package that reads environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


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
