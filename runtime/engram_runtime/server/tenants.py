"""Who is calling: API keys map to tenants, and tenants never share state.

Keys lie in a folder (a mounted Secret): the file's name is the tenant, each line one key, so keys rotate while the
tenant, and with it everything it owns, stays. The folder is read again when it changes. `admin` is reserved. A key
followed by the word `delegate` (a proxy's) may name the tenant it acts for in `x-engram-tenant`.
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engram_runtime.server.errors import ApiError, invalid
from engram_runtime.snapshots.policy.ids import check_tenant

ADMIN = "admin"
ANYONE = "default"
log = logging.getLogger("engram.server")


@dataclass(frozen=True, slots=True)
class Principal:
    """`remembers` is False where callers cannot be told apart: no listing, no restore_from, no delta."""

    tenant: str
    admin: bool = False
    delegate: bool = False
    remembers: bool = True

    def require_memory(self, what: str) -> None:
        if not self.remembers:
            raise ApiError(
                403,
                f"{what} is not available beyond loopback on a server without API keys: everyone would be one tenant. "
                "Send the full history, or start the server with --api-keys-dir",
                param=what,
                code="keys_required",
            )


class Tenants:
    """The key folder, kept current. Without a folder everyone is the tenant `default`."""

    def __init__(self, folder: Path | None, *, recheck_seconds: float = 1.0) -> None:
        self._folder = folder
        self._recheck = recheck_seconds
        self._checked = -recheck_seconds
        self._seen: object = None
        self._keys: dict[bytes, Principal] = {}

    @property
    def has_keys(self) -> bool:
        """Whether there is a folder of keys at all."""
        return self._folder is not None

    def identify(self, headers: Mapping[str, str], client_host: str | None) -> Principal:
        """ApiError 401 without a valid key, 403 for a tenant the key may not name."""
        named = headers.get("x-engram-tenant")
        if self._folder is None:
            if named is not None:
                raise ApiError(403, "x-engram-tenant needs a delegate key", param="x-engram-tenant")
            return Principal(ANYONE, remembers=is_loopback(client_host))
        self._refresh()
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise ApiError(401, "an API key is required: Authorization: Bearer KEY", code="missing_api_key")
        # Looked up by digest, so the time it takes says nothing about the keys.
        principal = self._keys.get(_digest(key.strip()))
        if principal is None:
            raise ApiError(401, "this API key is not known", code="invalid_api_key")
        if named is None:
            return principal
        if not (principal.delegate or principal.admin):
            raise ApiError(403, "x-engram-tenant needs a delegate key", param="x-engram-tenant")
        try:
            tenant = check_tenant(named)
        except ValueError as error:
            raise invalid("x-engram-tenant", f"x-engram-tenant: {error}") from error
        return Principal(tenant, admin=principal.admin, delegate=True)

    def identify_admin(self, headers: Mapping[str, str], client_host: str | None) -> Principal:
        """As `identify`, for the admin port: an admin key; without keys, callers on this machine only."""
        if self._folder is None:
            if not is_loopback(client_host):
                raise ApiError(403, "without API keys the admin port answers callers on this machine only")
            return Principal(headers.get("x-engram-tenant", ANYONE), admin=True, delegate=True)
        principal = self.identify(headers, client_host)
        if not principal.admin:
            raise ApiError(403, "the admin port needs an admin key")
        return principal if "x-engram-tenant" in headers else Principal(ANYONE, admin=True, delegate=True)

    def _refresh(self) -> None:
        now = time.monotonic()
        if now - self._checked < self._recheck or self._folder is None:
            return
        self._checked = now
        try:
            files = sorted(path for path in self._folder.iterdir() if not path.name.startswith(".") and path.is_file())
            seen = [(path.name, os.stat(path).st_mtime_ns, os.stat(path).st_size) for path in files]
            if seen != self._seen:
                self._keys = _read(files)
                self._seen = seen
        except (OSError, UnicodeDecodeError) as error:
            # A Secret in the middle of an update: the last good set stays in force.
            log.warning("API keys in %s could not be read (%s): the previous ones stay valid", self._folder, error)


def _read(files: list[Path]) -> dict[bytes, Principal]:
    keys: dict[bytes, Principal] = {}
    owners: dict[bytes, set[str]] = {}
    for path in files:
        try:
            tenant = check_tenant(path.name)
        except ValueError as error:
            log.warning("key file %r ignored: %s", path.name, error)
            continue
        for line in path.read_text(encoding="utf-8").splitlines():
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) > 2 or (len(words) == 2 and words[1] != "delegate"):
                log.warning("a line of key file %r ignored: expected KEY or KEY delegate", path.name)
                continue
            digest = _digest(words[0])
            owners.setdefault(digest, set()).add(tenant)
            keys[digest] = Principal(tenant, admin=tenant == ADMIN, delegate=len(words) == 2)
    for digest, tenants in owners.items():
        if len(tenants) > 1:
            log.warning("a key stands in the files of %s: it opens none of them", ", ".join(sorted(tenants)))
            del keys[digest]
    return keys


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def is_loopback(host: str | None) -> bool:
    try:
        address = ipaddress.ip_address(host or "")
    except ValueError:
        return False
    # A dual-stack socket shows IPv4 callers as ::ffff:127.0.0.1.
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
