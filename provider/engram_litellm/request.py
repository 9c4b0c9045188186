"""What LiteLLM hands to a custom provider, read into one typed value.

Everything of the call arrives in three places: OpenAI parameters and unknown keyword arguments in `optional_params`,
`extra_body` inside it, and sessions, metadata and the proxy's view of the caller in `litellm_params`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from engram_litellm import digests
from engram_litellm.canonical import as_mapping, cleaned, echoed_conversation
from engram_litellm.settings import Settings, parse_flag, parse_mode

DEFAULT_RETRIES = 2
# Ours, never part of the OpenAI body: they are read here and sent by `engram_litellm.call`.
_OURS = ("conversation_id", "branch_name", "restore_from", "auto_save", "stateful_mode", "delta")
_LITELLM_ONLY = ("stream", "max_retries", "stream_options", "extra_body", "model", "messages")
_CONVERSATION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_SESSION_HEADERS = ("x-engram-conversation-id", "x-litellm-session-id", "x-session-id", "session-id", "thread-id")
_VENDOR_SESSION = re.compile(r"x-[a-z0-9-]+-session-id")


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One call. `messages` are as sent (cleaned); `body` holds every other OpenAI field; times are seconds."""

    model: str
    messages: list[dict[str, Any]]
    body: dict[str, Any]
    headers: dict[str, str]
    api_base: str | None
    timeout: float | httpx.Timeout | None
    retries: int
    mode: str
    auto_save: bool
    owner: str  # tenant scope of the tracker
    conversation_id: str | None = None  # given by the caller, sent as it is
    session: str | None = None  # from sessions or an echoed message, made a valid id
    branch_name: str | None = None
    restore_from: str | None = None
    explicit_fields: dict[str, Any] = field(default_factory=dict)  # engram fields the caller gave, sent as given


def parse(kwargs: Mapping[str, Any], settings: Settings, *, stream: bool) -> ChatRequest:
    """Read the keyword arguments of a custom handler. ValueError names the field that is wrong."""
    optional = dict(kwargs.get("optional_params") or {})
    extra = optional.pop("extra_body", None) or {}
    if not isinstance(extra, Mapping):
        raise ValueError(f"extra_body must be an object, got {type(extra).__name__}")
    merged = {**optional, **extra}
    given = {name: merged.pop(name) for name in _OURS if name in merged}
    given = {name: value for name, value in given.items() if value is not None}
    retries = optional.get("max_retries")
    body = {name: value for name, value in merged.items() if name not in _LITELLM_ONLY and value is not None}
    if not body.get("tools", True):
        del body["tools"]  # an empty list is as if absent
    if stream:
        if (body.get("n") or 1) != 1:
            raise ValueError("n must be 1 when streaming: LiteLLM ends the stream with the first choice")
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
    params = kwargs.get("litellm_params") or {}
    metadata = _metadata(params)
    headers = {str(name): str(value) for name, value in (kwargs.get("headers") or {}).items()}
    api_key = kwargs.get("api_key") or settings.api_key
    if api_key and not any(name.lower() == "authorization" for name in headers):
        headers["Authorization"] = f"Bearer {api_key}"
    tenant = _proxy_tenant(settings.proxy_tenant, metadata)
    if tenant is not None:
        headers["x-engram-tenant"] = tenant
    raw = [as_mapping(message) for message in kwargs.get("messages") or ()]
    mode = parse_mode("stateful_mode", given.get("stateful_mode", settings.mode))
    session = _session(params, metadata, headers) or echoed_conversation(raw)
    conversation_id = given.get("conversation_id")
    return ChatRequest(
        model=str(kwargs["model"]),
        messages=[cleaned(message) for message in raw],
        body=body,
        headers=headers,
        api_base=kwargs.get("api_base"),
        timeout=kwargs.get("timeout"),
        retries=DEFAULT_RETRIES if retries is None else max(0, int(retries)),
        mode=mode,
        auto_save=parse_flag("auto_save", given.get("auto_save", settings.auto_save)),
        owner=digests.scope(api_key, tenant or headers.get("x-engram-tenant"), metadata.get("user_api_key_hash")),
        conversation_id=None if conversation_id is None else str(conversation_id),
        session=valid_id(session) if session else None,
        branch_name=given.get("branch_name"),
        restore_from=given.get("restore_from"),
        explicit_fields=given,
    )


def valid_id(text: str) -> str:
    """A session name as a conversation id: itself when it is a valid one, else a hash of it."""
    if _CONVERSATION_ID.fullmatch(text):
        return text
    return "s-" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _metadata(params: Mapping[str, Any]) -> dict[str, Any]:
    """SDK calls put it into `metadata`, some proxy routes into `litellm_metadata`."""
    out: dict[str, Any] = {}
    for name in ("litellm_metadata", "metadata"):
        value = params.get(name)
        if isinstance(value, Mapping):
            out.update(value)
    return out


def _session(params: Mapping[str, Any], metadata: Mapping[str, Any], headers: Mapping[str, str]) -> str | None:
    """The session that the caller named in any of LiteLLM's ways. `user` is never one: a user has many chats."""
    if not metadata.get("litellm_session_id_generated"):  # else LiteLLM made it up for this one call
        for value in (params.get("litellm_session_id"), metadata.get("session_id")):
            if isinstance(value, str) and value:
                return value
    proxied = params.get("proxy_server_request")
    client = proxied.get("headers") if isinstance(proxied, Mapping) else None
    for source in (headers, client if isinstance(client, Mapping) else {}):
        lowered = {str(name).lower(): value for name, value in source.items()}
        vendor = [name for name in sorted(lowered) if _VENDOR_SESSION.fullmatch(name)]
        for name in (*_SESSION_HEADERS, *vendor):
            value = lowered.get(name)
            if isinstance(value, str) and value:
                return value
    return None


def _proxy_tenant(source: str, metadata: Mapping[str, Any]) -> str | None:
    """The tenant that a delegating LiteLLM proxy names for the key, team or user behind a call."""
    fields = {"key": "user_api_key_hash", "team": "user_api_key_team_id", "user": "user_api_key_user_id"}
    value = metadata.get(fields[source]) if source in fields else None
    return valid_id(str(value)) if value else None
