"""Bytes of requests and answers, under a deadline that no slow peer can stretch.

A socket timeout bounds the wait for the next byte, not for the last one: a peer that drips one byte a second would
hold a thread for hours. So both directions move in blocks, and the clock is looked at between them.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from engram_runtime.snapshots.clock import Clock
from engram_runtime.snapshots.io.s3.errors import Interrupted

READ_BLOCK = 1 << 20


class Upload(io.RawIOBase):
    """A seekable file over memory that is not copied together first: bytes [start, start + length) of `parts`."""

    def __init__(
        self, parts: Sequence[memoryview | bytes], start: int, length: int, deadline: float, clock: Clock
    ) -> None:
        super().__init__()
        self._parts = [memoryview(part).cast("B") for part in parts]
        self._ends = list(accumulate(len(part) for part in self._parts))
        self._start = start
        self._length = length
        self._deadline = deadline
        self._clock = clock
        self._at = 0

    def __len__(self) -> int:
        return self._length

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        if self._clock.monotonic() > self._deadline:
            raise Interrupted("Timeout", "sending took longer than the deadline")
        left = max(0, self._length - self._at)
        wanted = left if size is None or size < 0 else min(size, left)
        pieces: list[memoryview] = []
        offset = self._start + self._at
        self._at += wanted
        index = bisect_right(self._ends, offset)
        while wanted:
            part = self._parts[index]
            inside = offset - (self._ends[index] - len(part))
            piece = part[inside : inside + wanted]
            pieces.append(piece)
            wanted -= len(piece)
            offset += len(piece)
            index += 1
        return bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces)


def receive(body: Any, view: memoryview, deadline: float, clock: Clock) -> None:
    """Fill `view` from a botocore StreamingBody; Interrupted when the body ends before, or time does.

    A body that is longer is left, and its connection with it.
    """
    # One recv at a time: StreamingBody.read would wait until a whole block is there. (It checks nothing but lengths.)
    stream = body._raw_stream
    done = 0
    try:
        while done < len(view):
            if clock.monotonic() > deadline:
                raise Interrupted("Timeout", f"{done} of {len(view)} bytes within the deadline")
            block = stream.read1(min(len(view) - done, READ_BLOCK))
            if not block:
                raise Interrupted("ConnectionLost", f"the body ended after {done} of {len(view)} bytes")
            view[done : done + len(block)] = block
            done += len(block)
    except BaseException:
        body.close()
        raise
