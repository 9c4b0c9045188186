"""HTTP answers and transport failures as LiteLLM's own exception classes.

LiteLLM passes its own classes through unchanged, on every version; anything else it maps by rules that differ between
versions (1.90 calls everything a connection error), and then context-window fallbacks, retries and Retry-After stop
working in the Router.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import httpx
from litellm.exceptions import (
    APIConnectionError,
    AuthenticationError,
    BadRequestError,
    ContextWindowExceededError,
    InternalServerError,
    NotFoundError,
    PermissionDeniedError,
    RateLimitError,
    ServiceUnavailableError,
    Timeout,
)

PROVIDER = "engram"
_TOO_LONG = re.compile(r"context[ _](length|window)|maximum context|max_model_len", re.IGNORECASE)


def error_of(status: int, body: bytes) -> tuple[str, str | None]:
    """Message and code of an OpenAI-shaped error body; the start of the body when it has another shape."""
    try:
        error = json.loads(body)["error"]
        if isinstance(error, str):
            return error, None
        code = error.get("code")
        return str(error["message"]), None if code is None else str(code)
    except (ValueError, KeyError, TypeError, AttributeError):
        return body[:500].decode("utf-8", "replace") or f"HTTP {status}", None


def from_status(
    status: int, message: str, model: str, code: str | None = None, headers: Mapping[str, str] | None = None
) -> Exception:
    """The exception for an answer with an error status. `headers` carry Retry-After to the Router."""
    response = httpx.Response(status, headers=dict(headers or {}), request=httpx.Request("POST", "http://engram"))
    if status in (400, 413, 422) and (code == "context_length_exceeded" or _TOO_LONG.search(message)):
        return ContextWindowExceededError(message=message, model=model, llm_provider=PROVIDER, response=response)
    if status == 401:
        return AuthenticationError(message=message, model=model, llm_provider=PROVIDER, response=response)
    if status == 403:
        return PermissionDeniedError(message=message, model=model, llm_provider=PROVIDER, response=response)
    if status == 404:
        return NotFoundError(message=message, model=model, llm_provider=PROVIDER, response=response)
    if status in (408, 504):
        return Timeout(message=message, model=model, llm_provider=PROVIDER)
    if status == 429:
        return RateLimitError(message=message, model=model, llm_provider=PROVIDER, response=response)
    if status == 503:
        return ServiceUnavailableError(message=message, model=model, llm_provider=PROVIDER, response=response)
    if 400 <= status < 500:
        return BadRequestError(message=message, model=model, llm_provider=PROVIDER, response=response)
    return InternalServerError(message=message, model=model, llm_provider=PROVIDER, response=response)


def from_transport(error: Exception, model: str) -> Exception:
    """The exception for a connection that failed or was too slow."""
    message = str(error) or type(error).__name__
    if isinstance(error, httpx.TimeoutException):
        return Timeout(message=message, model=model, llm_provider=PROVIDER)
    return connection_error(message, model)


def connection_error(message: str, model: str) -> Exception:
    """A failure without an HTTP status."""
    return APIConnectionError(message=message, model=model, llm_provider=PROVIDER)


def bad_request(message: str, model: str) -> Exception:
    """A request that is wrong before it is sent."""
    return BadRequestError(message=message, model=model, llm_provider=PROVIDER)
