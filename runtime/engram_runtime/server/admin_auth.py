"""Who may use the admin port: an admin key, or a named service account of the cluster.

An account's token is checked against the cluster's key set: signature, audience, issuer, times, and that the account is
one of those named at start. The key set is read with the pod's own projected token, a right that every account has, so
an engine needs no other.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import jwt

from engram_runtime.server.errors import ApiError, invalid
from engram_runtime.server.tenants import ANYONE, Principal, Tenants
from engram_runtime.snapshots.policy.ids import check_tenant

log = logging.getLogger("engram.server")

ALGORITHMS = ("RS256", "ES256")
LEEWAY_SECONDS = 30.0
READ_AGAIN_SECONDS = 10.0  # an unknown key id may be a rotation, or somebody's invention
OLDEST_KEYS_SECONDS = 3600.0  # a key that the cluster has withdrawn must stop counting
READ_TIMEOUT_SECONDS = 5.0
MAX_KEY_SET_BYTES = 1 << 20
MAX_TOKEN_CHARACTERS = 16 << 10
KEYS_PATH = "/openid/v1/jwks"
DISCOVERY_PATH = "/.well-known/openid-configuration"
ACCEPT = "application/jwk-set+json, application/json"  # for one of them alone the API server answers 406


@dataclass(frozen=True, slots=True)
class AdminAccounts:
    """Accounts that administer this server, and the cluster that vouches for them. ValueError names the field.

    `issuer_url` is where the key set is read. The issuer that tokens must name is the one that the discovery document
    there states (clusters have various), else `issuer_url` itself.
    """

    audience: str
    subjects: frozenset[str]
    issuer_url: str
    jwks_token_file: Path | None = None
    jwks_ca_file: Path | None = None

    def __post_init__(self) -> None:
        if not self.audience:
            raise ValueError("admin_audience must not be empty")
        if not self.subjects or not all(self.subjects):
            raise ValueError("admin_subject must name at least one account, such as system:serviceaccount:NS:NAME")
        parts = urlsplit(self.issuer_url)
        if parts.username is not None or parts.query or parts.fragment:
            raise ValueError("admin_issuer_url must have neither a user, nor a query or fragment")
        # Plain HTTP would let anybody on the way name the keys; to this machine nobody is on the way.
        wanted = ("http", "https") if parts.hostname in ("127.0.0.1", "::1", "localhost") else ("https",)
        if not parts.hostname or parts.scheme not in wanted:
            raise ValueError(f"admin_issuer_url must be https://HOST[:PORT], got {self.issuer_url!r}")
        for name in ("jwks_token_file", "jwks_ca_file"):
            path = getattr(self, name)
            if path is not None and not path.is_file():
                raise ValueError(f"admin_{name} must be a file, got {path}")


class KeySet:
    """The cluster's public keys, read when they are first needed. For one event loop."""

    def __init__(self, accounts: AdminAccounts) -> None:
        self._accounts = accounts
        self._lock = asyncio.Lock()
        self._keys: dict[str, jwt.PyJWK] = {}
        self._issuer = accounts.issuer_url.rstrip("/")
        self._read_at = -float("inf")
        self._tried_at = -float("inf")
        self._trouble = ""

    async def find(self, key_id: str) -> tuple[jwt.PyJWK, str]:
        """(key, issuer). ApiError 401 for an unknown key, 503 when no key set could be read."""
        await self._refresh(key_id)
        key = self._keys.get(key_id)
        if key is not None:
            return key, self._issuer
        if not self._keys:
            raise ApiError(503, f"the cluster's key set cannot be read: {self._trouble}", code="keys", retry_after=5)
        raise ApiError(401, "the token is signed by a key that the cluster does not have", code="invalid_token")

    async def _refresh(self, key_id: str) -> None:
        async with self._lock:
            now = time.monotonic()
            if key_id in self._keys and now - self._read_at < OLDEST_KEYS_SECONDS:
                return
            if now - self._tried_at < READ_AGAIN_SECONDS:
                return
            self._tried_at = now
            try:
                self._keys, self._issuer = await self._read()
                self._read_at, self._trouble = now, ""
            except (httpx.HTTPError, OSError, ssl.SSLError, ValueError, jwt.PyJWTError) as error:
                self._trouble = f"{type(error).__name__}: {error}"
                log.warning("the cluster's key set cannot be read: %s", self._trouble)

    async def _read(self) -> tuple[dict[str, jwt.PyJWK], str]:
        accounts = self._accounts
        headers = {"accept": ACCEPT}
        if accounts.jwks_token_file is not None:  # read each time: the kubelet renews it
            token = accounts.jwks_token_file.read_text(encoding="ascii").strip()
            headers["authorization"] = f"Bearer {token}"
        base = accounts.issuer_url.rstrip("/")
        context: ssl.SSLContext | bool = True
        if accounts.jwks_ca_file is not None:
            context = ssl.create_default_context(cafile=str(accounts.jwks_ca_file))
        # No redirects and no proxy of the environment: the pod's token goes to this one place.
        async with httpx.AsyncClient(
            verify=context, timeout=READ_TIMEOUT_SECONDS, headers=headers, trust_env=False
        ) as client:
            document = await _json(client, base + KEYS_PATH)
            found = {key.key_id: key for key in jwt.PyJWKSet.from_dict(document).keys if key.key_id}
            issuer = base
            try:
                issuer = str((await _json(client, base + DISCOVERY_PATH))["issuer"])
            except (httpx.HTTPStatusError, KeyError):
                log.info("the cluster has no discovery document: tokens must name %s as issuer", base)
        return found, issuer


async def _json(client: httpx.AsyncClient, url: str) -> dict[str, Any]:
    async with client.stream("GET", url) as response:
        response.raise_for_status()
        data = b""
        async for chunk in response.aiter_bytes():
            data += chunk
            if len(data) > MAX_KEY_SET_BYTES:
                raise ValueError(f"{url} answers with more than {MAX_KEY_SET_BYTES} bytes")
    document = json.loads(data)
    if not isinstance(document, dict):
        raise ValueError(f"{url} does not answer with a JSON object")
    return document


class AdminDoor:
    """Names the caller of an admin call, or refuses it."""

    def __init__(self, tenants: Tenants, accounts: AdminAccounts | None) -> None:
        self._tenants = tenants
        self._accounts = accounts
        self._keys = None if accounts is None else KeySet(accounts)

    async def identify(self, headers: Mapping[str, str], client_host: str | None) -> Principal:
        """ApiError 401 without valid credentials, 403 for a caller who is somebody else, 503 without a key set."""
        if self._accounts is None:
            return self._tenants.identify_admin(headers, client_host)
        scheme, _, token = headers.get("authorization", "").partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            raise ApiError(401, "a service account's token or an admin key is required", code="missing_api_key")
        if token.count(".") != 2 or not token.startswith("ey"):
            if not self._tenants.has_keys:
                raise ApiError(401, "this key is not known", code="invalid_api_key")
            return self._tenants.identify_admin(headers, client_host)
        await self._check(token)
        named = headers.get("x-engram-tenant", ANYONE)
        try:
            return Principal(check_tenant(named), admin=True, delegate=True)
        except ValueError as error:
            raise invalid("x-engram-tenant", f"x-engram-tenant: {error}") from error

    async def _check(self, token: str) -> None:
        assert self._keys is not None
        assert self._accounts is not None
        try:
            if len(token) > MAX_TOKEN_CHARACTERS:
                raise jwt.InvalidTokenError(f"it has more than {MAX_TOKEN_CHARACTERS} characters")
            header = jwt.get_unverified_header(token)
            # What is no signature of the two kinds needs no look at the key set.
            if header.get("alg") not in ALGORITHMS or not isinstance(header.get("kid"), str):
                raise jwt.InvalidAlgorithmError(f"it must be signed with {' or '.join(ALGORITHMS)} and name its key")
            key, issuer = await self._keys.find(header["kid"])
            claims = jwt.decode(
                token,
                key,
                algorithms=list(ALGORITHMS),
                audience=self._accounts.audience,
                issuer=issuer,
                leeway=LEEWAY_SECONDS,
                options={"require": ["exp", "iat", "aud", "iss", "sub"]},
            )
        except jwt.PyJWTError as error:
            raise ApiError(401, f"the token is not valid: {error}", code="invalid_token") from error
        if claims["sub"] not in self._accounts.subjects:
            raise ApiError(403, f"{claims['sub']} does not administer this server", code="forbidden")
