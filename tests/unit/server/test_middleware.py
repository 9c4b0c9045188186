"""What happens around the application: body limits, request ids, and a caller that goes away."""

from __future__ import annotations

import asyncio

import pytest

from engram_runtime.server.middleware import BodyAndDisconnect
from tests.support import patience


async def exchange(app, messages, headers=(), **options):
    """Run the middleware on a script of received messages; what it sent."""
    script = list(messages)
    sent = []

    async def receive():
        if script:
            item = script.pop(0)
            if callable(item):
                return await item()
            return item
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": list(headers)}
    wrapped = BodyAndDisconnect(app, **{"max_bytes": 10, "timeout": patience.SECONDS, **options})
    await wrapped(scope, receive, send)
    return sent


def body(data, more=False):
    return {"type": "http.request", "body": data, "more_body": more}


async def echo(scope, receive, send):
    message = await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": message["body"]})


async def test_bodies_arrive_whole():
    sent = await exchange(echo, [body(b"abc", True), body(b"", True), body(b"def")])
    assert sent[-1]["body"] == b"abcdef"


@pytest.mark.parametrize(
    ("messages", "headers"),
    [
        ([body(b"x" * 11)], []),
        ([body(b"x" * 6, True), body(b"x" * 6)], []),
        ([body(b"x" * 20, True), body(b"x" * 30, True)], []),
        ([], [(b"content-length", b"1000")]),
        ([], [(b"content-length", b"11"), (b"expect", b"100-continue")]),
    ],
)
async def test_large_bodies_are_refused(messages, headers):
    sent = await exchange(echo, messages, headers)
    assert sent[0]["status"] == 413


async def test_slow_bodies_are_refused():
    sent = await exchange(echo, [body(b"x", True)], timeout=0.02)
    assert sent[0]["status"] == 408


async def test_nobody_is_answered_who_left_before_the_end_of_the_body():
    assert await exchange(echo, [body(b"x", True), {"type": "http.disconnect"}]) == []


async def test_work_is_cancelled_when_the_caller_goes():
    stopped = asyncio.Event()
    started = asyncio.Event()

    async def endless(scope, receive, send):
        await receive()
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async def leave():
        await started.wait()
        return {"type": "http.disconnect"}

    assert await exchange(endless, [body(b"x"), leave]) == []
    assert stopped.is_set()


async def test_a_connection_closed_after_the_answer_cancels_nothing():
    finished = asyncio.Event()
    answered = asyncio.Event()

    async def tidy(scope, receive, send):
        await echo(scope, receive, send)
        answered.set()
        await asyncio.sleep(0.02)
        finished.set()

    async def leave():
        await answered.wait()
        return {"type": "http.disconnect"}

    await exchange(tidy, [body(b"x"), leave])
    assert finished.is_set()


async def test_the_application_sees_the_disconnect_too():
    async def listening(scope, receive, send):
        await receive()
        message = await receive()
        assert message == {"type": "http.disconnect"}

    async def leave():
        return {"type": "http.disconnect"}

    await exchange(listening, [body(b"x"), leave])


async def test_errors_of_the_application_pass():
    async def broken(scope, receive, send):
        raise RuntimeError("x")

    with pytest.raises(RuntimeError):
        await exchange(broken, [body(b"x")])


async def test_request_ids(api):
    given = await api.http.get("/health/live", headers={"x-request-id": "trace-1"})
    assert given.headers["x-request-id"] == "trace-1"
    odd = await api.http.get("/health/live", headers={"x-request-id": "bad id\t!"})
    assert odd.headers["x-request-id"] not in ("bad id\t!", "trace-1")
    assert len(odd.headers["x-request-id"]) == 24


async def test_body_limit_over_http(make_api):
    api = make_api(max_body_bytes=2000)
    assert (await api.chat("x" * 500)).status_code == 200
    answer = await api.chat("x" * 3000)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
