"""One turn's way to a replica, without any input or output of its own.

Sync, async and streamed calls differ only in how they send and sleep. What they send, where, what an answer means and
what comes next is decided here, once: choose a replica, send, and on a failure before the first byte go to another one,
wait, send in full instead of the delta, or give up with the right exception.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from engram_litellm import digests, litellm_errors
from engram_litellm.discovery.chain import Discovery
from engram_litellm.discovery.endpoints import Endpoint, EndpointSet
from engram_litellm.errors import NoEndpoint
from engram_litellm.request import ChatRequest
from engram_litellm.routing import Balancer
from engram_litellm.settings import Settings
from engram_litellm.tracker import Node, Tracker

logger = logging.getLogger("engram_litellm")

RETRY_STATUSES = (429, 502, 503, 504)
FALLBACK_STATUSES = (403, 404, 409, 410, 412)  # of a restore that cannot be: the turn goes on without it
MAX_RETRY_AFTER = 2.0  # seconds; longer waits are the caller's to decide
WHOLE_TURN = ("turn_end", "next_history")  # boundaries whose snapshot holds the reply too
FEATURES_HEADER = "x-engram-features"


@dataclass(frozen=True, slots=True)
class Core:
    """What calls share as long as the settings stay the same. `deltas` holds the URLs of servers that take them."""

    settings: Settings
    discovery: Discovery
    balancer: Balancer
    tracker: Tracker
    tracker_blocks: bool
    deltas: set[str] = field(default_factory=set)
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class Attempt:
    """One thing to send. `content` is JSON."""

    endpoint: Endpoint
    url: str
    headers: dict[str, str]
    content: bytes
    explicit: bool


class Call:
    """The states: `locate` and `recall` (may block), then `attempt` and `answered` or `broken` until accepted,
    then `remember` (may block) and always `close`."""

    def __init__(self, core: Core, request: ChatRequest) -> None:
        self._core = core
        self._request = request
        self._started = core.clock()
        self._deadline = self._started + _seconds(request.timeout)
        self._retries = request.retries
        self._backoff = 0.05
        self._tried: set[str] = set()
        self._set: EndpointSet | None = None
        self._endpoint: Endpoint | None = None
        self._match: tuple[int, Node] | None = None
        self._home: str | None = None
        self._contents: dict[tuple[bool, bool], bytes] = {}
        self._allow_delta = True
        self._allow_restore = True
        self._delta = False
        self._restore_error: str | None = None
        seed = digests.seed(request.owner, request.model, request.body)
        self._digests = digests.chain(seed, request.messages)
        self._root = digests.root(self._digests, request.messages) if self._digests else seed
        self._last = self._digests[-1] if self._digests else seed
        self.replica: str | None = None
        self.tracker_blocks = core.tracker_blocks

    def locate(self, *, wait: bool) -> None:
        """Find the replicas. Raises NotYet when `wait` is false and that would block."""
        try:
            self._set = self._core.discovery.find(self._request.model, self._request.api_base, wait=wait)
        except NoEndpoint as error:
            raise litellm_errors.connection_error(str(error), self._request.model) from error
        except ValueError as error:
            raise litellm_errors.bad_request(str(error), self._request.model) from error

    def recall(self) -> None:
        """Look up where the conversation was left. A tracker that fails knows nothing."""
        request = self._request
        if request.mode == "stateless":
            return
        try:
            self._match = self._core.tracker.find(request.owner, self._digests)
            node = self._match[1] if self._match else None
            named = request.conversation_id or request.session
            if named and (node is None or node.conversation_id != named):
                node = self._core.tracker.head(request.owner, named)
            self._home = node.home if node else None
        except Exception as error:
            logger.warning("the conversation tracker failed: %s", error)

    def attempt(self) -> Attempt | float:
        """Choose a replica for the next try, or say how many seconds to wait for one that is not going away.

        `answered`, `broken` or `close` must follow an Attempt; a final failure is an exception.
        """
        assert self._set is not None, "locate() comes first"
        endpoints, key = self._set.endpoints, self._key()
        endpoint = self._core.balancer.acquire(key, endpoints, self._home, self._tried)
        if endpoint is None:
            self._tried.clear()
            endpoint = self._core.balancer.acquire(key, endpoints, self._home)
        if endpoint is None:
            endpoint = self._core.balancer.acquire_any(key, endpoints, self._home)
        if endpoint is None:
            message = f"every replica of {self._set.model!r} is shutting down"
            return self._again(litellm_errors.from_status(503, message, self._request.model), free=True, after=0.0)
        self._endpoint = endpoint
        self.replica = endpoint.name
        self._delta = self._may_delta(endpoint)
        headers = {"content-type": "application/json", **self._request.headers}
        url = f"{endpoint.url}/v1/chat/completions"
        return Attempt(endpoint, url, headers, self._content(), self._set.explicit)

    def answered(self, response: httpx.Response) -> float | None:
        """Judge an answer whose body, if it is an error, was read: None accepts it, a number says after how many
        seconds to try again, an exception is the caller's."""
        endpoint = self._endpoint
        assert endpoint is not None, "attempt() comes first"
        status = response.status_code
        if status < 400:
            self._core.balancer.succeeded(endpoint)
            features = {part.strip() for part in response.headers.get(FEATURES_HEADER, "").split(",")}
            if "delta" in features:
                self._core.deltas.add(endpoint.url)
            else:
                self._core.deltas.discard(endpoint.url)
            return None
        self._release()
        message, code = litellm_errors.error_of(status, response.content)
        error = litellm_errors.from_status(status, message, self._request.model, code, response.headers)
        if self._delta and (status in FALLBACK_STATUSES or status == 400):
            self._allow_delta = False  # the whole history says the same, so nothing was lost and nobody need know
            return 0.0
        if self._restoring() and status in FALLBACK_STATUSES:
            self._allow_restore = False
            self._restore_error = message
            return 0.0
        if status not in RETRY_STATUSES:
            raise error
        if status == 503:
            self._core.balancer.failed(endpoint)  # loading or draining
        self._tried.add(endpoint.url)
        return self._again(error, free=status == 503, after=_retry_after(response))

    def broken(self, error: Exception) -> float:
        """A connection failed before the first byte: seconds until the next try, or the caller's exception."""
        assert self._endpoint is not None, "attempt() comes first"
        endpoint = self._endpoint
        self._release()
        failure = litellm_errors.from_transport(error, self._request.model)
        connecting = isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))
        lost = isinstance(error, (httpx.NetworkError, httpx.RemoteProtocolError))
        if not (connecting or lost):
            raise failure from error
        self._core.balancer.failed(endpoint)
        self._tried.add(endpoint.url)
        try:
            return self._again(failure, free=connecting, after=0.0)
        except Exception as final:
            raise final from error

    def metadata(self, engram: Mapping[str, Any] | None) -> dict[str, Any]:
        """The `engram` object for the caller: the server's, completed by what only this side knows."""
        out = dict(engram or {})
        request = self._request
        if not out.get("conversation_id"):
            hint = self._conversation_id()
            if hint is not None:
                out["conversation_id"] = hint
        out.setdefault("auto_save", request.auto_save)
        out["tokens_saved"] = out.get("restored_tokens") or 0
        if self._restore_error is not None:
            out["restore_failed"], out["restore_error"] = True, self._restore_error
        out.setdefault("restore_failed", False)
        if out["restore_failed"]:
            logger.warning(
                "the state of conversation %s was not restored (%s); its history was computed again",
                out.get("conversation_id"),
                out.get("restore_error") or "no reason given",
            )
        out["replica"] = self.replica
        return out

    def remember(self, reply: Mapping[str, Any], engram: Mapping[str, Any]) -> None:
        """Record the finished turn. A tracker that fails is a warning."""
        request, conversation_id = self._request, engram.get("conversation_id")
        if request.mode == "stateless" or not isinstance(conversation_id, str):
            return
        turn = engram.get("turn_number")
        snapshot_id = engram.get("snapshot_id")
        whole = isinstance(snapshot_id, str) and engram.get("boundary") in WHOLE_TURN
        node = Node(
            conversation_id,
            snapshot_id if whole else None,
            self.replica,
            turn if isinstance(turn, int) else len(request.messages),
        )
        try:
            self._core.tracker.record(request.owner, digests.extend(self._last, reply), node)
        except Exception as error:
            logger.warning("the conversation tracker failed: %s", error)

    def close(self) -> None:
        """The call is over, however it ended."""
        self._release()

    def _again(self, error: Exception, *, free: bool, after: float) -> float:
        """Seconds until the next try; raises `error` when there is none left.

        A replica that never took the request costs no retry as long as another one is left. When every discovered
        replica is away (a restart, a rollout of one), the call waits for one, unless the caller wants no retries.
        """
        assert self._set is not None
        left = [e for e in self._set.endpoints if not e.draining and e.url not in self._tried]
        now = self._core.clock()
        if free and left:
            return 0.0
        pause = 0.0 if left else max(after, self._backoff * random.uniform(0.5, 1.5))
        waiting = free and not self._set.explicit and self._request.retries > 0
        if waiting and now + pause < min(self._started + self._core.settings.wait, self._deadline):
            self._backoff = min(self._backoff * 2, 1.0)
            return pause
        if self._retries == 0 or now + pause >= self._deadline:
            raise error
        self._retries -= 1
        self._backoff = min(self._backoff * 2, 1.0)
        return pause

    def _release(self) -> None:
        if self._endpoint is not None:
            self._core.balancer.release(self._endpoint)
            self._endpoint = None

    def _conversation_id(self) -> str | None:
        """The conversation that the request belongs to; None leaves it to the server."""
        request = self._request
        if request.conversation_id is not None or request.mode == "stateless":
            return request.conversation_id
        if request.session is not None or request.mode == "explicit":
            return request.session
        return self._match[1].conversation_id if self._match else None

    def _key(self) -> str:
        """What rendezvous hashing sees: a name that every worker sees too, so not an id that only one may know."""
        request = self._request
        return request.conversation_id or request.session or self._root.hex()

    def _restoring(self) -> bool:
        return self._allow_restore and self._request.restore_from is not None

    def _may_delta(self, endpoint: Endpoint) -> bool:
        """Send the new messages only? When the server takes it, knows the base and the history is worth it."""
        request, match = self._request, self._match
        if (
            not self._allow_delta
            or request.mode != "auto"
            or request.restore_from
            or "delta" in request.explicit_fields
        ):
            return False
        if match is None or match[1].snapshot_id is None or endpoint.url not in self._core.deltas:
            return False
        old = request.messages[: match[0] + 1]
        if not request.messages[match[0] + 1 :]:
            return False
        return sum(len(str(message.get("content") or "")) for message in old) >= self._core.settings.delta_min_bytes

    def _content(self) -> bytes:
        key = (self._delta, self._allow_restore)
        if key not in self._contents:
            self._contents[key] = _encoded(self._body())
        return self._contents[key]

    def _body(self) -> dict[str, Any]:
        request = self._request
        assert self._set is not None
        body: dict[str, Any] = {"model": self._set.model, "messages": request.messages, **request.body}
        body.update({name: value for name, value in request.explicit_fields.items() if name != "restore_from"})
        conversation_id = self._conversation_id()
        if conversation_id is not None:
            body["conversation_id"] = conversation_id
        if request.mode != "auto":
            body["stateful_mode"] = request.mode
        if not request.auto_save:
            body["auto_save"] = False
        if self._restoring():
            body["restore_from"] = request.restore_from
        if self._delta and self._match is not None:
            index, node = self._match
            # Named by snapshot: `delta: true` would continue the conversation's head, which a branch may have moved.
            body["messages"] = request.messages[index + 1 :]
            body["conversation_id"] = node.conversation_id
            body["restore_from"] = node.snapshot_id
        return body


def _encoded(body: dict[str, Any]) -> bytes:
    """JSON in UTF-8; half a surrogate pair, which UTF-8 cannot hold, goes as an escape."""
    try:
        return json.dumps(body, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return json.dumps(body, default=str).encode()


def _seconds(timeout: float | httpx.Timeout | None) -> float:
    if isinstance(timeout, httpx.Timeout):
        return timeout.read if timeout.read is not None else 600.0
    return 600.0 if timeout is None else float(timeout)


def _retry_after(response: httpx.Response) -> float:
    """Seconds that the server asks for, bounded; a date is not worth parsing for two seconds."""
    try:
        return min(MAX_RETRY_AFTER, max(0.0, float(response.headers.get("retry-after", 0))))
    except ValueError:
        return 0.0
