"""Every fault of a network and a server, between the store and moto: the right word, in time, and nothing half done.

Where pauses between tries are not the subject, the store has a clock that nobody waits for. What a socket's own time
limits and deadlines end is tried by the real one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

import pytest

from engram_runtime.errors import Conflict, NotFound
from engram_runtime.snapshots.io.s3.options import S3Options
from engram_runtime.snapshots.io.s3.probe import CLEAN_SECONDS
from engram_runtime.snapshots.io.s3.store import S3Store
from engram_runtime.snapshots.io.store import StoreUnavailable, Truncated
from tests.support.s3_faults import FaultProxy, faulty
from tests.support.s3_process import S3Server, open_store
from tests.support.stopwatch import Stopwatch
from tests.support.store_conformance import MIB, kv_key, noise, ref_key, space
from tests.support.virtual_clock import VirtualClock

DEADLINE = 0.7  # of the hasty store, for faults that last
HASTY_TIMEOUT = 0.2
ALERT_TIMEOUT = 0.5
CONNECT_TIMEOUT = 3.0  # of the hasty store; also what sending one block may take
PART = 5 * MIB
LARGE = PART + MIB  # two parts


@pytest.fixture(scope="module")
def proxy(moto: S3Server) -> Iterator[FaultProxy]:
    with faulty(moto.url) as running:
        yield running


@pytest.fixture(scope="module")
def options(moto: S3Server, proxy: FaultProxy, tmp_path_factory: pytest.TempPathFactory) -> S3Options:
    made = moto.options(tmp_path_factory.mktemp("faults") / "credentials", moto.bucket(), "p/")
    return replace(
        made,
        endpoint_url=proxy.url,
        range_bytes=256 * 1024,
        part_bytes=PART,
        multipart_from_bytes=PART,
    )


@dataclass(frozen=True)
class Opened:
    patient: S3Store
    """With time to try again, by a clock that nobody waits for; its sockets have a minute."""
    alert: S3Store
    """The same, with sockets that soon take silence for silence."""
    unhurried: S3Store
    """The same, ten times as late."""
    brief: S3Store
    """With little time, by the same clock; its sockets have a minute."""
    hasty: S3Store
    """With as little time by the real clock, and sockets that give up before."""
    clock: VirtualClock


@pytest.fixture(scope="module")
def opened(options: S3Options) -> Iterator[Opened]:
    clock = VirtualClock()
    alert = replace(options, read_timeout_seconds=ALERT_TIMEOUT)
    brief = replace(options, deadline_seconds=DEADLINE)
    hasty = replace(brief, connect_timeout_seconds=CONNECT_TIMEOUT, read_timeout_seconds=HASTY_TIMEOUT)
    unhurried = replace(options, read_timeout_seconds=10 * ALERT_TIMEOUT)
    timeless = [open_store(each, clock) for each in (options, alert, unhurried, brief)]
    for store in timeless:
        store.probe()
    found = Opened(*timeless, open_store(hasty), clock)
    while not found.hasty.report:  # a busy machine may need more than one of its deadlines
        with suppress(StoreUnavailable):
            found.hasty.probe()
    yield found
    for store in (*timeless, found.hasty):
        store.close()


@pytest.fixture
def store(opened: Opened, proxy: FaultProxy) -> Iterator[S3Store]:
    proxy.clear()
    yield opened.patient
    proxy.clear()


@pytest.fixture
def brief(opened: Opened, proxy: FaultProxy) -> Iterator[S3Store]:
    proxy.clear()
    yield opened.brief
    proxy.clear()


@pytest.fixture
def hasty(opened: Opened, proxy: FaultProxy) -> Iterator[S3Store]:
    proxy.clear()
    yield opened.hasty
    proxy.clear()


@pytest.fixture
def key(opened: Opened, proxy: FaultProxy) -> str:
    """An object that is there, of several ranges."""
    name = kv_key(space())
    proxy.clear()
    opened.patient.put(name, [noise(MIB)])
    proxy.clear()
    return name


def calls(store: S3Store, key: str) -> dict[str, Callable[[], object]]:
    ref = ref_key(space())
    return {
        "put": lambda: store.put(key, [b"x"]),
        "put_if_absent": lambda: store.put(kv_key(space()), [b"x"], if_absent=True),
        "put_large": lambda: store.put(key, [noise(LARGE)]),
        "get": lambda: store.get(key),
        "get_range": lambda: store.get(key, 5, 10),
        "front": lambda: store.front(key, 100),
        "get_tagged": lambda: store.get_tagged(key),
        "read_into": lambda: store.read_into(key, 0, memoryview(bytearray(MIB - 1))),
        "head": lambda: store.head(key),
        "delete": lambda: store.delete(key),
        "touch": lambda: store.touch(key),
        "list": lambda: store.list("v1/"),
        "compare_and_swap": lambda: store.compare_and_swap(ref, b"x", None),
        "clean_uploads": lambda: store.clean_uploads(time.time()),
        "probe": store.probe,
    }


READS = ("get", "get_range", "front", "get_tagged", "read_into", "head", "list")
WRITES = ("put", "put_if_absent", "put_large", "delete", "touch", "compare_and_swap")
CALLS = (*READS, *WRITES, "clean_uploads", "probe")
FINAL = {
    "denied": ({"status": 403, "code": "AccessDenied"}, "AccessDenied"),
    "skew": ({"status": 403, "code": "RequestTimeTooSkewed"}, "ClockSkew"),
    "bucket_gone": ({"status": 404, "code": "NoSuchBucket"}, "BucketMissing"),
    "quota": ({"status": 403, "code": "QuotaExceeded"}, "QuotaExceeded"),
}
TRANSIENT = {
    "500": ({"status": 500, "code": "InternalError"}, "ServerError"),
    "503": ({"status": 503, "code": "SlowDown"}, "Throttled"),
    "bad_digest": ({"status": 400, "code": "BadDigest"}, "Checksum"),
}
BEGIN_WITH_HEAD = ("head", "touch")  # its answer has no body: 404 is all it says


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("fault", FINAL)
def test_what_will_not_pass_is_said_at_once(store: S3Store, key: str, proxy: FaultProxy, fault: str, call: str) -> None:
    settings, reason = FINAL[fault]
    proxy.inject("answer", **settings)
    error: type[Exception] = StoreUnavailable
    if call in BEGIN_WITH_HEAD:
        error, reason = (NotFound, "") if fault == "bucket_gone" else (StoreUnavailable, reason)
    with pytest.raises(error) as caught:
        calls(store, key)[call]()
    assert getattr(caught.value, "reason", "") == reason
    # A multipart upload that was never begun is not aborted; ranges and the probe's clean-up go side by side.
    assert proxy.injected <= 8


@pytest.mark.parametrize("call", ["get", "read_into", "put", "put_large", "compare_and_swap", "list", "probe"])
@pytest.mark.parametrize("fault", TRANSIENT)
def test_what_may_pass_is_tried_until_the_deadline(
    brief: S3Store, key: str, proxy: FaultProxy, opened: Opened, fault: str, call: str
) -> None:
    settings, reason = TRANSIENT[fault]
    proxy.inject("answer", **settings)
    began = opened.clock.monotonic()
    with pytest.raises(StoreUnavailable) as caught:
        calls(brief, key)[call]()
    assert caught.value.reason == reason
    assert proxy.injected >= 2
    # The probe takes its objects away again.
    assert opened.clock.monotonic() - began < DEADLINE + (CLEAN_SECONDS if call == "probe" else 0)


@pytest.mark.parametrize("call", ["get", "put", "probe"])
def test_tries_end_with_the_real_clocks_deadline(hasty: S3Store, key: str, proxy: FaultProxy, call: str) -> None:
    proxy.inject("answer", status=500, code="InternalError")
    with Stopwatch() as watch, pytest.raises(StoreUnavailable):
        calls(hasty, key)[call]()
    assert proxy.injected >= 1
    assert watch.seconds < DEADLINE + (3 if call == "probe" else 1)


@pytest.mark.parametrize("call", CALLS)
def test_silence_ends_within_the_deadline(hasty: S3Store, key: str, proxy: FaultProxy, call: str) -> None:
    proxy.inject("silence")
    with Stopwatch() as watch:
        with pytest.raises(StoreUnavailable) as caught:
            calls(hasty, key)[call]()
        assert caught.value.reason == "Timeout"
    assert watch.seconds < DEADLINE + HASTY_TIMEOUT + (3 if call == "probe" else 1)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("action", "settings"),
    [
        ("answer", {"status": 500}),
        ("answer", {"status": 503, "code": "SlowDown", "headers": {"Retry-After": "0"}}),
        ("answer", {"status": 400, "code": "RequestTimeout"}),
        ("drop", {}),
        ("silence", {}),
        ("lose_answer", {}),
    ],
)
def test_one_failure_is_not_seen(
    store: S3Store,
    opened: Opened,
    key: str,
    proxy: FaultProxy,
    action: str,
    settings: dict[str, object],
    call: str,
) -> None:
    """Also when the server did it and the answer was lost: a repeated swap is not a conflict with itself."""
    if action == "silence":  # an answer to the second try that is late, too, makes a third, of which this would see
        store = opened.unhurried if call == "put_if_absent" else opened.alert
    proxy.inject(action, times=1, **settings)  # type: ignore[arg-type]
    if call == "put_if_absent" and action == "lose_answer":
        with pytest.raises(Conflict):  # the key is there: true, and harmless for immutable objects
            calls(store, key)[call]()
    else:
        calls(store, key)[call]()
    assert proxy.injected == 1


@pytest.mark.parametrize("call", ["get", "get_range", "front", "get_tagged", "read_into"])
def test_a_truncated_body_is_read_again(store: S3Store, key: str, proxy: FaultProxy, call: str) -> None:
    expected = calls(store, key)[call]()
    proxy.inject("truncate", times=2, method="GET")
    assert calls(store, key)[call]() == expected
    assert proxy.injected == 2


@pytest.mark.parametrize("call", ["get", "front", "read_into"])
def test_a_body_that_is_always_truncated_is_trouble_not_the_end(
    brief: S3Store, key: str, proxy: FaultProxy, call: str
) -> None:
    proxy.inject("truncate", method="GET")
    with pytest.raises(StoreUnavailable) as caught:
        calls(brief, key)[call]()
    assert caught.value.reason == "ConnectionLost"
    assert proxy.injected >= 2


@pytest.mark.parametrize("call", ["get", "front", "read_into"])
def test_a_slow_drip_ends_within_the_deadline(hasty: S3Store, key: str, proxy: FaultProxy, call: str) -> None:
    """Each byte comes in time, the last one never would."""
    proxy.inject("drip", method="GET")
    with Stopwatch() as watch:
        with pytest.raises(StoreUnavailable) as caught:
            calls(hasty, key)[call]()
        assert caught.value.reason == "Timeout"
    assert watch.seconds < DEADLINE + HASTY_TIMEOUT + 1


def test_slow_is_not_broken(store: S3Store, key: str, proxy: FaultProxy) -> None:
    proxy.inject("drip", method="GET")
    assert store.get(key, 0, 10) == noise(10)


def test_a_receiver_that_stalls_ends_within_the_deadline(
    opened: Opened, hasty: S3Store, key: str, proxy: FaultProxy
) -> None:
    proxy.inject("stall", method="PUT")
    with Stopwatch() as watch, pytest.raises(StoreUnavailable):
        hasty.put(key, [noise(LARGE)])
    assert watch.seconds < DEADLINE + CONNECT_TIMEOUT + 2
    assert opened.patient.get(key) == noise(MIB)


def test_wrong_bits_arrive_as_they_are(store: S3Store, key: str, proxy: FaultProxy) -> None:
    """The store does not hash bodies: digests in signed manifests do, above."""
    proxy.inject("flip", times=1, method="GET")
    assert store.get(key, 0, 100) != noise(100)


def test_multipart_that_fails_leaves_nothing(
    store: S3Store, key: str, proxy: FaultProxy, moto: S3Server, options: S3Options
) -> None:
    proxy.inject("answer", status=403, code="AccessDenied", path="partNumber=2")
    fresh = kv_key(space())
    with pytest.raises(StoreUnavailable, match="AccessDenied"):
        store.put(fresh, [noise(2 * PART + 1)])
    with pytest.raises(NotFound):
        store.head(fresh)
    assert "Uploads" not in moto.client().list_multipart_uploads(Bucket=options.bucket)


def test_one_part_is_sent_again_alone(store: S3Store, proxy: FaultProxy) -> None:
    proxy.inject("answer", status=503, code="SlowDown", path="partNumber=2", times=1)
    fresh, data = kv_key(space()), noise(2 * PART + 1)
    store.put(fresh, [data])
    assert proxy.count("PUT", "partNumber=1") + proxy.count("PUT", "partNumber=3") == 2
    assert proxy.count("PUT", "partNumber=2") == 2
    assert store.get(fresh) == data


def test_a_lost_answer_to_the_last_request_of_a_multipart_upload(store: S3Store, proxy: FaultProxy) -> None:
    proxy.inject("lose_answer", times=1, method="POST", path="uploadId=")
    fresh, data = kv_key(space()), noise(LARGE)
    store.put(fresh, [data])
    assert proxy.injected == 1
    assert store.get(fresh) == data


@pytest.mark.parametrize("expected", [None, "current"])
def test_a_swap_whose_answer_was_lost_is_not_lost(store: S3Store, proxy: FaultProxy, expected: str | None) -> None:
    ref = ref_key(space())
    tag = store.compare_and_swap(ref, b"generation 1", None) if expected else None
    proxy.inject("lose_answer", times=1, method="PUT")
    new = store.compare_and_swap(ref, b"generation 2", tag)
    assert proxy.injected == 1
    assert store.get_tagged(ref) == (b"generation 2", new)


def test_a_swap_that_lost_while_its_answer_was_lost_is_a_conflict(store: S3Store, proxy: FaultProxy) -> None:
    ref = ref_key(space())
    tag = store.compare_and_swap(ref, b"generation 1", None)
    store.compare_and_swap(ref, b"somebody else", tag)
    proxy.inject("lose_answer", times=1, method="PUT")
    with pytest.raises(Conflict):
        store.compare_and_swap(ref, b"mine", tag)


def test_a_swap_whose_answer_was_lost_and_that_was_built_upon_is_a_conflict(
    store: S3Store, proxy: FaultProxy, moto: S3Server, options: S3Options
) -> None:
    """It was carried out, and nothing of it can be seen any more: only its writer can know, from what it wrote."""
    other = open_store(replace(options, endpoint_url=moto.url))
    other.probe()
    ref = ref_key(space())
    tag = store.compare_and_swap(ref, b"1", None)
    proxy.inject("lose_answer", times=1, method="PUT")
    built_upon = threading.Event()
    proxy.inject("answer", status=503, code="SlowDown", method="PUT", times=1, hold=built_upon)
    with ThreadPoolExecutor(1) as pool:
        mine = pool.submit(store.compare_and_swap, ref, b"1 mine", tag)
        while proxy.injected < 2:
            assert not mine.done()
            time.sleep(0.005)
        data, now = other.get_tagged(ref)
        assert data == b"1 mine"
        other.compare_and_swap(ref, data + b" other", now)
        built_upon.set()
        with pytest.raises(Conflict):
            mine.result()
    assert store.get(ref) == b"1 mine other"
    other.close()


def test_requests_conflicting_on_the_server_are_tried_again(store: S3Store, proxy: FaultProxy) -> None:
    proxy.inject("answer", status=409, code="ConditionalRequestConflict", method="PUT", times=2)
    store.put(kv_key(space()), [b"x"], if_absent=True)
    proxy.inject("answer", status=409, code="ConditionalRequestConflict", method="PUT")
    with pytest.raises(Conflict):
        store.put(kv_key(space()), [b"x"], if_absent=True)


def test_a_range_past_the_end_is_truncated_not_trouble(store: S3Store, key: str) -> None:
    with pytest.raises(Truncated):
        store.read_into(key, 100, memoryview(bytearray(MIB)))


def test_an_answer_with_another_range_is_not_believed(brief: S3Store, key: str, proxy: FaultProxy) -> None:
    """An answer with another range than asked for never gets into the buffer."""
    proxy.inject("answer", status=206, headers={"Content-Range": "bytes 0-99/1048576", "ETag": '"x"'}, method="GET")
    with pytest.raises(StoreUnavailable) as caught:
        brief.read_into(key, 50, memoryview(bytearray(100)))
    assert caught.value.reason == "ServerError"


def test_nothing_listens(options: S3Options) -> None:
    store = open_store(replace(options, endpoint_url="http://127.0.0.1:1", deadline_seconds=DEADLINE))
    with Stopwatch() as watch:
        with pytest.raises(StoreUnavailable) as caught:
            store.probe()
        assert caught.value.reason == "Unreachable"
    assert watch.seconds < DEADLINE + 3
    store.close()
    with pytest.raises(StoreUnavailable) as caught:
        store.get("v1/a")
