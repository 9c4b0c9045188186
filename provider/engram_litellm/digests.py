"""Rolling digests: one SHA-256 per message boundary, scoped by tenant.

A digest says "this history, of this tenant, for this model". It is only a lookup key: it locates the conversation and
the replica that holds its state; what may be restored is decided by the server, which verifies token ids. The seed
holds everything that a template renders in front of the messages, so other tools or template options never match.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from engram_litellm.canonical import as_mapping, canonical

_TOOL_FIELDS = ("name", "description", "parameters", "strict")


def scope(api_key: str | None, tenant: str | None = None, caller: str | None = None) -> str:
    """A short name for "whose state": a hash of the API key, the delegated tenant and the proxy's caller."""
    return hashlib.sha256(json.dumps([api_key, tenant, caller]).encode()).hexdigest()[:16]


def seed(owner: str, model: str, body: Mapping[str, Any]) -> bytes:
    """The digest before the first message: owner, model, and what the request renders in front of the messages."""
    tools = []
    for tool in body.get("tools") or ():
        tool = as_mapping(tool)
        function = as_mapping(tool.get("function") or tool)
        tools.append({key: function[key] for key in _TOOL_FIELDS if function.get(key) is not None})
    fields = [owner, model, tools, body.get("chat_template_kwargs") or {}]
    return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":"), default=str).encode()).digest()


def extend(digest: bytes, message: Mapping[str, Any]) -> bytes:
    """The digest after one more message."""
    state = hashlib.sha256(digest)
    state.update(canonical(message))
    return state.digest()


def chain(start: bytes, messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """One digest per message boundary: element i covers messages[0..i]."""
    out = []
    for message in messages:
        start = extend(start, message)
        out.append(start)
    return out


def root(digests: Sequence[bytes], messages: Sequence[Mapping[str, Any]]) -> bytes:
    """The digest at the first user message: the part of a conversation that every worker sees at every turn.

    Workers that share nothing still agree on it, so a conversation without an id stays on one replica.
    """
    for digest, message in zip(digests, messages, strict=True):
        if message.get("role") not in ("system", "developer"):
            return digest
    return digests[-1]
