"""Single tokens as the API shows them: text, bytes, log-probabilities."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from engram_runtime.engine.outputs import TokenLogprobs

LOWEST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's own stand-in


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins of byte-level BPE (GPT-2): character -> byte."""
    visible = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    table = {chr(byte): byte for byte in visible}
    hidden = (byte for byte in range(256) if byte not in set(visible))
    table.update({chr(256 + offset): byte for offset, byte in enumerate(hidden)})
    return table


class TokenTable:
    """Text and bytes of token ids. A token may be a part of a character: its bytes are exact, its text then is not."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._alphabet = _byte_alphabet()
        decoder = json.loads(tokenizer.backend_tokenizer.to_str()).get("decoder")
        self._byte_level = "ByteLevel" in json.dumps(decoder)
        self._special = frozenset(tokenizer.added_tokens_decoder)
        self.text = lru_cache(maxsize=65536)(self._text)
        self.raw = lru_cache(maxsize=65536)(self._raw)

    def _text(self, token: int) -> str:
        return self.raw(token).decode("utf-8", errors="replace")

    def _raw(self, token: int) -> bytes:
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # padding rows of the embedding have no token
            return b""
        piece = str(piece)
        if token in self._special:
            return piece.encode()
        if self._byte_level and all(char in self._alphabet for char in piece):
            return bytes(self._alphabet[char] for char in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()

    def chat_logprobs(self, entries: Iterable[TokenLogprobs], top: int) -> list[dict[str, Any]]:
        """The `logprobs.content` list of a chat choice."""
        return [
            {
                **self._entry(entry.token_id, entry.logprob),
                "top_logprobs": [self._entry(token, value) for token, value in entry.top[:top]],
            }
            for entry in entries
        ]

    def completion_logprobs(
        self, entries: Sequence[tuple[int, TokenLogprobs | None]], top: int, offset: int
    ) -> dict[str, Any]:
        """The `logprobs` object of a completion choice; an entry is None where there is no prediction (first token)."""
        offsets: list[int] = []
        for token, _ in entries:
            offsets.append(offset)
            offset += len(self.text(token))
        return {
            "tokens": [self.text(token) for token, _ in entries],
            "token_logprobs": [None if entry is None else finite(entry.logprob) for _, entry in entries],
            "top_logprobs": [
                None if entry is None or not top else {self.text(t): finite(v) for t, v in entry.top[:top]}
                for _, entry in entries
            ],
            "text_offset": offsets,
        }

    def prompt_logprobs(self, entries: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
        """One object per prompt token: id -> log-probability and text; None for the first."""
        return [
            None
            if entry is None
            else {
                str(token): {"logprob": finite(value), "decoded_token": self.text(token)}
                for token, value in [(entry.token_id, entry.logprob), *entry.top]
            }
            for entry in entries
        ]

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        raw = self.raw(token)
        return {"token": self.text(token), "logprob": finite(value), "bytes": list(raw)}


def finite(value: float) -> float:
    return value if math.isfinite(value) else LOWEST_LOGPROB
