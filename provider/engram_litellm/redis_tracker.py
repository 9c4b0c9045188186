"""The tracker shared by several workers: Redis in front of nothing, behind the in-process one.

Every Redis call is bounded (50 ms) and guarded by a breaker, and every failure means "not known here": a call of the
application never fails or waits because of Redis. Keys hold a `{scope}` hash tag, so MGET and the script stay on one
node of a Redis Cluster.
"""

from __future__ import annotations

import importlib
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from engram_litellm.errors import MissingExtra
from engram_litellm.tracker import LocalTracker, Node

logger = logging.getLogger("engram_litellm")

TIMEOUT = 0.05  # seconds
FAILURES_TO_OPEN = 3
OPEN_SECONDS = 5.0
LOOKBACK = 64  # digests asked for in one MGET; older boundaries than that are the server's to find

# The node is stored whatever the head says; the head only moves forward. One script, so two workers that finish turns
# of one conversation at the same time cannot interleave.
RECORD = """
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[3])
local turn = redis.call('HGET', KEYS[2], 'turn')
if turn and tonumber(turn) > tonumber(ARGV[2]) then return 0 end
redis.call('HSET', KEYS[2], 'turn', ARGV[2], 'node', ARGV[1])
redis.call('EXPIRE', KEYS[2], ARGV[3])
return 1
"""


class RedisTracker:
    """`Tracker` over Redis with a `LocalTracker` in front: what this process recorded itself needs no round trip."""

    def __init__(
        self, url: str, ttl: float = 86400.0, client: Any = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = connect(url) if client is None else client
        self._ttl = max(1, int(ttl))
        self._local = LocalTracker(ttl=ttl)
        self._script = self._client.register_script(RECORD)
        self._breaker = Breaker(clock)

    def find(self, owner: str, digests: Sequence[bytes]) -> tuple[int, Node] | None:
        local = self._local.find(owner, digests)
        first = max(local[0] + 1 if local else 0, len(digests) - LOOKBACK)
        wanted = digests[first:]
        if not wanted:
            return local
        found = self._breaker.call(lambda: self._client.mget([_digest_key(owner, digest) for digest in wanted]))
        for index in range(len(wanted) - 1, -1, -1):
            node = _parse(found[index]) if found else None
            if node is not None:
                return first + index, node
        return local

    def head(self, owner: str, conversation_id: str) -> Node | None:
        found = self._breaker.call(lambda: self._client.hget(_head_key(owner, conversation_id), "node"))
        local = self._local.head(owner, conversation_id)
        node = _parse(found)
        if node is None or (local is not None and local.turn > node.turn):
            return local
        return node

    def record(self, owner: str, digest: bytes, node: Node) -> bool:
        moved = self._local.record(owner, digest, node)
        keys = [_digest_key(owner, digest), _head_key(owner, node.conversation_id)]
        value = json.dumps([node.conversation_id, node.snapshot_id, node.home, node.turn])
        answer = self._breaker.call(lambda: self._script(keys=keys, args=[value, node.turn, self._ttl]))
        return moved if answer is None else bool(answer)


class Breaker:
    """Stops asking for `OPEN_SECONDS` after `FAILURES_TO_OPEN` failures in a row; one call then tries again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._closed_from = 0.0

    def call(self, ask: Callable[[], Any]) -> Any:
        """The answer, or None when the breaker is open or the call fails."""
        with self._lock:
            if self._clock() < self._closed_from:
                return None
            if self._failures >= FAILURES_TO_OPEN:  # half open: others wait for this one's outcome
                self._closed_from = self._clock() + OPEN_SECONDS
        try:
            answer = ask()
        except Exception as error:  # redis-py raises its own classes, OSError and parser errors
            with self._lock:
                self._failures += 1
                if self._failures >= FAILURES_TO_OPEN:
                    self._closed_from = self._clock() + OPEN_SECONDS
            logger.warning("the tracker's Redis did not answer (%s); going on without it", type(error).__name__)
            return None
        with self._lock:
            self._failures = 0
            self._closed_from = 0.0
        return answer


def connect(url: str) -> Any:
    """A redis-py client with our time limit; nothing is sent before the first call. ValueError for a wrong URL."""
    try:
        redis: Any = importlib.import_module("redis")
    except ImportError as error:
        raise MissingExtra("ENGRAM_TRACKER_REDIS_URL needs redis-py: pip install redis") from error
    try:
        return redis.Redis.from_url(url, socket_timeout=TIMEOUT, socket_connect_timeout=TIMEOUT, retry=None)
    except ValueError as error:
        raise ValueError(f"ENGRAM_TRACKER_REDIS_URL must be a Redis URL: {error}") from error


def _digest_key(owner: str, digest: bytes) -> str:
    return f"engram:v1:{{{owner}}}:d:{digest.hex()}"


def _head_key(owner: str, conversation_id: str) -> str:
    return f"engram:v1:{{{owner}}}:h:{conversation_id}"


def _parse(value: bytes | str | None) -> Node | None:
    """A stored node; anything that is not one is not known."""
    if value is None:
        return None
    try:
        conversation_id, snapshot_id, home, turn = json.loads(value)
        return Node(str(conversation_id), snapshot_id, home, int(turn))
    except (ValueError, TypeError):
        return None
