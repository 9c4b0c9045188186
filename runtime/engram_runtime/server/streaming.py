"""Server-sent events: one JSON object per event, `[DONE]` at the end, an error object when the stream breaks.

The source is closed whatever happens to the connection, at once and in the same task: that is what makes a dropped
stream an abort in the engine.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engram_runtime.server.errors import translate

DONE = b"data: [DONE]\n\n"
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
"""Made once: given options, `json.dumps` makes one for every token, which is 3 of 7 us."""
log = logging.getLogger("engram.server")


def event(data: Any) -> bytes:
    return b"data: " + _JSON.encode(data).encode() + b"\n\n"


class EventStream(Response):
    """Sends each object of `events`; the generator is finished or closed when the response ends."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[dict[str, Any]], headers: Mapping[str, str] | None = None) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for data in self._events:
                    await send({"type": "http.response.body", "body": event(data), "more_body": True})
                last = DONE
            except (asyncio.CancelledError, OSError):  # the caller is gone
                raise
            except Exception as error:
                # The status line is out: the error travels as an event, and no [DONE] follows it.
                problem = translate(error)
                if problem.status == 500:
                    log.exception("a stream failed")
                last = event(problem.body())
            await send({"type": "http.response.body", "body": last, "more_body": False})
