"""A small engine server without a model, for the provider's tests: OpenAI chat, the `engram` object, snapshots, faults.

It speaks HTTP/1.1 by hand over asyncio, because the tests need what frameworks hide: cutting a connection in the middle
of a stream, never answering, and seeing that a client went away. Memory works like the real server's: the longest known
prefix of the messages counts as restored, ten tokens a message.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlsplit

TOKENS_PER_MESSAGE = 10
REPLY = "hello world"


@dataclass
class Fault:
    """What goes wrong for a model: an error status, a dropped connection, a slow or cut answer."""

    status: int = 0
    message: str = "boom"
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    drop: bool = False  # close without an answer
    delay: float = 0.0  # seconds before the answer
    pace: float = 0.0  # seconds between chunks
    hold: threading.Event | None = None  # an answer comes, a stream ends, only after this is set
    cut_after: int | None = None  # chunks of a stream before the connection is closed
    error_event: bool = False  # an error inside the stream after the first content
    times: int = 10**9


@dataclass
class Seen:
    """One request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class Turn:
    conversation_id: str
    turn_number: int
    snapshot_id: str
    branch_name: str
    messages: list[dict[str, Any]]
    created: float


class FakeEngine:
    """Runs in a thread of its own between `start` and `stop`."""

    def __init__(self, port: int = 0, features: str = "", metadata: bool = True, key: str | None = None) -> None:
        self.requests: list[Seen] = []
        self.faults: dict[str, Fault] = {}
        self.turns: list[Turn] = []
        self.features = features
        self.metadata = metadata  # False: a plain OpenAI server without the engram object
        self.key = key
        self.connections = 0  # accepted so far
        self.aborted = 0  # answers whose client went away
        self.replies: dict[str, str] = {}  # by model
        self.restore_error: str | None = None  # every restore fails with this
        self.snapshots_down = False
        self._port = port
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> FakeEngine:
        self._thread.start()
        assert self._ready.wait(240)
        return self

    def stop(self) -> None:
        """As a killed process: the port is closed and every connection dropped."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(240)

    def __enter__(self) -> FakeEngine:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def chats(self) -> list[dict[str, Any]]:
        """Bodies of the chat requests so far."""
        return [seen.body for seen in self.requests if seen.path == "/v1/chat/completions"]

    def wait_aborted(self, count: int, seconds: float = 240.0) -> bool:
        return _wait(lambda: self.aborted >= count, seconds)

    def wait_chats(self, count: int, seconds: float = 240.0) -> bool:
        """Until so many chat requests have arrived."""
        return _wait(lambda: len(self.chats()) >= count, seconds)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._server = self._loop.run_until_complete(asyncio.start_server(self._connection, "127.0.0.1", self._port))
        self._port = self._server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        self._server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.01))
        self._loop.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while (seen := await self._read(reader)) is not None:
                self.requests.append(seen)
                work = asyncio.ensure_future(self._answer(seen, writer))
                gone = asyncio.ensure_future(reader.read(1)) if seen.path == "/v1/chat/completions" else None
                if gone is None:
                    alive = await work
                else:  # the client sends nothing while it waits, so a read that ends means it went away
                    await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
                    if not work.done():
                        work.cancel()
                        self.aborted += 1
                        return
                    gone.cancel()
                    await asyncio.gather(gone, return_exceptions=True)
                    self.aborted += isinstance(work.exception(), ConnectionError)  # seen by a write before the read
                    alive = work.result()
                if not alive:
                    return
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client or the whole server went away
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> Seen | None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        request, *lines = head.decode("latin-1").split("\r\n")
        method, path, _ = request.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        data = await reader.readexactly(int(headers.get("content-length", 0)))
        return Seen(method, path, headers, json.loads(data) if data else None)

    async def _answer(self, seen: Seen, writer: asyncio.StreamWriter) -> bool:
        """Write the answer; False closes the connection."""
        url = urlsplit(seen.path)
        if self.key is not None and seen.headers.get("authorization") != f"Bearer {self.key}":
            return await self._error(writer, 401, "wrong API key")
        if url.path == "/v1/chat/completions":
            return await self._chat(seen.body, writer)
        if url.path.startswith("/v1/snapshots"):
            return await self._snapshots(seen, url.path, dict(parse_qsl(url.query)), writer)
        return await self._error(writer, 404, f"there is no {seen.path}")

    async def _chat(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        fault = self.faults.get(body["model"], Fault())
        if fault.times <= 0:
            fault = Fault()
        fault.times -= 1
        if fault.delay:
            await asyncio.sleep(fault.delay)
        while not body.get("stream") and fault.hold is not None and not fault.hold.is_set():
            await asyncio.sleep(0.01)
        if fault.drop:
            return False
        if fault.status:
            return await self._error(writer, fault.status, fault.message, fault.code, fault.headers)
        base = self._base(body.get("restore_from")) if body.get("restore_from") else []
        if base is None:
            return await self._error(writer, 404, "restore_from: no such snapshot", "snapshot_not_found")
        messages = base + body["messages"]
        message = self._reply(body)
        engram, restored = self._remember(body, messages, message, len(base))
        answer: dict[str, Any] = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": body["model"],
        }
        usage = {
            "prompt_tokens": TOKENS_PER_MESSAGE * len(messages),
            "completion_tokens": 7,
            "total_tokens": TOKENS_PER_MESSAGE * len(messages) + 7,
            "prompt_tokens_details": {"cached_tokens": restored},
        }
        extra = {"engram": engram} if self.metadata else {}
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        if body.get("stream"):
            return await self._stream(body, answer, message, finish, usage, extra, fault, writer)
        choices = [{"index": index, "message": message, "finish_reason": finish} for index in range(body.get("n") or 1)]
        return await self._send(
            writer, 200, {**answer, "object": "chat.completion", "choices": choices, "usage": usage, **extra}
        )

    async def _stream(
        self,
        body: dict[str, Any],
        answer: dict[str, Any],
        message: dict[str, Any],
        finish: str,
        usage: dict[str, Any],
        extra: dict[str, Any],
        fault: Fault,
        writer: asyncio.StreamWriter,
    ) -> bool:
        await self._head(writer, 200, {"content-type": "text/event-stream", "transfer-encoding": "chunked"})
        answer["object"] = "chat.completion.chunk"
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{"reasoning_content": part} for part in ("hmm ", "think")]
        for index, call in enumerate(message.get("tool_calls") or ()):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            start = {"index": index, "id": call["id"], "type": "function", "function": {"name": name, "arguments": ""}}
            deltas.append({"tool_calls": [start]})
            for part in (arguments[:5], arguments[5:]):
                deltas.append({"tool_calls": [{"index": index, "function": {"arguments": part}}]})
        if message.get("content"):
            text = message["content"]
            cut = max(1, len(text) // 3)
            deltas += [{"content": text[start : start + cut]} for start in range(0, len(text), cut)]
        events: list[dict[str, Any]] = [
            {**answer, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas
        ]
        events.append({**answer, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
        if (body.get("stream_options") or {}).get("include_usage"):
            events.append({**answer, "choices": [], "usage": usage, **extra})
        for count, event in enumerate(events):
            if fault.cut_after == count:
                return False
            if fault.error_event and count == 4:
                await self._chunk(writer, {"error": {"message": "engine died", "code": 500}})
                break
            while count == 4 and fault.hold is not None and not fault.hold.is_set():
                await asyncio.sleep(0.01)
            await self._chunk(writer, event)
            await asyncio.sleep(fault.pace)
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()
        return True

    def _reply(self, body: dict[str, Any]) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": self.replies.get(body["model"], REPLY),
            "reasoning_content": "hmm think",
        }
        if body.get("tools"):
            name = body["tools"][0]["function"]["name"]
            message["content"] = None
            message["tool_calls"] = [
                {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": f'{{"x": {i}}}'}}
                for i in range(2)
            ]
        elif (body.get("response_format") or {}).get("type") in ("json_object", "json_schema"):
            message["content"] = '{"a": 1}'
        return message

    def _base(self, selector: str) -> list[dict[str, Any]] | None:
        if self.restore_error is not None:
            return None
        for turn in reversed(self.turns):
            if selector in (turn.snapshot_id, f"{turn.conversation_id}:{turn.turn_number}"):
                return turn.messages
        return None

    def _remember(
        self, body: dict[str, Any], messages: list[dict[str, Any]], reply: dict[str, Any], forced: int
    ) -> tuple[dict[str, Any], int]:
        mode = body.get("stateful_mode", "auto")
        best: Turn | None = None
        if mode == "auto" or forced:
            for turn in self.turns:
                known = [_key(message) for message in turn.messages]
                longer = best is None or len(turn.messages) > len(best.messages)
                if longer and known == [_key(message) for message in messages[: len(known)]]:
                    best = turn
        restored = TOKENS_PER_MESSAGE * len(best.messages) if best and self.restore_error is None else 0
        save = body.get("auto_save", mode == "auto")
        named = body.get("conversation_id")
        conversation_id = named or (best.conversation_id if best else uuid.uuid4().hex)
        numbers = [turn.turn_number for turn in self.turns if turn.conversation_id == conversation_id]
        number = max(numbers, default=0) + 1
        branch = body.get("branch_name") or "main"
        snapshot_id = uuid.uuid4().hex if save else None
        if snapshot_id is not None:
            whole = [*messages, {**reply, "reasoning_content": None}]
            self.turns.append(Turn(conversation_id, number, snapshot_id, branch, whole, time.time()))
        return {
            "conversation_id": conversation_id,
            "branch_name": branch,
            "turn_number": number,
            "snapshot_id": snapshot_id,
            "boundary": "turn_end" if snapshot_id else None,
            "restored_tokens": restored,
            "prefilled_tokens": TOKENS_PER_MESSAGE * len(messages) - restored,
            "rewarmed_tokens": 0,
            "tier": "host" if restored else None,
            "bytes": restored * 100,
            "restore_time_ms": 1.5 if restored else None,
            "restore_failed": self.restore_error is not None,
            "restore_error": self.restore_error,
            "auto_save": bool(save),
        }, restored

    async def _snapshots(self, seen: Seen, path: str, query: dict[str, str], writer: asyncio.StreamWriter) -> bool:
        if self.snapshots_down:
            return await self._error(writer, 503, "the store is away")
        parts = path.split("/")[3:]
        if not parts and seen.method == "GET":
            found = [
                turn
                for turn in reversed(self.turns)
                if turn.conversation_id == query["conversation_id"]
                and query.get("branch_name", turn.branch_name) == turn.branch_name
            ]
            ids = [turn.snapshot_id for turn in found]
            first = ids.index(query["after"]) + 1 if "after" in query else 0
            page = found[first : first + int(query["limit"])]
            more = page[-1].snapshot_id if first + len(page) < len(found) else None
            data = [_summary(turn) for turn in page]
            answer = {"object": "list", "data": data, "has_more": more is not None, "next_after": more}
            return await self._send(writer, 200, answer)
        if not parts:
            wanted = seen.body
            for turn in reversed(self.turns):
                if turn.conversation_id == wanted["conversation_id"] and wanted.get("turn_number") in (
                    None,
                    turn.turn_number,
                ):
                    return await self._send(writer, 200, _summary(turn))
            return await self._error(writer, 404, "no such conversation")
        match = [turn for turn in self.turns if turn.snapshot_id == parts[0]]
        if not match:
            return await self._error(writer, 404, "no such snapshot")
        if seen.method == "DELETE":
            self.turns.remove(match[0])
            return await self._send(writer, 200, {"id": parts[0], "object": "snapshot.deleted", "deleted": True})
        if seen.method == "POST":
            head = seen.body["action"] == "head"
            moved = {"bytes": 0, "milliseconds": 0.1, "tier": None}
            if not head:
                moved = {"bytes": 4096, "milliseconds": 2.5, "tier": "disk"}
            return await self._send(writer, 200, {"snapshot": _summary(match[0]), "head": head, **moved})
        return await self._send(writer, 200, _summary(match[0]))

    async def _error(
        self,
        writer: asyncio.StreamWriter,
        status: int,
        message: str,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bool:
        error = {"error": {"message": message, "type": "error", "param": None, "code": code}}
        return await self._send(writer, status, error, headers)

    async def _send(
        self, writer: asyncio.StreamWriter, status: int, body: Any, headers: Mapping[str, str] | None = None
    ) -> bool:
        data = json.dumps(body).encode()
        await self._head(
            writer, status, {"content-type": "application/json", "content-length": str(len(data)), **(headers or {})}
        )
        writer.write(data)
        await writer.drain()
        return True

    async def _head(self, writer: asyncio.StreamWriter, status: int, headers: Mapping[str, str]) -> None:
        lines = {**headers, **({"x-engram-features": self.features} if self.features else {})}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        writer.write(f"HTTP/1.1 {status} X\r\n{head}\r\n".encode())

    async def _chunk(self, writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
        data = f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode()
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await writer.drain()


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def _key(message: Mapping[str, Any]) -> str:
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    return json.dumps([message["role"], content, calls], sort_keys=True)


def _summary(turn: Turn) -> dict[str, Any]:
    return {
        "id": turn.snapshot_id,
        "object": "snapshot",
        "parent": None,
        "conversation_id": turn.conversation_id,
        "branch_name": turn.branch_name,
        "turn_number": turn.turn_number,
        "boundary": "turn_end",
        "tokens": TOKENS_PER_MESSAGE * len(turn.messages),
        "bytes": 1234,
        "tiers": ["host", "disk"],
        "created": turn.created,
        "expires": turn.created + 3600,
        "pinned": False,
        "tag": None,
        "pending": 1,
        "model": "m",
        "state_abi": "abi",
        "is_head": True,
    }
