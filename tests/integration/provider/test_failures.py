"""Exceptions, retries, timeouts and cut streams, in all four call styles."""

from __future__ import annotations

from typing import Any

import litellm
import pytest

from tests.integration.provider.styles import HI, STYLES, ask, failure
from tests.support.fake_openai import FakeEngine, Fault
from tests.support.stopwatch import Stopwatch

TOO_LONG = "This model's maximum context length is 4096 tokens, you requested 9999"
STATUSES: dict[int, tuple[type[Exception], str]] = {
    400: (litellm.BadRequestError, "temperature must be >= 0, got -1"),
    401: (litellm.AuthenticationError, "bad key"),
    403: (litellm.PermissionDeniedError, "not yours"),
    404: (litellm.NotFoundError, "model not found"),
    409: (litellm.BadRequestError, "conflict"),
    413: (litellm.BadRequestError, "body too large"),
    422: (litellm.BadRequestError, "unprocessable"),
    429: (litellm.RateLimitError, "queue is full"),
    500: (litellm.InternalServerError, "boom"),
    503: (litellm.ServiceUnavailableError, "draining"),
    504: (litellm.Timeout, "too slow"),
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("status", STATUSES)
def test_every_status_is_litellms_own_exception(style: str, status: int, engine: FakeEngine) -> None:
    kind, message = STATUSES[status]
    engine.faults["m"] = Fault(status=status, message=message)
    error = failure(lambda: ask(style, api_base=engine.url, max_retries=0))
    assert type(error) is kind
    assert message in str(error)
    assert len(engine.chats()) == 1


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("code", ["context_length_exceeded", None])
def test_a_context_that_is_too_long_has_its_own_exception(style: str, code: str | None, engine: FakeEngine) -> None:
    engine.faults["m"] = Fault(status=400, message="prompt too long" if code else TOO_LONG, code=code)
    error = failure(lambda: ask(style, api_base=engine.url))
    assert type(error) is litellm.ContextWindowExceededError


def test_context_window_fallbacks_work(engine: FakeEngine) -> None:
    engine.faults["small"] = Fault(status=400, message=TOO_LONG)
    response = litellm.completion(
        model="engram/small",
        messages=HI,
        api_base=engine.url,
        context_window_fallback_dict={"engram/small": "engram/large"},
    )
    assert response.choices[0].message.content == "hello world"


def test_retry_after_reaches_the_caller(engine: FakeEngine) -> None:
    engine.faults["m"] = Fault(status=429, headers={"retry-after": "7"})
    error = failure(lambda: ask("sync", api_base=engine.url, max_retries=0))
    assert error.response.headers["retry-after"] == "7"


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("retries", "requests"), [(0, 1), (1, 2), (None, 3), (4, 5)])
def test_max_retries_is_honoured(style: str, retries: int | None, requests: int, engine: FakeEngine) -> None:
    engine.faults["m"] = Fault(status=503)
    extra: dict[str, Any] = {} if retries is None else {"max_retries": retries}
    failure(lambda: ask(style, api_base=engine.url, **extra))
    assert len(engine.chats()) == requests


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("fault", [Fault(status=429), Fault(status=502), Fault(status=503), Fault(drop=True)])
def test_what_passes_is_never_seen(style: str, fault: Fault, engine: FakeEngine) -> None:
    engine.faults["m"] = Fault(**{**vars(fault), "times": 2})
    assert ask(style, api_base=engine.url).text == "hello world"
    assert len(engine.chats()) == 3


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("status", [400, 401, 404, 500])
def test_what_will_not_pass_is_not_retried(style: str, status: int, engine: FakeEngine) -> None:
    engine.faults["m"] = Fault(status=status)
    failure(lambda: ask(style, api_base=engine.url, max_retries=3))
    assert len(engine.chats()) == 1


@pytest.mark.parametrize("style", STYLES)
def test_a_slow_server_is_a_timeout(style: str, engine: FakeEngine) -> None:
    engine.faults["m"] = Fault(delay=3600)
    with Stopwatch() as watch:
        error = failure(lambda: ask(style, api_base=engine.url, timeout=0.5))
        assert type(error) is litellm.Timeout
    assert watch.seconds < 2.5
    assert engine.wait_chats(1)
    assert len(engine.chats()) == 1


@pytest.mark.parametrize("style", STYLES)
def test_nobody_there_is_a_connection_error(style: str) -> None:
    error = failure(lambda: ask(style, api_base="http://127.0.0.1:9"))
    assert type(error) is litellm.APIConnectionError


@pytest.mark.parametrize("style", STYLES)
def test_no_known_endpoint_says_where_was_looked(style: str) -> None:
    error = failure(lambda: ask(style))
    assert type(error) is litellm.APIConnectionError
    assert "api_base" in str(error)
    assert "endpoints.json" in str(error)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    "kwargs",
    [
        {"api_base": "not a url"},
        {"extra_body": {"stateful_mode": "sometimes"}},
        {"extra_body": {"auto_save": "maybe"}},
    ],
)
def test_wrong_fields_are_named_before_anything_is_sent(style: str, kwargs: dict[str, Any], engine: FakeEngine) -> None:
    error = failure(lambda: ask(style, **{"api_base": engine.url, **kwargs}))
    assert type(error) is litellm.BadRequestError
    assert (next(iter(kwargs.get("extra_body", kwargs)))) in str(error)
    assert engine.requests == []


@pytest.mark.parametrize("style", ["stream", "astream"])
@pytest.mark.parametrize("fault", [Fault(cut_after=5), Fault(error_event=True)])
def test_a_cut_stream_is_an_error_and_never_retried(style: str, fault: Fault, engine: FakeEngine) -> None:
    engine.faults["m"] = fault
    error = failure(lambda: ask(style, api_base=engine.url, max_retries=5))
    assert isinstance(error, (litellm.APIConnectionError, litellm.InternalServerError))
    assert len(engine.chats()) == 1


@pytest.mark.parametrize("style", ["stream", "astream"])
def test_a_stream_cut_before_its_first_content_begins_again(style: str, engine: FakeEngine) -> None:
    """The server sends the role at once and then computes the prompt: until content came nothing is lost."""
    engine.faults["m"] = Fault(cut_after=1, times=2)
    out = ask(style, api_base=engine.url)
    assert out.text == "hello world"
    assert len({chunk.id for chunk in out.chunks}) == 1
    assert len(engine.chats()) == 3
    engine.faults["m"] = Fault(cut_after=0)
    error = failure(lambda: ask(style, api_base=engine.url, max_retries=1))
    assert type(error) is litellm.APIConnectionError
    assert len(engine.chats()) == 3 + 2


def test_an_error_of_a_sync_stream_comes_before_the_first_chunk(engine: FakeEngine) -> None:
    """A lazy stream would hide it from LiteLLM's retries and fallbacks."""
    engine.faults["m"] = Fault(status=429)
    with pytest.raises(litellm.RateLimitError):
        litellm.completion(model="engram/m", messages=HI, api_base=engine.url, stream=True, max_retries=0)


def test_num_retries_of_litellm_works(engine: FakeEngine) -> None:
    engine.faults["m"] = Fault(status=503, times=2)
    response = litellm.completion(model="engram/m", messages=HI, api_base=engine.url, max_retries=0, num_retries=3)
    assert response.choices[0].message.content == "hello world"


@pytest.mark.parametrize("style", ["stream", "astream"])
def test_several_choices_cannot_be_streamed(style: str, engine: FakeEngine) -> None:
    error = failure(lambda: ask(style, api_base=engine.url, n=2))
    assert type(error) is litellm.BadRequestError
    assert "n must be 1" in str(error)


def test_several_choices_without_a_stream(engine: FakeEngine) -> None:
    response = litellm.completion(model="engram/m", messages=HI, api_base=engine.url, n=2)
    assert [choice.message.content for choice in response.choices] == ["hello world"] * 2
    assert all(choice.message.provider_specific_fields["engram"]["turn_number"] == 1 for choice in response.choices)
