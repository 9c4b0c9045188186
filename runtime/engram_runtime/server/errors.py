"""OpenAI-shaped errors: every refusal names the field at fault and carries the right status code.

Clients (openai, litellm, the provider) decide by status and `code` whether to retry, to shorten the context or to give
up, so the mapping is made in this one place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match

from engram_runtime.errors import CapacityError, Conflict, EngineDeadError, NotFound, SnapshotError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
# A tier's reason as a condition says it; what is not here is Degraded.
STORE_REASONS = {
    "AccessDenied": "AccessDenied",
    "CredentialsMissing": "AccessDenied",
    "CredentialsRefused": "AccessDenied",
    "PermissionDenied": "AccessDenied",
    "BucketMissing": "BucketNotFound",
    "Certificate": "TLSError",
    "Unreachable": "Unreachable",
    "Timeout": "Unreachable",
    "ConnectionLost": "Unreachable",
}
METHODS = ("DELETE", "GET", "PATCH", "POST", "PUT")


class ApiError(Exception):
    """A response that is not a success. `param` is the field's path as the client wrote it ("messages[0].content")."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = {} if retry_after is None else {"retry-after": str(retry_after)}

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, headers=self.headers)


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """400 about one field."""
    return ApiError(400, message, param=param, code=code)


def store_reason(reason: str) -> str:
    """AccessDenied, BucketNotFound, TLSError, Unreachable or Degraded."""
    return STORE_REASONS.get(reason, "Degraded")


def translate(error: BaseException) -> ApiError:
    """What a client should see of an error from below the server."""
    match error:
        case ApiError():
            return error
        case CapacityError():
            return invalid(_field(error), str(error), "context_length_exceeded")
        case ValueError():
            return invalid(_field(error), str(error))
        case NotFound():
            return ApiError(404, str(error), code="not_found")
        case Conflict():
            return ApiError(409, str(error), code="conflict")
        case EngineDeadError():
            return ApiError(503, f"the engine stopped: {error}", code="engine_dead", retry_after=5)
        case SnapshotError():
            unavailable = ApiError(503, str(error), code="snapshot_unavailable", retry_after=5)
            # For the operator, whose conditions carry the word; people have the message.
            unavailable.headers["x-engram-store-reason"] = store_reason(getattr(error, "reason", ""))
            return unavailable
        case _:
            return ApiError(500, f"internal error: {type(error).__name__}")


def _field(error: BaseException) -> str | None:
    """Engine and snapshot errors name the field first ("temperature must be ...")."""
    word = str(error).split(" ", 1)[0].rstrip(":")
    return word if word.isidentifier() and word.islower() else None


def path_of(parts: Sequence[int | str], body: Any, missing: bool = False) -> str | None:
    """A pydantic location as the client would write it: follow the body, drop what names a branch of a union.

    With `missing`, the last part is the name of a field that the body lacks.
    """
    text = ""
    here = body
    for index, part in enumerate(parts):
        if isinstance(part, int):
            if isinstance(here, list):
                text += f"[{part}]"
                here = here[part] if 0 <= part < len(here) else None
        elif isinstance(here, dict) and (part in here or (missing and index == len(parts) - 1)):
            text += f".{part}" if text else part
            here = here.get(part)
    return text or None


def from_validation(errors: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """The deepest error is the one inside the union member that fitted best."""
    error = max(errors, key=lambda item: len(item["loc"]))
    parts = list(error["loc"])
    place = parts.pop(0) if parts and parts[0] in ("body", "query", "path", "header") else "body"
    if error["type"] == "json_invalid":
        return invalid(None, f"the body is not valid JSON: {error.get('ctx', {}).get('error', error['msg'])}")
    missing = error["type"] == "missing"
    param = path_of(parts, body, missing) if place == "body" else ".".join(str(part) for part in parts)
    message = "is required" if missing else str(error["msg"]).removeprefix("Value error, ")
    if param is None and error["type"] == "value_error":
        param = _field(ValueError(message))
    if error["type"] == "extra_forbidden":
        return invalid(param, f"{param} is not a field this server knows", "unknown_field")
    if param is None:
        return invalid(None, f"the body must be a JSON object with the fields of this call: {message}")
    # A validator of our own already names its field.
    return invalid(param, message if message.startswith(param) else f"{param}: {message}")


def _takes(app: FastAPI, request: Request, method: str) -> bool:
    scope = {**request.scope, "method": method}
    return any(route.matches(scope)[0] is Match.FULL for route in app.routes)


def install(app: FastAPI) -> None:
    """Every error of the application leaves in the one shape."""

    async def api_error(_: Request, error: Exception) -> JSONResponse:
        return translate(error).response()

    async def validation(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return from_validation(error.errors(), error.body).response()

    async def http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            return ApiError(404, f"there is no {request.method} {request.url.path}", code="unknown_url").response()
        if error.status_code == 405:
            refused = ApiError(405, f"{request.url.path} does not take {request.method}")
            refused.headers["allow"] = ", ".join(method for method in METHODS if _takes(app, request, method))
            return refused.response()
        return ApiError(error.status_code, str(error.detail)).response()

    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(HTTPException, http_error)
    for kind in (ApiError, ValueError, NotFound, Conflict, SnapshotError, EngineDeadError):
        app.add_exception_handler(kind, api_error)
    app.add_exception_handler(Exception, api_error)
