"""The admin port of an engine without an engine: the calls that the operator makes, and every way they can go wrong.

`FakeStore` is the bucket: several fakes on several loopback addresses (127.0.0.1, 127.0.0.2, ... on one port, as pods
are) share one, so a deletion through one replica is seen by the next.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import secrets
from collections.abc import Callable, Iterator
from typing import Any

from aiohttp import web

BUCKET = "s3://bucket/prefix"


def keyed_hash(text: str) -> str:
    """Stands for the HMAC under the tenant's key."""
    return hashlib.sha256(f"tenant key {text}".encode()).hexdigest()[:32]


class FakeStore:
    """Snapshots by id, and the log of what happened to them."""

    def __init__(self) -> None:
        self.snapshots: dict[str, dict[str, Any]] = {}
        self.log: list[tuple[str, dict[str, Any]]] = []
        self.forgotten = 0  # events before this place in the log can be read no more
        self.swept = 0
        self._clock = itertools.count(1_760_000_000)

    def add(
        self,
        conversation: str,
        turn: int,
        boundary: str = "turn_end",
        *,
        branch: str = "main",
        tokens: int | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """A snapshot as the engine would list it, newer than all before it."""
        created = float(next(self._clock))
        record = {
            "snapshot_id": f"{(1 << 48) - 1 - int(created * 1000):012x}{secrets.token_hex(10)}",
            "tenant_hash": keyed_hash("default"),
            "conversation_hash": keyed_hash(conversation),
            "branch_name_hash": keyed_hash(f"branch {branch}"),
            "turn_number": turn,
            "boundary": boundary,
            "tokens": 100 * (turn + 1) if tokens is None else tokens,
            "bytes": 4096 * (turn + 1),
            "created": created,
            "expires": None,
            "pinned": False,
            "tag": None,
            "parent_id": None,
            **fields,
        }
        folder = f"{BUCKET}/v1/{record['tenant_hash']}/abi/snap"
        record["uri"] = f"{folder}/{record['snapshot_id'][:6]}/{record['snapshot_id']}"
        self.snapshots[record["snapshot_id"]] = record
        self.log.append(("saved", dict(record)))
        return record

    def remove(self, snapshot_id: str) -> int:
        record = self.snapshots.pop(snapshot_id)
        self.log.append(("deleted", {"snapshot_id": snapshot_id, "tenant_hash": record["tenant_hash"]}))
        return int(record["bytes"])

    def change(self, snapshot_id: str, **fields: Any) -> dict[str, Any]:
        record = self.snapshots[snapshot_id]
        record.update(fields)
        self.log.append(("changed", dict(record)))
        return record

    def forget_events(self) -> None:
        """As a restarted engine does: every cursor given out so far is too old."""
        self.forgotten = len(self.log) + 1

    def newest_first(self) -> list[dict[str, Any]]:
        return sorted(self.snapshots.values(), key=lambda record: str(record["snapshot_id"]))


class FakeEngineAdmin:
    """One engine. Attributes are its faults: set them at any time.

    `answer`: (status, code) for every call. `raw`: bytes to send instead of an answer. `hang`: accept and say nothing.
    `silent` is called when a call has come that gets no answer: time for the caller's deadline to pass.
    `denied`: the store refuses what changes it. `live`: conversations that can be saved, name -> turn.
    """

    def __init__(self, store: FakeStore | None = None, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.store = store or FakeStore()
        self.host, self.port = host, port
        self.token: str | None = "token-1"
        self.state_abi = "abi1"
        self.live: dict[str, int] = {}
        self.answer: tuple[int, str | None] | None = None
        self.retry_after: str | None = None
        self.raw: bytes | None = None
        self.hang = False
        self.hang_after = False  # does what was asked, then says nothing
        self.silent: Callable[[], None] = lambda: None
        self.denied = False
        self.store_condition: dict[str, Any] = {"reachable": True, "reason": "StoreReachable", "message": ""}
        self.idle_seconds = 0.0
        self.last_success_time: float | None = None
        self.waiting: dict[str, Any] = {}
        self.requests: list[tuple[str, str, Any]] = []  # method, path with query, body
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> FakeEngineAdmin:
        app = web.Application(middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/status", self._status),
                web.post("/drain", self._drain),
                web.get("/waiting", self._waiting),
                web.get("/snapshots", self._list),
                web.get("/snapshots/events", self._events),
                web.post("/snapshots", self._save),
                web.post("/snapshots/sweep", self._sweep),
                web.get("/snapshots/{id}", self._show),
                web.patch("/snapshots/{id}", self._change),
                web.delete("/snapshots/{id}", self._delete),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def calls(self, method: str, path: str = "") -> list[tuple[str, str, Any]]:
        return [request for request in self.requests if request[0] == method and request[1].startswith(path)]

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        self.requests.append((request.method, request.path_qs, body))
        if self.hang:
            await self._say_nothing()
        if self.raw is not None:
            transport = request.transport
            assert transport is not None
            transport.write(self.raw)
            transport.close()
            return web.Response()
        if self.token is not None and request.headers.get("authorization") != f"Bearer {self.token}":
            return _error(401, "no such key", "invalid_api_key")
        if self.answer is not None:
            status, code = self.answer
            headers = {} if self.retry_after is None else {"retry-after": self.retry_after}
            return _error(status, f"answer {status}", code, headers)
        response: web.StreamResponse = await handler(request)
        if self.hang_after:
            await self._say_nothing()
        return response

    async def _say_nothing(self) -> None:
        self.silent()
        await asyncio.Event().wait()

    async def _status(self, _: web.Request) -> web.Response:
        records = self.store.snapshots.values()
        return web.json_response(
            {
                "phase": "ready",
                "model": {"name": "m", "digest": "d1", "architecture": "LlamaForCausalLM", "weight_bytes": 1000},
                "state_abi": self.state_abi,
                "state_bytes": 64,
                "requests": {"running": 0, "waiting": 0},
                "idle_seconds": self.idle_seconds,
                "store": self.store_condition,
                "snapshots": {
                    "count": len(records),
                    "total_bytes": sum(record["bytes"] for record in records),
                    "last_success_time": self.last_success_time,
                    "last_failure_time": None,
                    "last_error": None,
                },
            }
        )

    async def _drain(self, _: web.Request) -> web.Response:
        return web.json_response({"phase": "draining", "sequences": 0})

    async def _waiting(self, _: web.Request) -> web.Response:
        return web.json_response({"models": self.waiting})

    async def _list(self, request: web.Request) -> web.Response:
        limit, after = int(request.query.get("limit", "100")), request.query.get("after", "")
        left = [record for record in self.store.newest_first() if record["snapshot_id"] > after]
        page = left[:limit]
        return web.json_response(
            {
                "snapshots": page,
                "next": page[-1]["snapshot_id"] if len(left) > limit else None,
                "count": len(self.store.snapshots),
                "total_bytes": sum(record["bytes"] for record in self.store.snapshots.values()),
            }
        )

    async def _events(self, request: web.Request) -> web.Response:
        after = request.query.get("after")
        place = None if after is None else int(after.removeprefix("c"))
        end = len(self.store.log)
        if place is None or place < self.store.forgotten:
            self.store.forgotten = min(self.store.forgotten, end)
            return web.json_response({"events": [], "next": f"c{end}", "lost": True})
        events = [{"kind": kind, "snapshot": record} for kind, record in self.store.log[place : place + 500]]
        return web.json_response({"events": events, "next": f"c{place + len(events)}", "lost": False})

    async def _save(self, request: web.Request) -> web.Response:
        body = await request.json()
        conversation = body["conversation_id"]
        if self.denied:
            return _store_error()
        if conversation not in self.live:
            return _error(404, f"conversation {conversation} is not known", "not_found")
        turn = body.get("turn_number", self.live[conversation])
        fields = {"pinned": body.get("pin", False), "tag": body.get("tag")}
        if "ttl_seconds" in body:
            fields["expires"] = 1_760_000_000.0 + body["ttl_seconds"]
        branch = body.get("branch_name", "main")
        record = self.store.add(conversation, turn, "manual", branch=branch, **fields)
        return web.json_response({"snapshots": [record]})

    async def _sweep(self, _: web.Request) -> web.Response:
        if self.denied:
            return _store_error()
        self.store.swept += 1
        return web.json_response({"snapshots_deleted": 2, "files_deleted": 3, "bytes_deleted": 4096})

    async def _show(self, request: web.Request) -> web.Response:
        record = self.store.snapshots.get(request.match_info["id"])
        return _no_snapshot() if record is None else web.json_response(record)

    async def _change(self, request: web.Request) -> web.Response:
        body = await request.json()
        if request.match_info["id"] not in self.store.snapshots:
            return _no_snapshot()
        if self.denied:
            return _store_error()
        fields: dict[str, Any] = {"pinned": body["pinned"]} if "pinned" in body else {}
        if "ttl_seconds" in body:
            ttl = body["ttl_seconds"]
            fields["expires"] = None if ttl is None else 1_760_000_000.0 + ttl
        return web.json_response(self.store.change(request.match_info["id"], **fields))

    async def _delete(self, request: web.Request) -> web.Response:
        if request.match_info["id"] not in self.store.snapshots:
            return _no_snapshot()
        if self.denied:
            return _store_error()
        return web.json_response({"deleted": True, "bytes": self.store.remove(request.match_info["id"])})


def loopback_addresses() -> Iterator[str]:
    """Addresses of this machine that differ as pods' do."""
    return (f"127.0.0.{number}" for number in itertools.count(1))


def _error(status: int, message: str, code: str | None, headers: dict[str, str] | None = None) -> web.Response:
    body = {"error": {"message": message, "type": "error", "param": None, "code": code}}
    return web.json_response(body, status=status, headers=headers)


def _no_snapshot() -> web.Response:
    return _error(404, "the snapshot does not exist", "not_found")


def _store_error() -> web.Response:
    headers = {"retry-after": "5", "x-engram-store-reason": "AccessDenied"}
    return _error(503, "the bucket refused it", "snapshot_unavailable", headers)
