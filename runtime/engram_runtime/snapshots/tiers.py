"""A durable tier: a repository, its health and its speed.

Trouble in a tier is a condition that people can read, and a pause before the next try; it is never an exception that
reaches the engine.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from engram_runtime.errors import NotFound, SnapshotError
from engram_runtime.snapshots.io.repository import Repository
from engram_runtime.snapshots.io.store import ObjectInfo, ObjectStore, StoreUnavailable
from engram_runtime.snapshots.policy import keys
from engram_runtime.snapshots.policy.cost import Speed

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
LONGEST_PROBE_PAUSE = 5.0
"""Of writes, which is what the background probes: nobody waits for it, and a tier is soon back."""


class Counters:
    """Monotonic sums by dotted name, e.g. "puts.store". Thread-safe."""

    def __init__(self) -> None:
        self._values: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, value: float = 1) -> None:
        with self._lock:
            self._values[name] += value  # type: ignore[assignment]

    def read(self) -> dict[str, float]:
        with self._lock:
            return {name: float(value) for name, value in self._values.items()}


class MeteredStore:
    """Counts requests and bytes of a store, because requests cost money at a million conversations.

    `objects` and `nbytes` are what it holds: as last listed, with what this process has written since.
    """

    def __init__(self, inner: ObjectStore, tier: str, counters: Counters) -> None:
        self.inner = inner
        self._tier = tier
        self._counters = counters
        self.objects = 0
        self.nbytes = 0

    def holds(self, objects: int, nbytes: int) -> None:
        self.objects, self.nbytes = objects, nbytes

    @property
    def report(self) -> str:
        """What the store's probe found that people should know; empty for stores that have nothing to say."""
        return str(getattr(self.inner, "report", ""))

    def probe(self) -> None:
        self.inner.probe()

    def put(self, key: str, parts: Sequence[memoryview | bytes], *, if_absent: bool = False) -> None:
        self._count("puts")
        self.inner.put(key, parts, if_absent=if_absent)
        size = sum(memoryview(part).nbytes for part in parts)
        self._count("bytes_written", size)
        parsed = keys.parse(key)
        if parsed is not None and parsed.kind in ("kv", "snap"):
            self.holds(self.objects + 1, self.nbytes + size)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        self._count("gets")
        data = self.inner.get(key, start, length)
        self._count("bytes_read", len(data))
        return data

    def front(self, key: str, length: int) -> tuple[bytes, int]:
        self._count("gets")
        data, size = self.inner.front(key, length)
        self._count("bytes_read", len(data))
        return data, size

    def get_tagged(self, key: str) -> tuple[bytes, str]:
        self._count("gets")
        data, tag = self.inner.get_tagged(key)
        self._count("bytes_read", len(data))
        return data, tag

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        self._count("gets")
        self.inner.read_into(key, start, buffer)
        self._count("bytes_read", buffer.nbytes)

    def head(self, key: str) -> ObjectInfo:
        self._count("heads")
        return self.inner.head(key)

    def delete(self, key: str) -> None:
        self._count("deletes")
        self.inner.delete(key)

    def delete_many(self, keys: Sequence[str]) -> None:
        self._count("deletes", len(keys))
        self.inner.delete_many(keys)

    def now(self) -> float | None:
        self._count("lists")
        return self.inner.now()

    def touch(self, key: str) -> None:
        self._count("touches")
        self.inner.touch(key)

    def list(self, prefix: str, *, after: str | None = None, limit: int = 1000) -> list[ObjectInfo]:
        self._count("lists")
        return self.inner.list(prefix, after=after, limit=limit)

    def compare_and_swap(self, key: str, data: bytes, expected: str | None) -> str:
        self._count("puts")
        tag = self.inner.compare_and_swap(key, data, expected)
        self._count("bytes_written", len(data))
        return tag

    def clean_uploads(self, older_than: float) -> int:
        return self.inner.clean_uploads(older_than)

    def close(self) -> None:
        self.inner.close()

    def _count(self, what: str, value: float = 1) -> None:
        self._counters.add(f"{what}.{self._tier}", value)


class Breaker:
    """Remembers that something does not work, and when it may be tried again. Thread-safe."""

    def __init__(
        self, failures: int, clock: Callable[[], float] = time.monotonic, longest: float = LONGEST_PAUSE
    ) -> None:
        self._threshold = failures
        self._longest = longest
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = FIRST_PAUSE
        self._until = 0.0
        self.reason = "Ready"
        self.message = ""

    @property
    def closed(self) -> bool:
        """True when the next call may be tried."""
        with self._lock:
            return self._failures < self._threshold or self._clock() >= self._until

    @property
    def healthy(self) -> bool:
        with self._lock:
            return self._failures < self._threshold

    def succeeded(self) -> None:
        with self._lock:
            self._failures, self._pause = 0, FIRST_PAUSE
            self.reason, self.message = "Ready", ""

    def failed(self, reason: str, message: str) -> None:
        with self._lock:
            self._failures += 1
            self.reason, self.message = reason, message
            if self._failures >= self._threshold:
                self._until = self._clock() + self._pause
                self._pause = min(self._pause * 2, self._longest)

    def retry_now(self) -> None:
        """Somebody cannot wait for the end of the pause."""
        with self._lock:
            self._until = 0.0

    def retry_in(self) -> float:
        """Seconds until the next try may be made."""
        with self._lock:
            return max(0.0, self._until - self._clock()) if self._failures >= self._threshold else 0.0


class Tier:
    """`writes` and `reads` fail apart: a full disk can still be read."""

    def __init__(self, name: str, repository: Repository, store: MeteredStore) -> None:
        self.name = name
        self.repository = repository
        self.store = store
        self.speed = Speed(name)
        self.writes = Breaker(1 if name == "disk" else 3, longest=LONGEST_PROBE_PAUSE)
        self.reads = Breaker(3)

    def probe(self) -> bool:
        """Try the store once; the condition says why it failed."""
        try:
            with self.writing():
                self.repository.store.probe()
        except SnapshotError as error:
            if self.writes.healthy:
                self.writes.failed(getattr(error, "reason", "ProbeFailed"), str(error))
            return False
        return True

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Run writes; StoreUnavailable (also at once, while paused) is remembered and passed on."""
        with self._guarded(self.writes):
            yield
        self.reads.succeeded()  # who takes a write can be asked again

    @contextmanager
    def reading(self) -> Iterator[None]:
        with self._guarded(self.reads):
            yield

    @contextmanager
    def _guarded(self, breaker: Breaker) -> Iterator[None]:
        if not breaker.closed:
            raise StoreUnavailable(breaker.reason, f"{self.name} is paused: {breaker.message}")
        try:
            yield
        except StoreUnavailable as error:
            breaker.failed(error.reason, str(error))
            if not breaker.healthy:
                self.repository.forget_seen()
            raise
        except NotFound:
            breaker.succeeded()
            raise
        breaker.succeeded()
