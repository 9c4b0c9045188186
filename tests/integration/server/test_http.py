"""A real uvicorn on loopback over the fake engine: connections, clients, keys, queue, drain."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from contextlib import contextmanager

import httpx
import openai
import pytest

from tests.support import loopback
from tests.support.fake_engine import FakeEngine
from tests.support.fake_snapshots import FakeSnapshots
from tests.support.serving import NAME, serving
from tests.support.stopwatch import Stopwatch
from tests.support.tiny import make_tokenizer

HELLO = [{"role": "user", "content": "Hello there"}]
BODY = {"model": NAME, "messages": HELLO}
ABORT_SECONDS = 0.7


def fake(**options):
    return FakeEngine(make_tokenizer(), snapshots=FakeSnapshots(), **options)


@pytest.fixture
def endless():
    """A server whose engine needs 20 ms per token, minutes per reply: who leaves has not seen the end."""
    engine = fake(token_seconds=0.02)
    engine.reply_to = lambda prompt_tokens, index, params: "Thank you. " * 2000
    with serving(lambda: engine) as running:
        yield running, engine


@pytest.fixture
def quick():
    engine = fake()
    with serving(lambda: engine) as running:
        yield running, engine


def until(condition, seconds=240.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


@contextmanager
def asking(running, path, body):
    """A connection on which the request was sent."""
    payload = httpx.Request("POST", running.url + path, json=body).read()
    with socket.create_connection(("127.0.0.1", running.server.ports[0])) as sock:
        head = ["host: x", "content-type: application/json", f"content-length: {len(payload)}"]
        sock.sendall("\r\n".join([f"POST {path} HTTP/1.1", *head, "", ""]).encode() + payload)
        yield sock


def leave(sock, engine):
    """Hang up; the engine is told at once."""
    with Stopwatch() as watch:
        left_at = time.monotonic()
        sock.close()
        until(lambda: not engine.running)
        until(lambda: engine.aborted)
    assert engine.aborted[-1][1] - left_at - watch.late < ABORT_SECONDS


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_dropped_connection_aborts(endless, path, stream):
    running, engine = endless
    body = BODY if "chat" in path else {"model": NAME, "prompt": "Hello", "max_tokens": 4000}
    with asking(running, path, {**body, "stream": stream}) as sock:
        until(lambda: engine.running)
        if stream:
            assert b"200 OK" in sock.recv(65536)
        leave(sock, engine)
    until(lambda: running.server.state.admission.inside == 0)


def test_leaving_in_the_middle_of_a_prefill_aborts(quick):
    """Before the first token there is nothing to send, so only the disconnect itself can tell."""
    running, engine = quick
    engine.token_seconds = 3600.0
    with asking(running, "/v1/chat/completions", {**BODY, "stream": True}) as sock:
        until(lambda: engine.running)
        leave(sock, engine)


def test_many_streams_leave_at_once(endless):
    running, engine = endless

    async def leave():
        async with httpx.AsyncClient(base_url=running.url, timeout=240) as client:

            async def one():
                async with client.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as response:
                    async for _ in response.aiter_lines():
                        return

            await asyncio.gather(*(one() for _ in range(20)))

    asyncio.run(leave())
    with Stopwatch() as watch:
        until(lambda: not engine.running)
    assert watch.seconds < ABORT_SECONDS + 0.3
    until(lambda: running.server.state.admission.inside == 0)


def test_tokens_arrive_as_they_are_made(quick):
    """The second is made only when the first was seen."""
    running, engine = quick
    engine.hold = asyncio.Event()
    texts = []
    with loopback.stream("POST", f"{running.url}/v1/chat/completions", json={**BODY, "stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {") and (text := json.loads(line[6:])["choices"][0]["delta"].get("content")):
                texts.append(text)
                running.call(engine.hold.set)
    assert len(texts) > 20
    assert "".join(texts).startswith("Your prompt had")


def test_answers_do_not_wait_for_acknowledgements(quick):
    """Nagle's algorithm with delayed acknowledgements would add 40 ms to every answer but the first on a connection."""
    running, _ = quick
    seconds = []
    with httpx.Client(base_url=running.url, timeout=240) as client:
        while len(seconds) < 20 or (min(seconds[1:]) >= 0.03 and len(seconds) < 1000):  # a busy machine is slow, too
            started = time.perf_counter()
            client.get("/health/live")
            seconds.append(time.perf_counter() - started)
    assert min(seconds[1:]) < 0.03


def test_pipelined_keep_alive(quick):
    """One connection serves request after request, plain and streamed."""
    running, _ = quick
    with httpx.Client(base_url=running.url, limits=httpx.Limits(max_connections=1), timeout=240) as client:
        for stream in (False, True, False):
            assert client.post("/v1/chat/completions", json={**BODY, "stream": stream}).status_code == 200
        assert client.post("/v1/chat/completions", json={}).status_code == 400
        assert client.get("/health/ready").status_code == 200


def test_openai_client(quick):
    running, engine = quick
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == [NAME]
    reply = client.chat.completions.create(
        model=NAME,
        messages=HELLO,
        temperature=0,
        max_tokens=5,
        logprobs=True,
        top_logprobs=2,
        extra_body={"conversation_id": "c", "top_k": 3},
    )
    assert reply.choices[0].message.content == "Your prom"
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.prompt_tokens_details.cached_tokens == 0
    assert reply.model_extra["engram"]["conversation_id"] == "c"
    assert len(reply.choices[0].logprobs.content) == 5
    assert engine.requests[0][1].top_k == 3
    text = client.completions.create(model=NAME, prompt="Hello", max_tokens=5, echo=True)
    assert text.choices[0].text == "HelloYour prom"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=NAME, messages=HELLO, temperature=9)
    assert (caught.value.param, caught.value.status_code) == ("temperature", 400)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4o", messages=HELLO)


def test_openai_stream(quick):
    running, _ = quick
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    stream = client.chat.completions.create(
        model=NAME, messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text.startswith("Your prompt had")
    assert chunks[-1].usage.total_tokens > 0
    assert chunks[-1].model_extra["engram"]["turn_number"] == 1
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"


def test_openai_stream_that_breaks(quick):
    running, engine = quick
    engine.fail_after = 2
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.APIError, match="a step failed"):
        list(client.chat.completions.create(model=NAME, messages=HELLO, stream=True))


async def test_openai_async(quick):
    running, _ = quick
    async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        replies = await asyncio.gather(
            *(client.chat.completions.create(model=NAME, messages=HELLO, seed=n, temperature=1) for n in range(16))
        )
        assert [f"(seed {n})" in reply.choices[0].message.content for n, reply in enumerate(replies)] == [True] * 16
        stream = await client.chat.completions.create(model=NAME, messages=HELLO, stream=True)
        text = [chunk.choices[0].delta.content async for chunk in stream]
        assert "".join(piece or "" for piece in text).startswith("Your prompt had")


def test_openai_client_is_told_when_to_come_back():
    engine = fake()
    engine.hold = asyncio.Event()
    with serving(lambda: engine, max_num_seqs=1, max_queue=0) as running:
        busy = threading.Thread(
            target=loopback.post, args=(f"{running.url}/v1/chat/completions",), kwargs={"json": BODY}
        )
        busy.start()
        until(lambda: engine.running)
        with pytest.raises(openai.RateLimitError) as caught:
            openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0).chat.completions.create(
                model=NAME, messages=HELLO
            )
        assert int(caught.value.response.headers["retry-after"]) >= 1

        # With retries the client waits and is served: whoever was before it goes on once it was sent away.
        def make_way(response):
            if response.status_code == 429:
                running.call(engine.hold.set)
                busy.join()

        with httpx.Client(event_hooks={"response": [make_way]}, timeout=240) as http:
            client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=5, http_client=http)
            assert client.chat.completions.create(model=NAME, messages=HELLO, max_tokens=1).choices
        assert not busy.is_alive()


def test_keys_over_http(tmp_path):
    (tmp_path / "acme").write_text("secret\n")
    (tmp_path / "admin").write_text("root\n")
    with serving(fake, api_keys_dir=tmp_path) as running:
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{running.url}/v1", api_key="wrong").models.list()
        assert openai.OpenAI(base_url=f"{running.url}/v1", api_key="secret").models.list().data
        assert loopback.get(f"{running.admin_url}/status").status_code == 401
        assert loopback.get(f"{running.admin_url}/metrics").status_code == 200
        assert loopback.get(f"{running.admin_url}/status", headers={"authorization": "Bearer root"}).status_code == 200
        # A body that nobody may send is not read: the answer comes while it is still on its way.
        with socket.create_connection(("127.0.0.1", running.server.ports[0])) as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100000000\r\n\r\n{")
            assert b"401" in sock.recv(65536)


def test_large_bodies_get_an_answer():
    with serving(fake, max_body_bytes=100_000) as running:
        answer = loopback.post(f"{running.url}/v1/completions", content=b"x" * 300_000, timeout=240)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
        assert loopback.get(f"{running.url}/health/ready").status_code == 200


def test_http_is_up_while_the_model_loads():
    loaded = threading.Event()
    engine = fake()

    def load():
        assert loaded.wait(240)
        return engine

    with serving(load, wait=None) as running:
        assert loopback.get(f"{running.url}/health/live").status_code == 200
        for probe in ("startup", "ready"):
            answer = loopback.get(f"{running.url}/health/{probe}")
            assert (answer.status_code, answer.json()["status"]) == (503, "loading")
        for path in ("/v1/models", "/v1/snapshots"):
            answer = loopback.get(running.url + path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "loading")
            assert int(answer.headers["retry-after"]) >= 1
        loaded.set()
        running.wait("ready")
        assert loopback.get(f"{running.url}/health/startup").status_code == 200


def test_a_model_that_does_not_load_ends_the_process():
    def load():
        raise ValueError("model has no config.json")

    with serving(load, wait=None) as running:
        assert running.join() == 1


@pytest.fixture
def held():
    """A server whose engine makes one token and waits for `engine.hold`; and one that takes its time to stop."""
    engine = fake()
    engine.hold = asyncio.Event()
    with serving(lambda: engine, drain_timeout=240.0) as running:
        yield running, engine


def test_drain_lets_running_turns_finish(held):
    running, engine = held
    with loopback.stream("POST", f"{running.url}/v1/chat/completions", json={**BODY, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        running.stop()
        running.wait("draining")
        assert loopback.get(f"{running.url}/health/ready").status_code == 503
        refused = loopback.post(f"{running.url}/v1/chat/completions", json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert "retry-after" in refused.headers
        running.call(engine.hold.set)
        assert list(lines)[-2] == "data: [DONE]"
    assert running.join() == 0
    assert engine.drained


def test_drain_ends_in_time():
    """What does not finish is aborted, and the caller is told."""
    engine = fake(token_seconds=60.0)
    with serving(lambda: engine, drain_timeout=1.0) as running:
        failures = []

        def call():
            try:
                failures.append(loopback.post(f"{running.url}/v1/chat/completions", json=BODY, timeout=240))
            except httpx.HTTPError as error:
                failures.append(error)

        caller = threading.Thread(target=call)
        caller.start()
        until(lambda: engine.running)
        with Stopwatch() as watch:
            running.stop()
            running.join()
        assert watch.seconds < 5.0
        caller.join(240)
        assert failures


def test_a_second_signal_does_not_wait():
    engine = fake(token_seconds=60.0)
    with serving(lambda: engine, drain_timeout=60.0) as running:
        caller = threading.Thread(
            target=lambda: loopback.post(f"{running.url}/v1/chat/completions", json=BODY, timeout=240)
        )
        caller.daemon = True
        caller.start()
        until(lambda: engine.running)
        running.stop()
        running.wait("draining")
        with Stopwatch() as watch:
            running.stop()
            assert running.join() == 130
        assert watch.seconds < 8.0


def test_a_port_in_use_is_an_error():
    with (
        serving(fake) as running,
        pytest.raises(ValueError, match="cannot be used"),
        serving(fake, port=running.server.ports[0]),
    ):
        pass


def test_idle_conversations_are_saved():
    engine = fake()
    with serving(lambda: engine, save_turn_end=False, save_idle_seconds=0.2) as running:
        loopback.post(f"{running.url}/v1/chat/completions", json={**BODY, "conversation_id": "c"})
        assert engine.requests[0][2].durable is False
        until(lambda: any("store" in info.tiers for info, _ in engine.snapshots.entries.values()))
