"""Token ids to text, piece by piece, so that the pieces joined are what decoding everything at once gives.

Two things make single-token decoding wrong: a character may span several tokens (bytes of UTF-8), and some tokenizers
drop or add a space depending on the token before. So each piece is the difference of two decodings that share a few
tokens of context, and it is held back while it ends in a replacement character.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

CONTEXT_TOKENS = 5
REMEMBERED_TEXTS = 1 << 16
"""About 16 MB; then they are collected anew."""
REPLACEMENT = "\ufffd"


class Decoder(Protocol):
    """The part of a `transformers` tokenizer that is used here."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


class Remembered:
    """A decoder that knows what it gave for one token and for two: in running text nearly all that is asked.

    One for all sequences of an engine, on its thread.
    """

    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[tuple[bool, int, int], str] = {}

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        if len(token_ids) > 2 or not token_ids:
            return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        key = (skip_special_tokens, token_ids[0], token_ids[1] if len(token_ids) == 2 else -1)
        text = self._texts.get(key)
        if text is None:
            if len(self._texts) >= REMEMBERED_TEXTS:
                self._texts.clear()
            text = self._texts[key] = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text


class Detokenizer:
    """Follows one sequence. `push` returns the text that became certain."""

    def __init__(self, tokenizer: Decoder, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(prompt_ids[-CONTEXT_TOKENS:])
        self._context = 0
        """First token of the shared context."""
        self._read = len(self._ids)
        """Tokens before this one have been turned into text."""
        self._before = self._decode(self._ids)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip) if ids else ""

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids[self._context :])
        # A special token that is skipped adds nothing: it must not become the context, or the next token would be
        # decoded as if it began a text.
        if len(text) <= len(self._before) or text.endswith(REPLACEMENT):
            return ""
        return self._take(text)

    def flush(self) -> str:
        """What was held back, as it decodes now: the sequence ends here."""
        return self._take(self._decode(self._ids[self._context :]))

    def _take(self, text: str) -> str:
        piece = text[len(self._before) :]
        self._context, self._read = self._read, len(self._ids)
        self._before = self._decode(self._ids[self._context : self._read])
        if self._context > 64:  # what lies before the context is never decoded again
            del self._ids[: self._context]
            self._read -= self._context
            self._context = 0
        return piece
