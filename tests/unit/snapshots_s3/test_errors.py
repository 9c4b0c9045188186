"""What a failure means, whatever words a server uses; and bodies under a deadline."""

from __future__ import annotations

import time

import pytest
from botocore import exceptions as sdk
from hypothesis import given
from hypothesis import strategies as st
from urllib3 import exceptions as http

from engram_runtime.errors import Conflict, NotFound
from engram_runtime.snapshots.clock import SystemClock
from engram_runtime.snapshots.io.s3.bodies import Upload, receive
from engram_runtime.snapshots.io.s3.errors import Interrupted, Kind, classify
from engram_runtime.snapshots.io.store import StoreUnavailable
from tests.support.virtual_clock import VirtualClock


def answer(status: int, code: str = "", headers: dict[str, str] | None = None) -> sdk.ClientError:
    meta = {"HTTPStatusCode": status, "HTTPHeaders": headers or {}}
    return sdk.ClientError({"Error": {"Code": code, "Message": "text"}, "ResponseMetadata": meta}, "GetObject")


@pytest.mark.parametrize(
    ("status", "code", "kind", "reason"),
    [
        (404, "NoSuchKey", Kind.MISSING, "NotFound"),
        (404, "404", Kind.MISSING, "NotFound"),
        (404, "NoSuchBucket", Kind.FINAL, "BucketMissing"),
        (404, "NoSuchUpload", Kind.FINAL, "UploadLost"),
        (412, "PreconditionFailed", Kind.CONDITION, "Conflict"),
        (412, "", Kind.CONDITION, "Conflict"),
        (304, "", Kind.CONDITION, "Conflict"),
        (409, "ConditionalRequestConflict", Kind.CONTENDED, "Conflict"),
        (409, "OperationAborted", Kind.CONTENDED, "Conflict"),
        (416, "InvalidRange", Kind.RANGE, "Range"),
        (403, "ExpiredToken", Kind.CREDENTIALS, "CredentialsRefused"),
        (403, "InvalidAccessKeyId", Kind.CREDENTIALS, "CredentialsRefused"),
        (403, "SignatureDoesNotMatch", Kind.CREDENTIALS, "CredentialsRefused"),
        (403, "AccessDenied", Kind.FINAL, "AccessDenied"),
        (403, "", Kind.FINAL, "AccessDenied"),
        (403, "RequestTimeTooSkewed", Kind.FINAL, "ClockSkew"),
        (301, "PermanentRedirect", Kind.FINAL, "WrongRegion"),
        (400, "BadDigest", Kind.TRANSIENT, "Checksum"),
        (400, "RequestTimeout", Kind.TRANSIENT, "Timeout"),
        (400, "SomethingNew", Kind.FINAL, "Rejected"),
        (429, "", Kind.TRANSIENT, "Throttled"),
        (500, "InternalError", Kind.TRANSIENT, "ServerError"),
        (501, "NotImplemented", Kind.FINAL, "NotImplemented"),
        (502, "", Kind.TRANSIENT, "ServerError"),
        (503, "SlowDown", Kind.TRANSIENT, "Throttled"),
        (503, "", Kind.TRANSIENT, "ServerError"),
        (507, "InsufficientStorage", Kind.FINAL, "QuotaExceeded"),
    ],
)
def test_answers(status: int, code: str, kind: Kind, reason: str) -> None:
    failure = classify(answer(status, code))
    assert failure is not None
    assert (failure.kind, failure.reason) == (kind, reason)


@pytest.mark.parametrize(
    ("error", "kind", "reason", "ambiguous"),
    [
        (sdk.NoCredentialsError(), Kind.CREDENTIALS, "CredentialsMissing", False),
        (sdk.SSLError(endpoint_url="u", error="e"), Kind.FINAL, "Certificate", False),
        (sdk.ConnectTimeoutError(endpoint_url="u"), Kind.TRANSIENT, "Timeout", False),
        (sdk.ReadTimeoutError(endpoint_url="u"), Kind.TRANSIENT, "Timeout", True),
        (sdk.EndpointConnectionError(endpoint_url="u"), Kind.TRANSIENT, "Unreachable", False),
        (sdk.ConnectionClosedError(endpoint_url="u"), Kind.TRANSIENT, "ConnectionLost", True),
        (sdk.HTTPClientError(error=ValueError("x")), Kind.TRANSIENT, "ConnectionLost", True),
        (sdk.HTTPClientError(error=Interrupted("Timeout", "x")), Kind.TRANSIENT, "Timeout", False),
        (http.ReadTimeoutError(None, "u", "m"), Kind.TRANSIENT, "Timeout", True),  # type: ignore[arg-type]
        (http.ProtocolError("x"), Kind.TRANSIENT, "ConnectionLost", True),
        (ConnectionResetError(), Kind.TRANSIENT, "ConnectionLost", True),
        (sdk.ParamValidationError(report="x"), Kind.FINAL, "Rejected", False),
    ],
)
def test_failures_without_an_answer(error: Exception, kind: Kind, reason: str, ambiguous: bool) -> None:
    failure = classify(error)
    assert failure is not None
    assert (failure.kind, failure.reason, failure.ambiguous) == (kind, reason, ambiguous)


@pytest.mark.parametrize("error", [KeyError("x"), ValueError("x"), RuntimeError("x")])
def test_bugs_are_not_outages(error: Exception) -> None:
    assert classify(error) is None


@pytest.mark.parametrize(
    ("text", "seconds"), [("7", 7.0), ("", 0.0), ("Wed, 21 Oct 2026 07:28:00 GMT", 0.0), ("-1", 0)]
)
def test_the_servers_wish_to_wait(text: str, seconds: float) -> None:
    failure = classify(answer(503, "SlowDown", {"retry-after": text}))
    assert failure is not None
    assert failure.retry_after == seconds


def test_failures_as_errors_of_the_store() -> None:
    def error(status: int, code: str = "") -> Exception:
        failure = classify(answer(status, code))
        assert failure is not None
        return failure.error("read", "some/key")

    assert isinstance(error(404), NotFound)
    assert isinstance(error(412), Conflict)
    denied = error(403, "AccessDenied")
    assert isinstance(denied, StoreUnavailable)
    assert denied.reason == "AccessDenied"
    assert str(denied) == "cannot read some/key: AccessDenied: text"


def test_a_skewed_clock_shows_the_servers() -> None:
    failure = classify(answer(403, "RequestTimeTooSkewed", {"date": "Wed, 21 Oct 2026 07:28:00 GMT"}))
    assert failure is not None
    assert "07:28:00" in failure.message


@given(
    parts=st.lists(st.binary(max_size=20), max_size=8),
    window=st.tuples(st.integers(0, 60), st.integers(0, 60)),
    steps=st.lists(st.integers(1, 9), max_size=30),
    back=st.integers(0, 50),
)
def test_an_upload_reads_like_its_parts_joined(
    parts: list[bytes], window: tuple[int, int], steps: list[int], back: int
) -> None:
    whole = b"".join(parts)
    start, length = min(window[0], len(whole)), window[1]
    length = min(length, len(whole) - start)
    upload = Upload([memoryview(part) for part in parts], start, length, 60.0, VirtualClock())
    assert len(upload) == length
    expected = whole[start : start + length]
    assert b"".join(upload.read(step) for step in steps) == expected[: sum(steps)]
    upload.seek(min(back, length))
    assert upload.read() == expected[min(back, length) :]
    assert upload.read() == b""


def test_bodies_end_with_their_deadline() -> None:
    with pytest.raises(Interrupted, match="deadline"):
        Upload([b"x"], 0, 1, time.monotonic() - 1, SystemClock()).read(1)

    class Body:
        closed = False
        _raw_stream = None

        def close(self) -> None:
            self.closed = True

    body = Body()
    with pytest.raises(Interrupted, match="deadline"):
        receive(body, memoryview(bytearray(1)), time.monotonic() - 1, SystemClock())
    assert body.closed
