"""A model that sleeps: its first requests are held, counted, and passed on when it wakes up; or sent away in time."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

import httpx
import pytest

from engram_runtime.activator import upstream
from engram_runtime.activator.config import ActivatorConfig, model_of
from engram_runtime.activator.lifecycle import ActivatorServer
from engram_runtime.server.admin_auth import AdminAccounts
from tests.support import loopback
from tests.support.fake_cluster import AUDIENCE, OPERATOR, OWN_TOKEN, running_cluster
from tests.support.ports import free_port
from tests.support.stopwatch import Stopwatch

HOST = {"host": "m.team.svc.cluster.local:8000"}
BODY = {"model": "m", "messages": []}
SECONDS = 240.0  # for what happens at once unless the machine is busy


class Loopback(ActivatorConfig):
    """All models are on this machine, where their names mean nothing."""

    def upstream_of(self, name):
        return f"http://127.0.0.1:{urlsplit(super().upstream_of(name)).port}"


class Model:
    """A fake engine on a raw socket server: it notes what arrives, byte for byte."""

    def __init__(self, port):
        self.port = port
        self.requests: list[tuple[bytes, bytes]] = []  # head, body
        self.health = 200
        self.open = 0
        self.aborted = 0
        self.stream_seconds = 0.0
        self.next: asyncio.Semaphore | None = None  # each part of an answer takes one
        self.break_off = False
        self.server = None

    async def start(self):
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def stop(self):
        if self.server is not None:
            self.server.close()
            await asyncio.sleep(0)

    async def _serve(self, reader, writer):
        self.open += 1
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET /health/ready "):
                writer.write(b"HTTP/1.1 %d x\r\ncontent-length: 0\r\n\r\n" % self.health)
                await writer.drain()
                return
            body = b""
            lower = head.lower()
            if b"content-length: " in lower:
                body = await reader.readexactly(int(lower.split(b"content-length: ")[1].split(b"\r\n")[0]))
            elif b"transfer-encoding: chunked" in lower:
                while True:
                    size = int((await reader.readline()).strip(), 16)
                    body += (await reader.readexactly(size + 2))[:-2]
                    if size == 0:
                        break
            self.requests.append((head, body))
            if self.break_off:
                return
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n")
            writer.write(b"x-engram-draining: no\r\nconnection: x-secret-hop\r\nx-secret-hop: 1\r\n\r\n")
            for number in range(5):
                if reader.at_eof():
                    break
                if self.next is not None:
                    await self.next.acquire()
                data = b"data: %d\n\n" % number
                writer.write(b"%x\r\n%s\r\n" % (len(data), data))
                await writer.drain()
                if self.stream_seconds:
                    try:
                        await asyncio.wait_for(reader.read(1), self.stream_seconds)
                        self.aborted += 1
                        return
                    except TimeoutError:
                        pass
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.aborted += 1
        finally:
            self.open -= 1
            writer.close()


@asynccontextmanager
async def running(**config):
    """(public URL, admin client, model that is not there yet, server)"""
    model = Model(free_port())
    values = {"upstream": f"http://{{name}}:{model.port}", "port": 0, "admin_port": 0, "poll_seconds": 0.05}
    server = ActivatorServer(Loopback(**{**values, "deadline": SECONDS, "drain_timeout": 2.0, **config}))
    task = asyncio.create_task(server.run(signals=False))
    async with (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.ports[0]}", timeout=SECONDS, headers=HOST) as client,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.ports[1]}", timeout=SECONDS) as admin,
    ):
        try:
            yield client, admin, model, server
        finally:
            server.stop()
            await asyncio.wait_for(task, SECONDS)
            await model.stop()


async def waiting(admin):
    return (await admin.get("/waiting")).json()["models"]


async def until(condition, seconds=SECONDS):
    end = time.monotonic() + seconds
    while True:
        found = await condition()
        if found:
            return found
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.02)


async def counted(admin, outcome, requests):
    """Exactly so many have ended so."""
    text = (await admin.get("/metrics")).text
    count = float(text.split(f'engram_activator_requests_total{{outcome="{outcome}"}} ')[1].split("\n")[0])
    assert count <= requests
    return count == requests


async def empty(admin):
    """Nothing is left of any request."""
    text = (await admin.get("/metrics")).text
    return "engram_activator_waiting 0.0" in text and "engram_activator_held_bytes 0.0" in text


async def test_held_until_the_model_is_there():
    async with running() as (client, admin, model, _):
        with Stopwatch() as watch:
            task = asyncio.create_task(
                client.post("/v1/chat/completions?x=%2Fy", json=BODY, headers={"authorization": "Bearer k"})
            )
            await until(lambda: waiting(admin))
            shown = await waiting(admin)
            assert shown.keys() == {"m"}
            assert shown["m"]["waiting"] == 1
            assert shown["m"]["oldest_seconds"] < 5 + watch.late
            await asyncio.sleep(3.0 - watch.whole)
            await model.start()
            answer = await task
        assert watch.whole >= 3.0
        assert watch.seconds < 8
        assert (answer.status_code, answer.text) == (200, "".join(f"data: {n}\n\n" for n in range(5)))
        assert answer.headers["x-engram-draining"] == "no"
        assert "x-secret-hop" not in answer.headers
        assert answer.headers["connection"] == "close"  # the next one goes to the pods
        ((head, body),) = model.requests
        assert head.startswith(b"POST /v1/chat/completions?x=%2Fy HTTP/1.1\r\n")
        assert b"authorization: bearer k" in head.lower()
        assert b"host: m.team.svc.cluster.local:8000" in head.lower()
        assert json.loads(body) == BODY
        assert await waiting(admin) == {}
        await until(lambda: empty(admin))
        await until(lambda: counted(admin, "forwarded", 1))


async def test_a_model_that_is_not_ready_gets_nothing():
    async with running() as (client, admin, model, _):
        model.health = 503
        await model.start()
        task = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await until(lambda: waiting(admin))
        await asyncio.sleep(0.3)
        assert model.requests == []
        model.health = 200
        assert (await task).status_code == 200


async def test_streams_pass_as_they_come():
    """The model says the next thing only when its client has heard the one before."""
    async with running() as (client, _, model, _server):
        await model.start()
        model.next = asyncio.Semaphore(1)
        heard = []
        async with client.stream("POST", "/v1/chat/completions", json=BODY) as response:
            async for chunk in response.aiter_raw():
                heard.append(chunk)
                model.next.release()
        assert heard == [b"data: %d\n\n" % number for number in range(5)]


async def test_a_body_that_is_still_on_its_way():
    async with running() as (client, admin, model, _):
        go_on = asyncio.Event()

        async def body():
            yield b"first "
            await go_on.wait()
            yield b"second"

        task = asyncio.create_task(client.post("/v1/x", content=body()))
        await until(lambda: waiting(admin))
        await model.start()
        await asyncio.sleep(0.3)
        go_on.set()
        assert (await task).status_code == 200
        assert model.requests[0][1] == b"first second"
        await until(lambda: empty(admin))


async def test_models_are_told_apart_by_host():
    async with running() as (client, admin, _model, _):
        tasks = [
            asyncio.create_task(client.post("/v1/x", json=BODY, headers={"host": host}))
            for host in ("a", "a.team:8000", "B.team.svc")
        ]

        async def all_of_them():
            return {name: entry["waiting"] for name, entry in (await waiting(admin)).items()} == {"a": 2, "b": 1}

        await until(all_of_them)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: empty(admin))
        for host in ("10.1.2.3", "-x", "a_b.c", "", "[::1]:8000", "x" * 64):
            answer = await client.get("/v1/models", headers={"host": host})
            assert answer.status_code in (400, 404), host


async def test_who_goes_away_leaves_nothing():
    async with running() as (client, admin, model, _):
        task = asyncio.create_task(client.post("/v1/x", json=BODY))
        await until(lambda: waiting(admin))
        task.cancel()
        await until(lambda: empty(admin))
        assert await waiting(admin) == {}
        await until(lambda: counted(admin, "gone", 1))
        await model.start()
        model.stream_seconds = SECONDS
        async with client.stream("POST", "/v1/x", json=BODY) as response:
            async for _chunk in response.aiter_raw():
                break

        async def aborted():
            return model.aborted == 1

        await until(aborted)
        await until(lambda: empty(admin))


async def test_the_deadline():
    async with running(deadline=0.4) as (client, admin, _model, _):
        with Stopwatch() as watch:
            answer = await client.post("/v1/x", json=BODY)
        assert watch.whole > 0.3
        assert watch.seconds < 3
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert answer.json()["error"]["code"] == "loading"
        await until(lambda: empty(admin))
        await until(lambda: counted(admin, "timeout", 1))


async def test_more_than_may_wait_is_sent_away():
    async with running(max_waiting=2) as (client, admin, model, _):
        tasks = [asyncio.create_task(client.post("/v1/x", json=BODY)) for _ in range(2)]

        async def two():
            return (await waiting(admin)).get("m", {}).get("waiting") == 2

        await until(two)
        answer = await client.post("/v1/x", json=BODY)
        assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
        await until(lambda: counted(admin, "full", 1))
        await model.start()
        assert [response.status_code for response in await asyncio.gather(*tasks)] == [200, 200]


async def test_bodies_are_bounded_together():
    async with running(max_held_bytes=100_000) as (client, admin, _model, _):
        first = asyncio.create_task(client.post("/v1/x", content=b"x" * 60_000))

        async def held():
            return "engram_activator_held_bytes 60000.0" in (await admin.get("/metrics")).text

        await until(held)
        answer = await client.post("/v1/x", content=b"x" * 60_000)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "full")
        first.cancel()
        await until(lambda: empty(admin))


async def test_a_pod_that_goes_away_between_ready_and_the_request(monkeypatch):
    async with running() as (client, _admin, model, _):
        lies = iter([True, False, False])
        ready = upstream.Upstream.ready

        async def once(self, base):
            return next(lies, None) or await ready(self, base)

        monkeypatch.setattr(upstream.Upstream, "ready", once)
        task = asyncio.create_task(client.post("/v1/x", json=BODY))
        await asyncio.sleep(0.5)
        assert not task.done()
        await model.start()
        assert (await task).status_code == 200
        assert len(model.requests) == 1


async def test_a_model_that_breaks_off_is_not_asked_twice():
    async with running() as (client, admin, model, _):
        await model.start()
        model.break_off = True
        answer = await client.post("/v1/x", json=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "aborted")
        assert len(model.requests) == 1
        await until(lambda: empty(admin))


async def test_draining_finishes_what_is_held_and_takes_nothing_new():
    async with running(drain_timeout=SECONDS) as (client, admin, model, server):
        task = asyncio.create_task(client.post("/v1/x", json=BODY))
        await until(lambda: waiting(admin))
        assert (await admin.get("/health/ready")).status_code == 200
        server.stop()

        async def draining():
            return (await admin.get("/health/ready")).status_code == 503

        await until(draining)
        assert (await admin.get("/health/live")).status_code == 200
        late = await client.post("/v1/x", json=BODY)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "draining")
        await model.start()
        assert (await task).status_code == 200


async def test_who_still_waits_at_the_end_of_a_drain_is_told():
    async with running(drain_timeout=1.0) as (client, admin, _model, server):
        task = asyncio.create_task(client.post("/v1/x", json=BODY))
        await until(lambda: waiting(admin))
        server.stop()
        answer = await task
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")


async def test_the_admin_port_has_nothing_else():
    async with running() as (_client, admin, _model, _):
        assert (await admin.get("/v1/models")).status_code == 404
        assert (await admin.post("/waiting")).status_code == 405
        assert (await admin.get("/health")).json()["status"] == "ready"


async def test_only_named_accounts_are_told_what_waits(tmp_path):
    (tmp_path / "token").write_text(OWN_TOKEN)
    with running_cluster() as cluster:
        accounts = AdminAccounts(AUDIENCE, frozenset({OPERATOR}), cluster.url, tmp_path / "token")
        async with running(admin_accounts=accounts) as (_client, admin, _model, _):
            assert (await admin.get("/waiting")).status_code == 401
            token = {"authorization": f"Bearer {cluster.token()}"}
            assert (await admin.get("/waiting", headers=token)).json() == {"models": {}}
            for path in ("/metrics", "/health", "/health/live"):
                assert (await admin.get(path)).status_code == 200


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("m", "m"),
        ("M.ns:80", "m"),
        ("a-b.c", "a-b"),
        ("1.2.3.4", None),
        ("", None),
        ("a..b", "a"),
        ("-a", None),
        ("a@b", None),
    ],
)
def test_names(host, name):
    assert model_of(host) == name


def test_the_process_is_small_and_drains_on_a_signal():
    ports = free_port(), free_port()
    command = [sys.executable, "-m", "engram_runtime.cli", "activator", "--port", str(ports[0])]
    command += ["--admin-port", str(ports[1]), "--namespace", "team", "--drain-timeout", "3"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ})
    admin = f"http://127.0.0.1:{ports[1]}"

    def when(ready):
        end = time.monotonic() + SECONDS
        while True:
            with suppress(httpx.HTTPError):
                if ready():
                    return
            assert time.monotonic() < end
            time.sleep(0.05)

    try:
        when(lambda: loopback.get(f"{admin}/health/ready").status_code == 200)
        with open(f"/proc/{process.pid}/status") as file:
            resident = next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
        assert resident < 80_000, f"{resident} kB"
        with open(f"/proc/{process.pid}/maps") as file:
            assert "torch" not in file.read()
        with socket.create_connection(("127.0.0.1", ports[0])) as sock:
            sock.sendall(b"POST /v1/x HTTP/1.1\r\nhost: m\r\ncontent-length: 2\r\n\r\n{}")
            when(lambda: "m" in loopback.get(f"{admin}/waiting").json()["models"])
            process.send_signal(signal.SIGTERM)
            assert b"503" in sock.recv(65536)
        _, err = process.communicate(timeout=SECONDS)
        assert process.returncode == 0
        assert "Traceback" not in err
    finally:
        process.kill()
        process.wait()
