"""Compare-and-swap for servers that ignore conditions: a head is a log of append-only objects, one per writer and turn.

Entry `<key>/<generation><writer>` (16 and 32 hexadecimal digits; the tag is this name) is written once under a name of
its own, so nothing is overwritten. A writer that swaps generation g puts its entry g + 1 and then lists the log. It has
won if its predecessor is still there and no other entry of its generation or later is; else it takes its entry back and
the swap is a Conflict, which makes its turn a branch. S3 is linearizable per request, and of two writers that both put
before they list at least one sees the other: so at most one swap from one tag succeeds.

Two that see each other: the greater name gives way at once, the smaller one waits for that. What readers may see for a
moment is an entry that is taken back; the snapshot it names is whole and stays reachable by its own branch. A writer
that dies between put and list leaves an entry that counts, if it is alone or the smallest of the newest generation.
"""

from __future__ import annotations

import random
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engram_runtime.errors import Conflict, NotFound
from engram_runtime.snapshots.io.store import ObjectInfo, StoreUnavailable

_ENTRY = re.compile(r"(?P<key>.+)/(?P<name>(?P<generation>[0-9a-f]{16})[0-9a-f]{32})")
AFTER_ENTRIES = "0"  # the character after "/": greater than every entry of a key, smaller than the next key
REREADS = 8
YIELD_SECONDS = 2.0
YIELD_STEP = 0.05


class Plain(Protocol):
    """Unconditional requests below the store's prefix."""

    def plain_put(self, key: str, data: bytes) -> None: ...

    def plain_get(self, key: str) -> bytes: ...

    def plain_list(self, prefix: str, after: str | None, limit: int) -> list[ObjectInfo]: ...

    def remove_all(self, keys: Sequence[str]) -> None: ...


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    info: ObjectInfo

    @property
    def generation(self) -> int:
        return int(self.name[:16], 16)


class AppendOnlyHeads:
    """The register operations of ObjectStore for keys of which `is_register` is true. Thread-safe: no state."""

    def __init__(self, plain: Plain, is_register: Callable[[str], bool]) -> None:
        self._plain = plain
        self._is_register = is_register

    def get_tagged(self, key: str) -> tuple[bytes, str]:
        """The head's bytes and its tag. NotFound, StoreUnavailable."""
        for _ in range(REREADS):
            head = _head(self._entries(key))
            if head is None:
                raise NotFound(f"{key} does not exist")
            try:
                return self._plain.plain_get(head.info.key), head.name
            except NotFound:
                continue  # superseded, or taken back, since the listing
        raise StoreUnavailable("Changing", f"cannot read {key}: it is replaced again and again")

    def head(self, key: str) -> ObjectInfo:
        found = _head(self._entries(key))
        if found is None:
            raise NotFound(f"{key} does not exist")
        return ObjectInfo(key, found.info.size, found.info.modified)

    def compare_and_swap(self, key: str, data: bytes, expected: str | None) -> str:
        """As ObjectStore.compare_and_swap."""
        before = self._entries(key)
        head = _head(before)
        if (None if head is None else head.name) != expected:
            raise Conflict(f"{key} has moved")
        generation = 1 if head is None else head.generation + 1
        name = f"{generation:016x}{secrets.token_hex(16)}"
        mine = f"{key}/{name}"
        self._plain.plain_put(mine, data)
        try:
            after = self._settled(key, name, generation)
            if not _won(after, name, generation, expected):
                raise Conflict(f"{key} has moved")
        except BaseException:
            # Also when the listing failed: an unknown outcome must not become a head later on.
            self._plain.remove_all([mine])
            raise
        self._plain.remove_all([entry.info.key for entry in after if entry.generation < generation])
        return name

    def delete(self, key: str) -> None:
        self._plain.remove_all([entry.info.key for entry in self._entries(key)])

    def touch(self, key: str) -> None:
        data, tag = self.get_tagged(key)
        self._plain.plain_put(f"{key}/{tag}", data)  # the same bytes under the same name

    def listing(self, prefix: str, after: str | None, limit: int) -> list[ObjectInfo]:
        """As ObjectStore.list, with one line for each register."""
        found: list[ObjectInfo] = []
        log: list[_Entry] = []
        register = ""
        position = after
        if after is not None and self._is_register(after):
            position = after + AFTER_ENTRIES
        while len(found) < limit:
            page = self._plain.plain_list(prefix, position, 1000)
            for info in page:
                key, entry = self._split(info)
                if register and key != register:
                    found.append(_collapsed(register, log))
                    register, log = "", []
                if entry is None:
                    found.append(info)
                else:
                    register = key
                    log.append(entry)
            if len(page) < 1000:
                break
            position = page[-1].key
        if register and len(found) < limit:
            found.append(_collapsed(register, log))
        return found[:limit]

    def _split(self, info: ObjectInfo) -> tuple[str, _Entry | None]:
        match = _ENTRY.fullmatch(info.key)
        if match is None or not self._is_register(match["key"]):
            return info.key, None
        return match["key"], _Entry(match["name"], info)

    def _settled(self, key: str, name: str, generation: int) -> list[_Entry]:
        """The log after my put, when those that must give way to me have had time to do so."""
        until = time.monotonic() + YIELD_SECONDS
        while True:
            entries = self._entries(key)
            rivals = [e.name for e in entries if e.generation == generation and e.name != name]
            newer = any(e.generation > generation for e in entries)
            if not rivals or newer or min(rivals) < name or time.monotonic() > until:
                return entries
            time.sleep(random.uniform(YIELD_STEP / 2, YIELD_STEP))

    def _entries(self, key: str) -> list[_Entry]:
        """The log, ascending."""
        found: list[_Entry] = []
        after = None
        while True:
            page = self._plain.plain_list(f"{key}/", after, 1000)
            for info in page:
                entry = self._split(info)[1]
                if entry is not None:
                    found.append(entry)
            if len(page) < 1000:
                return found
            after = page[-1].key


def _head(entries: list[_Entry]) -> _Entry | None:
    """The smallest name of the newest generation: the same choice by every reader."""
    if not entries:
        return None
    newest = max(entry.generation for entry in entries)
    return min((entry for entry in entries if entry.generation == newest), key=lambda entry: entry.name)


def _won(entries: list[_Entry], name: str, generation: int, expected: str | None) -> bool:
    names = {entry.name for entry in entries}
    if {entry.name for entry in entries if entry.generation >= generation} != {name}:
        return False
    return names == {name} if expected is None else expected in names


def _collapsed(key: str, log: list[_Entry]) -> ObjectInfo:
    head = _head(log) or log[-1]
    return ObjectInfo(key, head.info.size, head.info.modified)
