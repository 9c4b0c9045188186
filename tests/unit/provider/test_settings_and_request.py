"""What the environment and the keyword arguments say, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from engram_litellm.request import ChatRequest, parse, valid_id
from engram_litellm.settings import Settings

USER = [{"role": "user", "content": "hi"}]


def read(settings: Settings | None = None, *, stream: bool = False, **kwargs: Any) -> ChatRequest:
    return parse({"model": "m", "messages": USER, **kwargs}, settings or Settings(), stream=stream)


def test_defaults_without_any_variable() -> None:
    settings = Settings.from_env({"HOME": "/home/u"})
    assert settings == Settings(endpoints_file="/home/u/.local/state/engram/endpoints.json")


def test_every_variable_is_read() -> None:
    settings = Settings.from_env(
        {
            "ENGRAM_BASE_URL": "http://seed",
            "ENGRAM_ENDPOINTS": "http://a, b=http://b ,",
            "ENGRAM_API_KEY": "k",
            "ENGRAM_STATEFUL_MODE": "explicit",
            "ENGRAM_AUTO_SAVE": "false",
            "ENGRAM_TRACKER_REDIS_URL": "redis://r",
            "ENGRAM_TRACKER_TTL": "60",
            "ENGRAM_DISCOVERY": "service",
            "ENGRAM_NAMESPACE": "ns",
            "ENGRAM_SERVICE": "svc",
            "ENGRAM_CLUSTER_DOMAIN": "c.local",
            "ENGRAM_PROXY_TENANT": "team",
            "ENGRAM_WAIT_SECONDS": "0",
            "ENGRAM_DELTA_MIN_BYTES": "10",
            "XDG_STATE_HOME": "/state",
            "KUBERNETES_SERVICE_HOST": "fd00::1",
            "SSL_CERT_FILE": "/ca",
        }
    )
    assert settings.api_base == "http://seed"
    assert settings.endpoints == ("http://a", "b=http://b")
    assert (settings.mode, settings.auto_save, settings.wait) == ("explicit", False, 0.0)
    assert settings.endpoints_file == "/state/engram/endpoints.json"
    assert settings.kubernetes_api == "https://[fd00::1]:443"
    assert settings.proxy_tenant == "team"
    assert settings.delta_min_bytes == 10
    assert Settings.from_env({"ENGRAM_API_BASE": "http://a", "ENGRAM_BASE_URL": "http://b"}).api_base == "http://a"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ENGRAM_STATEFUL_MODE", "sometimes"),
        ("ENGRAM_AUTO_SAVE", "maybe"),
        ("ENGRAM_WAIT_SECONDS", "-1"),
        ("ENGRAM_WAIT_SECONDS", "soon"),
        ("ENGRAM_TRACKER_TTL", "inf"),
        ("ENGRAM_DISCOVERY", "dns"),
        ("ENGRAM_PROXY_TENANT", "org"),
    ],
)
def test_a_wrong_variable_is_named(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name):
        Settings.from_env({name: value})


def test_parameters_and_extra_body_become_the_body() -> None:
    request = read(
        optional_params={
            "temperature": 0.5,
            "max_tokens": 5,
            "max_retries": 4,
            "stream": True,
            "tools": [],
            "response_format": {"type": "json_object"},
            "top_k": 3,
            "extra_body": {"min_p": 0.1, "conversation_id": "c", "auto_save": False},
        }
    )
    assert request.body == {
        "temperature": 0.5,
        "max_tokens": 5,
        "response_format": {"type": "json_object"},
        "top_k": 3,
        "min_p": 0.1,
    }
    assert request.retries == 4
    assert (request.conversation_id, request.auto_save) == ("c", False)


def test_streams_always_ask_for_usage() -> None:
    request = read(stream=True, optional_params={"stream_options": {"include_usage": False}})
    assert request.body == {"stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    ("optional", "field"),
    [
        ({"extra_body": 3}, "extra_body"),
        ({"stateful_mode": "sometimes"}, "stateful_mode"),
        ({"auto_save": "maybe"}, "auto_save"),
        ({"n": 2}, "n must be 1"),
    ],
)
def test_a_wrong_field_is_named(optional: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        read(stream=True, optional_params=optional)


def test_a_message_must_be_an_object() -> None:
    with pytest.raises(ValueError, match="messages"):
        parse({"model": "m", "messages": ["hi"]}, Settings(), stream=False)


def test_the_call_wins_over_the_environment() -> None:
    settings = Settings(api_key="env", mode="stateless", auto_save=False)
    request = read(settings)
    assert (request.mode, request.auto_save) == ("stateless", False)
    assert request.headers["Authorization"] == "Bearer env"
    request = read(settings, api_key="call", optional_params={"stateful_mode": "auto", "auto_save": True})
    assert (request.mode, request.auto_save) == ("auto", True)
    assert request.headers["Authorization"] == "Bearer call"
    assert read(settings, headers={"authorization": "Basic x"}).headers == {"authorization": "Basic x"}


@pytest.mark.parametrize(
    ("kwargs", "session"),
    [
        ({"litellm_params": {"litellm_session_id": "L"}}, "L"),
        ({"litellm_params": {"metadata": {"session_id": "M"}}}, "M"),
        ({"litellm_params": {"litellm_metadata": {"session_id": "M"}}}, "M"),
        ({"litellm_params": {"litellm_session_id": "L", "metadata": {"litellm_session_id_generated": True}}}, None),
        ({"headers": {"X-Session-Id": "h"}}, "h"),
        ({"headers": {"x-engram-conversation-id": "e", "x-session-id": "h"}}, "e"),
        ({"litellm_params": {"proxy_server_request": {"headers": {"X-Acme-Session-Id": "v"}}}}, "v"),
        ({"litellm_params": {"proxy_server_request": {"headers": {"thread-id": "t"}}}}, "t"),
        ({"optional_params": {"user": "alice"}}, None),
        ({"litellm_params": {"litellm_trace_id": "made-up-per-call"}}, None),
    ],
)
def test_sessions_are_found_wherever_litellm_keeps_them(kwargs: dict[str, Any], session: str | None) -> None:
    assert read(**kwargs).session == session


def test_an_echoed_conversation_is_a_hint_below_sessions() -> None:
    reply = {
        "role": "assistant",
        "content": "x",
        "provider_specific_fields": {"engram": {"conversation_id": "echo"}},
    }
    messages = [*USER, reply, *USER]
    assert read(messages=messages).session == "echo"
    assert read(messages=messages, litellm_params={"litellm_session_id": "L"}).session == "L"
    assert all("provider_specific_fields" not in message for message in read(messages=messages).messages)


def test_session_names_become_valid_ids() -> None:
    assert valid_id("chat-1.a_b") == "chat-1.a_b"
    assert valid_id("../../etc/passwd").startswith("s-")
    assert valid_id("ünïcode") != valid_id("unicode")
    assert len(valid_id("x" * 1000)) < 64


def test_a_delegating_proxy_names_the_tenant() -> None:
    metadata = {"user_api_key_hash": "h1", "user_api_key_team_id": "team/1"}
    plain = read(litellm_params={"metadata": metadata})
    assert "x-engram-tenant" not in plain.headers
    team = read(Settings(proxy_tenant="team"), litellm_params={"metadata": metadata})
    assert team.headers["x-engram-tenant"] == valid_id("team/1")
    key = read(Settings(proxy_tenant="key"), litellm_params={"metadata": metadata})
    assert key.headers["x-engram-tenant"] == "h1"


def test_owners_are_apart_by_key_tenant_and_caller() -> None:
    owners = {
        read().owner,
        read(api_key="a").owner,
        read(api_key="b").owner,
        read(headers={"x-engram-tenant": "t"}).owner,
        read(litellm_params={"metadata": {"user_api_key_hash": "h"}}).owner,
    }
    assert len(owners) == 5
