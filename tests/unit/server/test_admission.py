"""The door: a bounded queue, honest phases, places that are always given back."""

from __future__ import annotations

import asyncio

import pytest

from engram_runtime.server.admission import Admission
from engram_runtime.server.errors import ApiError


def ready(**sizes):
    admission = Admission(**{"max_running": 2, "max_queue": 1, **sizes})
    admission.move("ready", "ready")
    return admission


def test_places_are_counted_in_sequences():
    admission = ready()
    with admission.enter(2), admission.enter(1):
        assert admission.inside == 3
        with pytest.raises(ApiError) as caught, admission.enter(1):
            pass
        assert (caught.value.status, caught.value.code) == (429, "queue_full")
        assert int(caught.value.headers["retry-after"]) >= 1
    assert admission.inside == 0
    with pytest.raises(ApiError) as caught, admission.enter(4):
        pass
    assert (caught.value.status, caught.value.param) == (400, "n")


def test_a_failed_request_gives_its_place_back():
    admission = ready()
    with pytest.raises(RuntimeError), admission.enter(1):
        raise RuntimeError("x")
    assert admission.inside == 0


@pytest.mark.parametrize("phase", ["loading", "draining", "failed"])
def test_only_a_ready_server_takes_work(phase):
    admission = ready()
    admission.move(phase, "because")
    with pytest.raises(ApiError, match="because") as caught, admission.enter(1):
        pass
    assert (caught.value.status, caught.value.code) == (503, phase)
    assert "retry-after" in caught.value.headers


async def test_waiting_for_the_last_one():
    admission = ready()
    assert await admission.wait_empty(0.01)
    with admission.enter(1):
        assert not await admission.wait_empty(0.01)
        waiting = asyncio.create_task(admission.wait_empty(5))
        await asyncio.sleep(0)
    assert await waiting


async def test_full_queue_over_http(make_api):
    api = make_api(max_num_seqs=1, max_queue=1)
    api.engine.hold = asyncio.Event()
    running = [asyncio.create_task(api.chat()) for _ in range(2)]
    while len(api.engine.running) < 2:
        await asyncio.sleep(0.001)
    for stream in (False, True):
        answer = await api.chat(stream=stream)
        assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(answer.headers["retry-after"]) >= 1
    api.engine.hold.set()
    assert [(await task).status_code for task in running] == [200, 200]
    assert (await api.chat()).status_code == 200
    too_many = await api.chat(n=3)
    assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "n")


async def test_phases_over_http(make_api):
    api = make_api()
    for phase, ready_status, startup in (("ready", 200, 200), ("draining", 503, 200)):
        api.state.admission.move(phase, phase)
        assert (await api.http.get("/health/ready")).status_code == ready_status
        assert (await api.http.get("/health/startup")).status_code == startup
        assert (await api.http.get("/health/live")).status_code == 200
    answer = await api.chat()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
    assert (await api.http.get("/v1/snapshots")).status_code == 200


async def test_drain_by_the_admin_port(api):
    answer = await api.admin.post("/drain")
    assert answer.json() == {"phase": "draining", "sequences": 0}
    assert (await api.chat()).status_code == 503
    assert (await api.admin.get("/status")).json()["phase"] == "draining"


async def test_a_dead_engine_is_not_live(api):
    api.engine.dead = RuntimeError("out of memory")
    for probe in ("live", "ready"):
        answer = await api.http.get(f"/health/{probe}")
        assert (answer.status_code, answer.json()["status"]) == (503, "dead")
    answer = await api.chat()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
