"""Keeps the calendar out of the prefix: a template that prints the date shows a conversation the date it began with.

Without this every conversation would be prefilled from its first token after midnight. Where the conversation's stored
record is not at hand, it is recognised by what it has said so far: a digest of the messages up to the last reply.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

MAX_CONVERSATIONS = 65536


class PinnedDates:
    """Newest conversations only; forgetting one costs a prefill, nothing else. One event loop."""

    def __init__(self) -> None:
        self._dates: OrderedDict[bytes, datetime] = OrderedDict()

    def of(self, tenant: str, conversation_id: str | None, messages: Sequence[Mapping[str, Any]]) -> datetime | None:
        """The date this conversation began with, None for one that was not seen here."""
        keys = [_named(tenant, conversation_id)] if conversation_id else []
        replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if replies:
            keys.append(_said(tenant, messages[: replies[-1] + 1]))
        return next((self._dates[key] for key in keys if key in self._dates), None)

    def pin(
        self, tenant: str, conversation_id: str | None, messages: Sequence[Mapping[str, Any]], date: datetime
    ) -> None:
        """`messages` end with the reply."""
        for key in (_said(tenant, messages), *([_named(tenant, conversation_id)] if conversation_id else [])):
            self._dates[key] = date
            self._dates.move_to_end(key)
        while len(self._dates) > MAX_CONVERSATIONS:
            self._dates.popitem(last=False)


def _named(tenant: str, conversation_id: str) -> bytes:
    return hashlib.sha256(json.dumps([tenant, conversation_id]).encode()).digest()


def _said(tenant: str, messages: Sequence[Mapping[str, Any]]) -> bytes:
    # Only what every client sends back unchanged; ids, names and reasoning come back in many spellings.
    said = [[message["role"], str(message["content"]).strip()] for message in messages]
    return hashlib.sha256(json.dumps([tenant, said]).encode()).digest()
