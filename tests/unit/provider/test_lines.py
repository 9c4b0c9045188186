"""Lines are split at newlines only, wherever the chunks are cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engram_litellm.lines import LineSplitter, aiterate, iterate


@given(st.lists(st.text(st.characters(exclude_characters="\n\r")), max_size=5), st.integers(1, 7))
def test_any_cut_gives_the_same_lines(lines: list[str], size: int) -> None:
    data = "".join(f"{line}\n" for line in lines).encode("utf-8", "replace")
    chunks = [data[start : start + size] for start in range(0, len(data), size)]
    assert list(iterate(chunks)) == [line.encode("utf-8", "replace").decode() for line in lines]


def test_separators_inside_json_do_not_split() -> None:
    line = 'data: {"content": "a\u2028b\u0085c\x0bd"}'
    assert list(iterate([line.encode() + b"\r\n\r\n"])) == [line, ""]


def test_a_last_line_without_newline_is_kept() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"a\nb") == ["a"]
    assert splitter.end() == ["b"]
    assert splitter.end() == []


async def test_asynchronous_lines() -> None:
    async def chunks():
        yield b"a\n\xc3"
        yield b"\xa4\nb"

    assert [line async for line in aiterate(chunks())] == ["a", "ä", "b"]
