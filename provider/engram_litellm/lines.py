"""Lines of a streamed body, split at newlines only.

httpx's own `iter_lines` splits like `str.splitlines`, so also at U+2028 and other characters that JSON may hold
unescaped: a model that writes one would tear its own event apart.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator


class LineSplitter:
    """Feed bytes, get whole lines without their newline; a multi-byte character is never cut."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completes."""
        if b"\n" not in data:
            self._rest += data
            return []
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.rstrip(b"\r").decode("utf-8", "replace") for line in lines]

    def end(self) -> list[str]:
        """What is left when the body ends without a newline."""
        rest, self._rest = self._rest, b""
        return [rest.rstrip(b"\r").decode("utf-8", "replace")] if rest else []


def iterate(chunks: Iterable[bytes]) -> Iterator[str]:
    """Lines of a body."""
    splitter = LineSplitter()
    for chunk in chunks:
        yield from splitter.feed(chunk)
    yield from splitter.end()


async def aiterate(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """Lines of a body, asynchronously."""
    splitter = LineSplitter()
    async for chunk in chunks:
        for line in splitter.feed(chunk):
            yield line
    for line in splitter.end():
        yield line
