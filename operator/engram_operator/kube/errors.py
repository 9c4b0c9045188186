"""Answers of the API server that are not a success, as exceptions that callers tell apart by class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class KubeError(Exception):
    """The API server refused. `status` is the HTTP code, 0 when no answer came."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        self.status = status
        self.reason = reason
        self.message = message
        super().__init__(f"{status} {reason}: {message}")

    @staticmethod
    def of(status: int, payload: Mapping[str, Any] | None) -> KubeError:
        """The exception for an HTTP status and its `Status` object, when there is one."""
        payload = payload or {}
        reason = str(payload.get("reason") or "Unknown")
        message = str(payload.get("message") or f"the API server answered {status}")
        if status == 500 and any(words in message for words in _UNREADABLE):
            # A field that the kind does not have, a quantity that is none: answered as the server's own fault.
            return Invalid(status, "Invalid", message)
        if status == 403 and _UNMAPPED in message:
            return KindUnknown(status, reason, message)
        if status in _CLASSES:
            return _CLASSES[status](status, reason, message)
        if status == 500:
            return ServerFailed(status, reason, message)
        return (Unavailable if status >= 500 else KubeError)(status, reason, message)


class NotFound(KubeError):
    """No such object, or no such API."""


class Conflict(KubeError):
    """Changed by another, or made by another, or not the object that the uid named."""


class Invalid(KubeError):
    """The object itself is wrong; trying again cannot help."""


class Forbidden(KubeError):
    """The account lacks the right, or an admission plugin said no, or the namespace takes nothing any more."""


class Expired(KubeError):
    """The place in a list or watch is too old; begin again."""


class Unavailable(KubeError):
    """No answer, or none that says anything about the object; trying later may help."""


class KindUnknown(Unavailable):
    """The server's admission does not know the owner's kind yet: it looks kinds up anew every half a minute, and ours
    may just have been installed. Only where OwnerReferencesPermissionEnforcement is on, as on OpenShift."""


class ServerFailed(Unavailable):
    """The server, or an admission webhook that it asked, failed over this object; it may fail over no other."""


_UNMAPPED = "cannot find RESTMapping"
_UNREADABLE = ("failed to create typed patch object", "failed to convert new object")
_CLASSES: dict[int, type[KubeError]] = {
    400: Invalid,
    401: Forbidden,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Expired,
    422: Invalid,
    429: Unavailable,
}
