"""What an S3 failure means: try again, get new credentials, or tell the caller, and in which word.

Servers agree on few codes, and an answer to HEAD has only a status. What is not known is taken by its status: 4xx is
final, the rest may pass. Nothing of the SDK leaves this package.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from botocore import exceptions as sdk
from botocore.parsers import ResponseParserError
from urllib3 import exceptions as http

from engram_runtime.errors import Conflict, NotFound, SnapshotError
from engram_runtime.snapshots.io.store import StoreUnavailable


class Kind(Enum):
    MISSING = "missing"
    CONDITION = "condition"  # a conditional write was refused: final
    CONTENDED = "contended"  # a conditional write met another one in flight: may be tried again
    RANGE = "range"  # nothing in the asked range
    CREDENTIALS = "credentials"  # may be cured by reading them again
    TRANSIENT = "transient"
    FINAL = "final"


@dataclass(frozen=True, slots=True)
class Failure:
    """`reason` is a CamelCase word for status conditions. `ambiguous`: the server may have done it nonetheless."""

    kind: Kind
    reason: str
    message: str
    ambiguous: bool = False
    retry_after: float = 0.0  # seconds, as the server asked

    def error(self, action: str, key: str) -> SnapshotError:
        """As the protocol's error. RANGE has no such: readers handle it."""
        if self.kind is Kind.MISSING:
            return NotFound(f"{key} does not exist")
        if self.kind in (Kind.CONDITION, Kind.CONTENDED):
            return Conflict(f"{key} has moved, or exists")
        return StoreUnavailable(self.reason, f"cannot {action} {key}: {self.message}")


class Interrupted(Exception):
    """A body ended early, or its time did. Transient."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


_MISSING = {"NoSuchKey", "NoSuchVersion"}
_CONDITION = {"PreconditionFailed", "ObjectAlreadyExists"}
_CONTENDED = {"ConditionalRequestConflict", "OperationAborted"}
_CREDENTIALS = {
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "InvalidToken",
    "RequestExpired",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
}
_TRANSIENT = {
    "BadDigest": "Checksum",
    "BandwidthLimitExceeded": "Throttled",
    "IncompleteBody": "ConnectionLost",
    "InternalError": "ServerError",
    "RequestTimeout": "Timeout",
    "RequestLimitExceeded": "Throttled",
    "ServiceUnavailable": "ServerError",
    "SlowDown": "Throttled",
    "Throttling": "Throttled",
    "ThrottlingException": "Throttled",
    "TooManyRequests": "Throttled",
    "XAmzContentChecksumMismatch": "Checksum",
    "XAmzContentSHA256Mismatch": "Checksum",
}
_FINAL = {
    "AccessDenied": "AccessDenied",
    "AccountProblem": "AccessDenied",
    "AllAccessDisabled": "AccessDenied",
    "AuthorizationHeaderMalformed": "WrongRegion",
    "EntityTooLarge": "TooLarge",
    "InvalidBucketName": "BucketMissing",
    "InvalidObjectState": "Archived",
    "KMS.DisabledException": "KeyUnavailable",
    "KMS.NotFoundException": "KeyUnavailable",
    "NoSuchBucket": "BucketMissing",
    "NoSuchUpload": "UploadLost",
    "NotImplemented": "NotImplemented",
    "PermanentRedirect": "WrongRegion",
    "QuotaExceeded": "QuotaExceeded",
    "RequestTimeTooSkewed": "ClockSkew",
}
_BY_STATUS = {
    301: "WrongRegion",
    400: "Rejected",
    401: "AccessDenied",
    403: "AccessDenied",
    405: "NotImplemented",
    411: "Rejected",
    507: "QuotaExceeded",
}

# In this order: the first that fits. Timeouts of the SDK and of urllib3 are kinds of their general errors.
_BY_TYPE: tuple[tuple[tuple[type[Exception], ...], Kind, str, bool], ...] = (
    (
        (sdk.NoCredentialsError, sdk.PartialCredentialsError, sdk.CredentialRetrievalError),
        Kind.CREDENTIALS,
        "CredentialsMissing",
        False,
    ),
    ((sdk.SSLError, http.SSLError), Kind.FINAL, "Certificate", False),
    ((sdk.ConnectTimeoutError, http.ConnectTimeoutError), Kind.TRANSIENT, "Timeout", False),
    ((sdk.ReadTimeoutError, http.TimeoutError, TimeoutError), Kind.TRANSIENT, "Timeout", True),
    ((sdk.EndpointConnectionError, sdk.ProxyConnectionError), Kind.TRANSIENT, "Unreachable", False),
    ((sdk.HTTPClientError, http.HTTPError, OSError), Kind.TRANSIENT, "ConnectionLost", True),
    ((sdk.FlexibleChecksumError, sdk.ChecksumError), Kind.TRANSIENT, "Checksum", False),
    ((sdk.IncompleteReadError,), Kind.TRANSIENT, "ConnectionLost", False),
    ((ResponseParserError,), Kind.TRANSIENT, "ServerError", True),
    ((sdk.BotoCoreError,), Kind.FINAL, "Rejected", False),
)


def classify(error: Exception) -> Failure | None:
    """None for what is no failure of the store (a bug must surface as itself)."""
    if isinstance(error, sdk.ClientError):
        return _of_response(error.response)
    if isinstance(error, sdk.HTTPClientError) and isinstance(error.kwargs.get("error"), Interrupted):
        error = error.kwargs["error"]  # raised by a body while it was being sent
    if isinstance(error, Interrupted):
        return Failure(Kind.TRANSIENT, error.reason, str(error))
    for types, kind, reason, ambiguous in _BY_TYPE:
        if isinstance(error, types):
            return Failure(kind, reason, str(error), ambiguous)
    return None


def _of_response(response: dict[str, Any]) -> Failure:
    details = response.get("Error", {})
    meta = response.get("ResponseMetadata", {})
    code, status = str(details.get("Code", "")), int(meta.get("HTTPStatusCode", 0) or 0)
    headers = meta.get("HTTPHeaders", {})
    message = f"{code or status}: {details.get('Message', '')}".strip(": ")[:500]
    wait = _seconds(headers.get("retry-after", ""))
    if code in _MISSING or (status == 404 and code in ("404", "NotFound", "")):
        return Failure(Kind.MISSING, "NotFound", message)
    if code in _CONDITION or status in (304, 412):  # 304: as GET would say it, seen for PUT
        return Failure(Kind.CONDITION, "Conflict", message)
    if code in _CONTENDED or (status == 409 and code not in _FINAL):
        return Failure(Kind.CONTENDED, "Conflict", message)
    if code == "InvalidRange" or status == 416:
        return Failure(Kind.RANGE, "Range", message)
    if code in _CREDENTIALS:
        return Failure(Kind.CREDENTIALS, "CredentialsRefused", message)
    if code in _TRANSIENT:
        return Failure(Kind.TRANSIENT, _TRANSIENT[code], message, ambiguous=status >= 500, retry_after=wait)
    if code == "RequestTimeTooSkewed":
        message = f"{message} (server's clock: {headers.get('date', 'unknown')})"
    if code in _FINAL:
        return Failure(Kind.FINAL, _FINAL[code], message)
    if status == 429:
        return Failure(Kind.TRANSIENT, "Throttled", message, retry_after=wait)
    if status == 408:
        return Failure(Kind.TRANSIENT, "Timeout", message, ambiguous=True)
    if status == 501:
        return Failure(Kind.FINAL, "NotImplemented", message)
    if status in _BY_STATUS or 400 <= status < 500:
        return Failure(Kind.FINAL, _BY_STATUS.get(status, "Rejected"), message)
    return Failure(Kind.TRANSIENT, "ServerError", message, ambiguous=True, retry_after=wait)


def _seconds(text: str) -> float:
    """A Retry-After in seconds; a date or nonsense is no wish."""
    return float(text) if text.isdigit() and len(text) < 6 else 0.0
