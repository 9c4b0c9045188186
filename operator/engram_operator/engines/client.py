"""Calls to the admin port of one pod at a time: one deadline over all retries, bounded bodies, typed errors.

Which pod to ask is the caller's affair (pods.py); what an answer means too. A call that changes something is repeated
only when the connection was never made, or when repeating it is harmless by its nature.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import aiohttp

from engram_operator.engines import parse
from engram_operator.engines.errors import (
    EngineAnswerError,
    EngineBusy,
    EngineError,
    EngineInvalid,
    EngineNotFound,
    EngineRefused,
    EngineUnreachable,
    StoreTrouble,
)
from engram_operator.engines.pods import EnginePod
from engram_operator.engines.types import (
    EngineStatus,
    EventPage,
    SaveRequest,
    SnapshotPage,
    StoredSnapshot,
    SweepReport,
    WaitingByModel,
)

ADMIN_PORT = 8001
PAGE = 500  # the most that an engine lists at once
MAX_BODY = 4 << 20  # a page of 500 is about 300 kB
MAX_TOKEN = 16 << 10
CONNECT_S = 1.5
ATTEMPTS = 3
# A pod that does not answer is left alone for a while, or many of them would take all the operator's time.
FIRST_SILENCE_S = 4.0
LAST_SILENCE_S = 120.0
REMEMBERED = 4096
FIRST_DELAY_S = 0.1
LAST_DELAY_S = 2.0

READ_S = 10.0
CHANGE_S = 30.0
SAVE_S = 120.0  # the bytes of one turn to a bucket
SWEEP_S = 300.0  # a listing of the whole store
CONNECTIONS = 64  # of all engines together

STORE_REASON = "x-engram-store-reason"  # of a 503: which trouble the store has

UNSET: Any = object()
Result = TypeVar("Result")


class Engines:
    """One pool for all engines. `token_file`: the operator's projected token, read again for every request, since the
    kubelet rotates it. None: no credentials are sent (engines without keys take it from loopback only).

    Every call raises an EngineError and nothing else. `answered(call, outcome)` is told of each one, for metrics.
    """

    def __init__(
        self,
        token_file: Path | None,
        *,
        port: int = ADMIN_PORT,
        read_s: float = READ_S,
        change_s: float = CHANGE_S,
        save_s: float = SAVE_S,
        sweep_s: float = SWEEP_S,
        connect_s: float = CONNECT_S,
        clock: Callable[[], float] = time.monotonic,
        answered: Callable[[str, str], None] = lambda call, outcome: None,
    ) -> None:
        self._token_file = token_file
        self._port = port
        self._read_s = read_s
        self._change_s = change_s
        self._save_s = save_s
        self._sweep_s = sweep_s
        self._connect_s = connect_s
        self._clock = clock
        self._answered = answered
        self._silent: dict[str, tuple[int, float]] = {}  # by pod uid: failures in a row, not to be asked before
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def status(self, pod: EnginePod) -> EngineStatus:
        return await self._call("status", pod, "GET", "/status", parse.status, self._read_s)

    async def snapshots(self, pod: EnginePod, *, limit: int = PAGE, after: str | None = None) -> SnapshotPage:
        """One page of all tenants' snapshots, newest first; 1 <= limit <= 500."""
        query = {"limit": str(limit)} | ({} if after is None else {"after": after})
        return await self._call(
            "list", pod, "GET", "/snapshots", lambda body: parse.page(body, limit), self._read_s, query=query
        )

    async def events(self, pod: EnginePod, *, after: str | None = None) -> EventPage:
        """Changes since a cursor; without one, whatever the engine remembers and the cursor to go on from."""
        query = {} if after is None else {"after": after}
        return await self._call(
            "events",
            pod,
            "GET",
            "/snapshots/events",
            lambda body: parse.events(body, parse.MAX_EVENTS),
            self._read_s,
            query=query,
        )

    async def snapshot(self, pod: EnginePod, snapshot_id: str) -> StoredSnapshot:
        """EngineNotFound when the engine's store has none of this id for its state_abi."""
        return await self._call("show", pod, "GET", _path(snapshot_id), parse.snapshot, self._read_s)

    async def save(self, pod: EnginePod, request: SaveRequest) -> tuple[StoredSnapshot, ...]:
        """Make the turn durable; answers when it is. All boundaries of the turn. EngineNotFound: no such conversation.

        Sent once: when the answer is lost, look for `request.tag` before asking again.
        """
        return await self._call(
            "save",
            pod,
            "POST",
            "/snapshots",
            lambda body: parse.saved(body, PAGE),
            self._save_s,
            body=request.body(),
            repeatable=False,
        )

    async def change(
        self, pod: EnginePod, snapshot_id: str, *, pinned: bool = UNSET, ttl_seconds: int | None = UNSET
    ) -> StoredSnapshot:
        """Pin or unpin; let it expire in `ttl_seconds`, or never (None). What is not given stays."""
        given = {"pinned": pinned, "ttl_seconds": ttl_seconds}
        body = {name: value for name, value in given.items() if value is not UNSET}
        return await self._call("change", pod, "PATCH", _path(snapshot_id), parse.snapshot, self._change_s, body=body)

    async def delete(self, pod: EnginePod, snapshot_id: str) -> int:
        """Gone in every tier when this returns; the bytes that frees. EngineNotFound: the engine has none."""
        return await self._call("delete", pod, "DELETE", _path(snapshot_id), parse.deleted, self._change_s)

    async def sweep(self, pod: EnginePod) -> SweepReport:
        """Apply retention and collect garbage now."""
        return await self._call("sweep", pod, "POST", "/snapshots/sweep", parse.sweep, self._sweep_s)

    async def drain(self, pod: EnginePod) -> None:
        """Take no new turns from now on; running ones finish."""
        await self._call("drain", pod, "POST", "/drain", lambda body: None, self._change_s)

    async def waiting(self, pod: EnginePod) -> WaitingByModel:
        """What an activator holds, by model."""
        return await self._call("waiting", pod, "GET", "/waiting", parse.waiting, self._read_s)

    async def _call(
        self,
        call: str,
        pod: EnginePod,
        method: str,
        path: str,
        read: Callable[[Any], Result],
        deadline_s: float,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        repeatable: bool = True,
    ) -> Result:
        try:
            self._refuse_silent(pod)
            async with asyncio.timeout(deadline_s):
                result = read(await self._attempts(pod, method, path, query, body, repeatable))
        except TimeoutError:
            if deadline_s <= self._read_s:  # what takes long by its nature says nothing about the pod
                self._note_silence(pod)
            self._answered(call, EngineUnreachable.__name__)
            raise EngineUnreachable(f"pod {pod.name} did not answer {method} in {deadline_s:g} s") from None
        except EngineError as error:
            if isinstance(error.__cause__, aiohttp.ConnectionTimeoutError):
                self._note_silence(pod)
            elif not isinstance(error, EngineUnreachable):
                self._silent.pop(pod.uid, None)
            self._answered(call, type(error).__name__)
            raise
        self._silent.pop(pod.uid, None)
        self._answered(call, "ok")
        return result

    def _refuse_silent(self, pod: EnginePod) -> None:
        _, until = self._silent.get(pod.uid, (0, 0.0))
        if (left := until - self._clock()) > 0:
            raise EngineUnreachable(f"pod {pod.name} did not answer before; it is asked again in {left:.0f} s")

    def _note_silence(self, pod: EnginePod) -> None:
        failures = self._silent.pop(pod.uid, (0, 0.0))[0] + 1
        while len(self._silent) >= REMEMBERED:
            del self._silent[next(iter(self._silent))]
        silence = min(LAST_SILENCE_S, FIRST_SILENCE_S * 2.0 ** min(failures - 1, 10))
        self._silent[pod.uid] = (failures, self._clock() + silence)

    async def _attempts(
        self,
        pod: EnginePod,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Mapping[str, Any] | None,
        repeatable: bool,
    ) -> Any:
        token = self._token()
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await self._once(pod, method, path, query, body, token)
            except EngineRefused:
                # Rotated between reading and use, or an old one: only another token is worth another try.
                fresh = self._token()
                if fresh == token or attempt == ATTEMPTS:
                    raise
                token = fresh
                continue
            except _NoConnection as error:
                # Refused may pass in a moment; packets that vanish will vanish again.
                if attempt == ATTEMPTS or isinstance(error.__cause__, aiohttp.ConnectionTimeoutError):
                    raise EngineUnreachable(error.message) from error.__cause__
                asked = 0.0
            except EngineUnreachable:
                if not repeatable or attempt == ATTEMPTS:
                    raise
                asked = 0.0
            except EngineBusy as error:
                # 409, 429 and 503 come before anything was done, so even a save may be sent again.
                asked = error.retry_after_s or 0.0
                if attempt == ATTEMPTS or asked > LAST_DELAY_S:
                    raise
            delay = min(LAST_DELAY_S, FIRST_DELAY_S * 2.0**attempt)
            await asyncio.sleep(max(asked, random.uniform(delay / 2, delay)))
        raise AssertionError("the last attempt returns or raises")

    async def _once(
        self,
        pod: EnginePod,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Mapping[str, Any] | None,
        token: str | None,
    ) -> Any:
        host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
        headers = {"accept-encoding": "identity"}
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        try:
            async with self._pool().request(
                method,
                f"http://{host}:{self._port}{path}",
                params=dict(query or {}),
                json=None if body is None else dict(body),
                headers=headers,
                allow_redirects=False,  # the token is for this pod
            ) as response:
                payload = await _read(response)
                if response.status == 200:
                    return payload
                raise _failure(response.status, response.headers, payload, pod)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise _NoConnection(f"pod {pod.name} takes no connection on its admin port") from error
        except (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError, ConnectionError, OSError) as error:
            raise EngineUnreachable(f"pod {pod.name} broke the connection off") from error
        except aiohttp.ClientError as error:
            raise EngineAnswerError(f"pod {pod.name} does not speak HTTP: {parse.clean(error, 120)}") from error

    def _pool(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=CONNECTIONS, limit_per_host=4, ttl_dns_cache=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=self._connect_s),
                auto_decompress=False,
                trust_env=False,  # a proxy of the cluster is for the world outside, never for pods
            )
        return self._session

    def _token(self) -> str | None:
        if self._token_file is None:
            return None
        try:
            with self._token_file.open("rb") as file:
                token = file.read(MAX_TOKEN).decode("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise EngineRefused(f"the operator's token cannot be read from {self._token_file}") from error
        if not token or not token.isprintable():
            raise EngineRefused(f"there is no token in {self._token_file}")
        return token


class _NoConnection(EngineUnreachable):
    """Nothing was sent: any call may be tried again."""


def _path(snapshot_id: str) -> str:
    return f"/snapshots/{quote(snapshot_id, safe='')}"


async def _read(response: aiohttp.ClientResponse) -> Any:
    """The decoded body. EngineAnswerError when it is bigger than MAX_BODY or no JSON; {} for an empty one."""
    chunks: list[bytes] = []
    size = 0
    async for chunk in response.content.iter_any():
        size += len(chunk)
        if size > MAX_BODY:
            response.close()
            raise EngineAnswerError(f"an answer is larger than {MAX_BODY} bytes")
        chunks.append(chunk)
    if not size:
        return {}
    try:
        return json.loads(b"".join(chunks))
    except (ValueError, RecursionError) as error:
        raise EngineAnswerError(f"an answer with status {response.status} is not JSON") from error


def _failure(status: int, headers: Mapping[str, str], payload: Any, pod: EnginePod) -> EngineError:
    """The error for a status that is not 200. Only an error in the engine's own shape says anything about a store."""
    error = payload.get("error") if isinstance(payload, Mapping) else None
    error = error if isinstance(error, Mapping) else {}
    code = error.get("code")
    message = parse.clean(error.get("message") or f"pod {pod.name} answered {status}")
    if status in (401, 403):
        return EngineRefused(message)
    if status == 404 and code == "not_found":
        return EngineNotFound(message)
    if code == "snapshot_unavailable":
        return StoreTrouble(message, reason=parse.reason(headers.get(STORE_REASON)))
    if status in (400, 413, 422):
        return EngineInvalid(message)
    if status in (409, 429, 503):
        return EngineBusy(message, retry_after_s=_seconds(headers.get("retry-after")))
    return EngineAnswerError(f"pod {pod.name} answered {status}: {message}")


def _seconds(text: str | None) -> float | None:
    """Retry-After in whole seconds, at most an hour; a date counts as nothing said."""
    return (
        min(float(text), 3600.0) if text is not None and text.isascii() and text.isdigit() and len(text) < 6 else None
    )
