"""Start-up configuration of the HTTP server, validated once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engram_runtime.server.admin_auth import AdminAccounts


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Times in seconds, sizes in bytes. Port 0 asks the system for a free one."""

    served_model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    admin_host: str | None = None
    """None: the same as host."""
    admin_port: int = 8001
    api_keys_dir: Path | None = None
    admin_accounts: AdminAccounts | None = None
    """Service accounts that administer this server besides the holders of admin keys."""
    max_num_seqs: int = 64
    """Sequences the engine runs at once; what is admitted beyond them waits."""
    max_queue: int = 256
    max_body_bytes: int = 32 << 20
    body_timeout: float = 60.0
    drain_timeout: float = 30.0
    render_timeout: float = 30.0
    render_workers: int = 2
    recent_bytes: int = 64 << 20
    """Memory for the message lists of recent turns, from which delta requests continue."""
    save_turn_end: bool = True
    """False: turns stay in host memory until idle, drain or a save call makes them durable."""
    save_idle_seconds: float = 0.0
    save_min_interval_seconds: float = 0.0
    save_on_drain: bool = True

    def __post_init__(self) -> None:
        if not self.served_model_name.strip():
            raise ValueError("served_model_name must not be empty")
        for name in ("port", "admin_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ValueError(f"{name} must be between 0 and 65535, got {getattr(self, name)}")
        if self.port and self.port == self.admin_port:
            raise ValueError(f"admin_port must differ from port, got {self.port} for both")
        for name in ("max_num_seqs", "render_workers", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("max_queue", "drain_timeout", "recent_bytes", "save_idle_seconds", "save_min_interval_seconds"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        for name in ("body_timeout", "render_timeout"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")
        if self.api_keys_dir is not None and not self.api_keys_dir.is_dir():
            raise ValueError(f"api_keys_dir must be a folder, got {self.api_keys_dir}")
