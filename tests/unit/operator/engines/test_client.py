"""The client against a fake admin port: what it sends, what it makes of each answer, and that nothing hangs it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engram_operator.engines import (
    EngineAnswerError,
    EngineBusy,
    EngineError,
    EngineInvalid,
    EngineNotFound,
    EnginePod,
    EngineRefused,
    Engines,
    EngineUnreachable,
    SaveRequest,
    StoreTrouble,
)
from engram_operator.engines import client as client_module
from tests.support import patience
from tests.support.fake_engine_admin import FakeEngineAdmin
from tests.support.loop_time import LoopTime

READ, CHANGE = patience.SECONDS, 2 * patience.SECONDS
POD = EnginePod("m-0", "ns", "uid", "127.0.0.1", True)


@pytest.fixture
def token_file(tmp_path) -> Path:
    path = tmp_path / "token"
    path.write_text("token-1\n")
    return path


@pytest.fixture
async def fake():
    async with FakeEngineAdmin() as fake:
        yield fake


def patient(token_file, fake, **options) -> Engines:
    """A client that no busy machine is too slow for."""
    deadlines = {"read_s": READ, "change_s": CHANGE, "save_s": CHANGE, "sweep_s": CHANGE, "connect_s": READ}
    return Engines(token_file, port=fake.port, **deadlines, **options)


@pytest.fixture
async def engines(fake, token_file):
    made = patient(token_file, fake)
    yield made
    await made.close()


@pytest.fixture
async def silence(fake):
    """What passes while the fake says nothing: any deadline."""
    time = LoopTime()
    fake.silent = lambda: time.skip(CHANGE)
    return time


async def test_a_listing_is_read_page_by_page(fake, engines):
    made = [fake.store.add("c", turn)["snapshot_id"] for turn in range(5)]
    first = await engines.snapshots(POD, limit=3)
    second = await engines.snapshots(POD, limit=3, after=first.next)
    assert [s.snapshot_id for s in (*first.snapshots, *second.snapshots)] == made[::-1]
    assert (first.count, second.next) == (5, None)


async def test_events_go_on_from_the_cursor(fake, engines):
    begin = await engines.events(POD)
    assert begin.lost
    record = fake.store.add("c", 1)
    fake.store.change(record["snapshot_id"], pinned=True)
    fake.store.remove(record["snapshot_id"])
    page = await engines.events(POD, after=begin.next)
    assert [event.kind for event in page.events] == ["saved", "changed", "deleted"]
    assert not page.lost
    assert (await engines.events(POD, after=page.next)).events == ()
    fake.store.forget_events()
    assert (await engines.events(POD, after=page.next)).lost


async def test_a_save_sends_what_was_asked_for_and_nothing_else(fake, engines):
    fake.live["my chat"] = 4
    (saved,) = await engines.save(POD, SaveRequest("my chat", pin=True, ttl_seconds=60, tag="t"))
    assert (saved.turn_number, saved.pinned, saved.tag) == (4, True, "t")
    body = fake.calls("POST", "/snapshots")[0][2]
    assert body == {"conversation_id": "my chat", "pin": True, "tag": "t", "ttl_seconds": 60}


async def test_a_change_sends_only_what_changes(fake, engines):
    record = fake.store.add("c", 1)
    assert (await engines.change(POD, record["snapshot_id"], pinned=True)).pinned
    await engines.change(POD, record["snapshot_id"], ttl_seconds=None)
    assert [call[2] for call in fake.calls("PATCH")] == [{"pinned": True}, {"ttl_seconds": None}]


async def test_delete_show_sweep_status_waiting(fake, engines):
    record = fake.store.add("c", 1)
    assert (await engines.snapshot(POD, record["snapshot_id"])).turn_number == 1
    assert await engines.delete(POD, record["snapshot_id"]) == record["bytes"]
    with pytest.raises(EngineNotFound):
        await engines.delete(POD, record["snapshot_id"])
    assert (await engines.sweep(POD)).snapshots_deleted == 2
    assert (await engines.status(POD)).state_abi == "abi1"
    await engines.drain(POD)
    fake.waiting = {"m": {"waiting": 2, "oldest_seconds": 1.5}}
    assert (await engines.waiting(POD))["m"].oldest_seconds == 1.5


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (400, None, EngineInvalid),
        (422, None, EngineInvalid),
        (401, "invalid_api_key", EngineRefused),
        (403, None, EngineRefused),
        (404, "not_found", EngineNotFound),
        (404, None, EngineAnswerError),  # another server's 404, or an engine without this call, says nothing
        (404, "snapshots_disabled", EngineAnswerError),
        (405, None, EngineAnswerError),
        (409, "conflict", EngineBusy),
        (429, None, EngineBusy),
        (503, None, EngineBusy),
        (503, "snapshot_unavailable", StoreTrouble),
        (500, None, EngineAnswerError),
        (204, None, EngineAnswerError),
        (302, None, EngineAnswerError),
    ],
)
async def test_each_status_has_its_error(fake, engines, status, code, error):
    fake.answer = (status, code)
    fake.retry_after = "60"
    with pytest.raises(EngineError) as caught:
        await engines.delete(POD, "0" * 32)
    assert type(caught.value) is error
    assert caught.value.reason


async def test_the_store_says_why(fake, engines):
    fake.denied = True
    record = fake.store.add("c", 1)
    with pytest.raises(StoreTrouble) as caught:
        await engines.delete(POD, record["snapshot_id"])
    assert (caught.value.reason, caught.value.message) == ("AccessDenied", "the bucket refused it")
    assert len(fake.calls("DELETE")) == 1  # the engine has retried already


async def test_a_rotated_token_is_read_again(fake, engines, token_file):
    await engines.status(POD)
    fake.token = "token-2"
    token_file.write_text("token-2")
    await engines.status(POD)
    assert len(fake.requests) == 2  # it was read before it could be refused


async def test_a_token_that_rotates_during_the_call_is_tried_once(fake, token_file):
    """Refused with the old one, then the file has the new one."""
    fake.token = "token-2"
    reads = iter([b"token-1", b"token-2"])

    class File:
        def open(self, _mode):
            token_file.write_bytes(next(reads))
            return token_file.open("rb")

    engines = patient(File(), fake)
    await engines.status(POD)
    assert len(fake.requests) == 2
    await engines.close()


async def test_a_refused_token_is_not_sent_again_and_again(fake, engines):
    fake.token = "another"
    with pytest.raises(EngineRefused):
        await engines.status(POD)
    assert len(fake.requests) == 1


@pytest.mark.parametrize("content", [None, b"", b"\n", b"\xff\xfe", b"two\nlines"])
async def test_without_a_token_nothing_is_sent(fake, engines, token_file, content):
    if content is None:
        token_file.unlink()
    else:
        token_file.write_bytes(content)
    with pytest.raises(EngineRefused):
        await engines.status(POD)
    assert fake.requests == []


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000 + b"\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n" + b"[" * 100_000,
        b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n",
        b'HTTP/1.1 200 OK\r\ncontent-length: 21\r\n\r\n{"deleted": NaN, "x":1',
    ],
)
async def test_an_answer_that_cannot_be_read_is_never_a_deletion(fake, engines, raw):
    fake.raw = raw
    with pytest.raises((EngineAnswerError, EngineUnreachable)):
        await engines.delete(POD, "0" * 32)


async def test_a_body_without_end_is_cut_off(fake, engines, monkeypatch):
    monkeypatch.setattr(client_module, "MAX_BODY", 10_000)
    fake.raw = b"HTTP/1.1 200 OK\r\n\r\n" + b" " * 200_000
    with pytest.raises(EngineAnswerError, match="larger than"):
        await engines.status(POD)


async def test_a_silent_engine_costs_the_deadline_and_no_more(fake, engines, silence):
    asked = asyncio.Event()
    fake.hang, fake.silent = True, asked.set
    call = asyncio.create_task(engines.status(POD))
    await asked.wait()
    silence.skip(READ / 2)
    await asyncio.sleep(0.01)
    assert not call.done()
    silence.skip(READ / 2)
    with pytest.raises(EngineUnreachable, match="did not answer"):
        await call
    assert len(fake.requests) == 1


async def test_a_lost_answer_of_a_save_is_not_repeated(fake, engines, silence):
    fake.live["c"] = 1
    fake.hang_after = True
    with pytest.raises(EngineUnreachable):
        await engines.save(POD, SaveRequest("c"))
    assert len(fake.calls("POST", "/snapshots")) == 1
    assert len(fake.store.snapshots) == 1


async def test_a_broken_connection_is_tried_again_where_that_is_harmless(fake, engines):
    fake.raw = b""
    with pytest.raises(EngineUnreachable):
        await engines.delete(POD, "0" * 32)
    deletes = len(fake.calls("DELETE"))
    with pytest.raises(EngineUnreachable):
        await engines.save(POD, SaveRequest("c"))
    assert deletes >= 3
    assert len(fake.calls("POST")) == 1


async def test_a_busy_engine_is_waited_for_within_the_deadline(fake, engines):
    fake.answer = (503, None)
    fake.retry_after = "0"  # no sooner than the client's own pace

    async def get_ready():
        while not fake.requests:
            await asyncio.sleep(0.01)
        fake.answer = None

    await asyncio.gather(get_ready(), engines.status(POD))
    fake.answer, fake.retry_after = (503, None), "30"
    with pytest.raises(EngineBusy) as caught:
        await engines.status(POD)
    assert caught.value.retry_after_s == 30


async def test_nobody_there(engines, fake):
    nobody = EnginePod("m-9", "ns", "uid", "127.0.0.9", True)
    with pytest.raises(EngineUnreachable, match="takes no connection"):
        await engines.status(nobody)


async def test_every_call_is_counted_with_what_became_of_it(fake, token_file):
    seen: list[tuple[str, str]] = []
    engines = patient(token_file, fake, answered=lambda call, outcome: seen.append((call, outcome)))
    await engines.status(POD)
    with pytest.raises(EngineNotFound):
        await engines.snapshot(POD, "0" * 32)
    await engines.close()
    assert seen == [("status", "ok"), ("show", "EngineNotFound")]


async def test_an_id_cannot_leave_its_place_in_the_path(fake, engines):
    with pytest.raises(EngineError):
        await engines.delete(POD, "../status?x=1")
    assert fake.requests[0][1].startswith("/snapshots/..%2F")


async def test_a_pod_that_is_silent_is_left_alone_for_a_while(fake, token_file, silence):
    """Many silent pods, as behind a network policy, must not take all of the operator's time."""
    now = 0.0
    engines = patient(token_file, fake, clock=lambda: now)
    fake.hang = True
    with pytest.raises(EngineUnreachable, match="did not answer GET"):
        await engines.status(POD)
    for _ in range(3):
        with pytest.raises(EngineUnreachable, match="asked again in 4 s"):
            await engines.delete(POD, "0" * 32)
    now = 5.0
    with pytest.raises(EngineUnreachable, match="did not answer GET"):
        await engines.status(POD)
    now = 10.0
    with pytest.raises(EngineUnreachable, match="asked again in 3 s"):
        await engines.status(POD)
    assert len(fake.requests) == 2
    fake.hang = False
    now = 14.0
    await engines.status(POD)
    await engines.status(POD)
    await engines.close()


async def test_a_save_that_takes_long_says_nothing_about_the_pod(fake, engines, silence):
    fake.hang_after, fake.live["c"] = True, 1
    with pytest.raises(EngineUnreachable):
        await engines.save(POD, SaveRequest("c", tag="t"))
    fake.hang_after = False
    assert (await engines.status(POD)).phase == "ready"
