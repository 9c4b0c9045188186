"""Compare-and-swap for servers that ignore conditions: a head is a log of append-only objects, one per writer and turn.

Entry `<key>/<generation><writer>` (16 and 32 hexadecimal digits; the tag is this name) is written once, under a name of
its own, so that nothing is ever overwritten. The head is the newest generation. Who writes holds a claim: it puts
`<key>/claim<writer>` and lists; S3 is linearizable per request, so of two that put before they list at least one sees
the other. The greater name gives way, the smaller one waits; who is alone reads the log from that same listing,
compares, and puts the next generation. So one swap from a tag succeeds, and readers see settled heads only.

A claim whose writer died is ignored after LEASE_SECONDS of the server's clock, and a living writer gives up long before
that. A request that was stuck in the network for longer can still make a second entry of one generation: the older one
is the head for every reader, the other one is not overwritten either, and its snapshot keeps its anchors and its id.
"""

from __future__ import annotations

import random
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from engram_runtime.errors import Conflict, NotFound
from engram_runtime.snapshots.clock import Clock, SystemClock
from engram_runtime.snapshots.io.store import ObjectInfo, StoreUnavailable

_ENTRY = re.compile(r"(?P<key>.+)/(?P<name>(?:claim|[0-9a-f]{16})[0-9a-f]{32})")
CLAIM = "claim"
AFTER_ENTRIES = "0"  # the character after "/": greater than all below a key, smaller than the next key
PAGE = 1000
REREADS = 8
LEASE_SECONDS = 15.0
HOLD_SECONDS = 5.0  # a claim is used within this time or dropped, and the write made within it again
ACQUIRE_SECONDS = 20.0  # longer than a lease, so that one dead writer is outwaited
PAUSE_SECONDS = 0.05


class Plain(Protocol):
    """Unconditional requests below the store's prefix."""

    def plain_put(self, key: str, data: bytes, within_seconds: float | None = None) -> None: ...

    def plain_get(self, key: str) -> bytes: ...

    def plain_list(self, prefix: str, after: str | None, limit: int) -> list[ObjectInfo]: ...

    def remove_all(self, keys: Sequence[str]) -> None: ...


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    info: ObjectInfo

    @property
    def is_claim(self) -> bool:
        return self.name.startswith(CLAIM)

    @property
    def generation(self) -> int:
        return int(self.name[:16], 16)


class AppendOnlyHeads:
    """The register operations of ObjectStore for keys of which `is_register` is true. Thread-safe: no state."""

    def __init__(self, plain: Plain, is_register: Callable[[str], bool], clock: Clock | None = None) -> None:
        self._plain = plain
        self._clock: Clock = clock or SystemClock()
        self._is_register = is_register

    def get_tagged(self, key: str) -> tuple[bytes, str]:
        """The head's bytes and its tag. NotFound, StoreUnavailable."""
        for _ in range(REREADS):
            head = _head(self._log(key))
            if head is None:
                raise NotFound(f"{key} does not exist")
            try:
                return self._plain.plain_get(head.info.key), head.name
            except NotFound:
                continue  # superseded since the listing
        raise StoreUnavailable("Changing", f"cannot read {key}: it is replaced again and again")

    def head(self, key: str) -> ObjectInfo:
        found = _head(self._log(key))
        if found is None:
            raise NotFound(f"{key} does not exist")
        return ObjectInfo(key, found.info.size, found.info.modified)

    def compare_and_swap(self, key: str, data: bytes, expected: str | None) -> str:
        """As ObjectStore.compare_and_swap."""
        with self._claimed(key) as log:
            head = _head(log)
            if (None if head is None else head.name) != expected:
                raise Conflict(f"{key} has moved")
            generation = 1 if head is None else head.generation + 1
            name = f"{generation:016x}{secrets.token_hex(16)}"
            self._plain.plain_put(f"{key}/{name}", data, HOLD_SECONDS)
            self._plain.remove_all([entry.info.key for entry in log])
        return name

    def delete(self, key: str) -> None:
        if not self._log(key):
            return
        with self._claimed(key) as log:
            self._plain.remove_all([entry.info.key for entry in log])

    def touch(self, key: str) -> None:
        with self._claimed(key) as log:
            head = _head(log)
            if head is None:
                raise NotFound(f"{key} does not exist")
            self._plain.plain_put(head.info.key, self._plain.plain_get(head.info.key), HOLD_SECONDS)

    def listing(self, prefix: str, after: str | None, limit: int) -> list[ObjectInfo]:
        """As ObjectStore.list, with one line for each register."""
        found: list[ObjectInfo] = []
        log: list[_Entry] = []
        register = ""
        position = after
        if after is not None and self._is_register(after):
            position = after + AFTER_ENTRIES
        while len(found) < limit:
            page = self._plain.plain_list(prefix, position, PAGE)
            for info in page:
                key, entry = self._split(info)
                if key != register:
                    found += _collapsed(register, log)
                    register, log = key, []
                if entry is None:
                    found.append(info)
                else:
                    log.append(entry)
            if len(page) < PAGE:
                found += _collapsed(register, log)
                break
            position = page[-1].key
        return found[:limit]

    @contextmanager
    def _claimed(self, key: str) -> Iterator[list[_Entry]]:
        """Nobody else writes this register meanwhile; yields its log. StoreUnavailable when it stays contended."""
        until = self._clock.monotonic() + ACQUIRE_SECONDS
        while True:
            name = f"{CLAIM}{secrets.token_hex(16)}"
            claim = f"{key}/{name}"
            try:
                give_up = self._clock.monotonic() + HOLD_SECONDS
                self._plain.plain_put(claim, b"", HOLD_SECONDS)
                log = self._settled(key, name, give_up)
                if log is not None:
                    yield log
                    return
            finally:
                with suppress(StoreUnavailable):  # it expires
                    self._plain.remove_all([claim])
            if self._clock.monotonic() > until:
                raise StoreUnavailable("Contended", f"cannot write {key}: others do so all the time")
            self._clock.sleep(random.uniform(PAUSE_SECONDS / 2, PAUSE_SECONDS * 4))

    def _settled(self, key: str, name: str, give_up: float) -> list[_Entry] | None:
        """The log as soon as my claim is the only living one; None when I have to give way, or time is up."""
        stored = self._clock.monotonic()
        while True:
            entries = self._entries(key)
            now = self._clock.monotonic()
            mine = next((entry for entry in entries if entry.name == name), None)
            if mine is None or now > give_up:
                return None  # it may be taken for dead: claim anew
            rivals = [entry for entry in entries if entry.is_claim and entry.name != name]
            # At least so old, whatever this machine's clock says.
            dead = [e for e in rivals if mine.info.modified - e.info.modified + now - stored > LEASE_SECONDS]
            if len(dead) == len(rivals):
                self._plain.remove_all([entry.info.key for entry in dead])
                return [entry for entry in entries if not entry.is_claim]
            if min(entry.name for entry in rivals if entry not in dead) < name:
                return None
            self._clock.sleep(random.uniform(PAUSE_SECONDS / 2, PAUSE_SECONDS))

    def _log(self, key: str) -> list[_Entry]:
        return [entry for entry in self._entries(key) if not entry.is_claim]

    def _entries(self, key: str) -> list[_Entry]:
        """The log and the claims, ascending."""
        found: list[_Entry] = []
        after = None
        while True:
            page = self._plain.plain_list(f"{key}/", after, PAGE)
            for info in page:
                owner, entry = self._split(info)
                if entry is not None and owner == key:
                    found.append(entry)
            if len(page) < PAGE:
                return found
            after = page[-1].key

    def _split(self, info: ObjectInfo) -> tuple[str, _Entry | None]:
        match = _ENTRY.fullmatch(info.key)
        if match is None or not self._is_register(match["key"]):
            return info.key, None
        return match["key"], _Entry(match["name"], info)


def _head(log: Sequence[_Entry]) -> _Entry | None:
    """The oldest entry of the newest generation: the same choice by every reader."""
    if not log:
        return None
    newest = max(entry.generation for entry in log)
    return min((e for e in log if e.generation == newest), key=lambda e: (e.info.modified, e.name))


def _collapsed(key: str, entries: Sequence[_Entry]) -> list[ObjectInfo]:
    head = _head([entry for entry in entries if not entry.is_claim])
    return [] if head is None else [ObjectInfo(key, head.info.size, head.info.modified)]
