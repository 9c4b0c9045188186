"""An API server that forgets, breaks, refuses and goes away; lost leases: the operator is right again afterwards."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from engram_operator.kube.kinds import LEASES, MODELS, PODS, SERVICES
from engram_operator.kube.lease import LeaseLost
from engram_operator.kube.watches import WatchesEnded
from tests.integration.operator.harness import SOON_S, make, model, running, until
from tests.support.miniapi import MiniApi
from tests.support.stopwatch import Stopwatch

LONG = {"lease_duration_s": 120.0, "lease_renew_s": 90.0, "lease_retry_s": 0.5}


async def test_history_is_gone_and_objects_vanished_meanwhile() -> None:
    with MiniApi() as api:
        for name in ("stays", "goes"):
            api.user.put(model(name))
        app, _ = make(api)
        async with running(app) as task:
            await until(lambda: len(api.user.all(SERVICES)) == 2, task=task)
            await until(lambda: len(app.cache.list(SERVICES)) == 2)
            blocked = api.fail(503, "watch", times=None)
            listing = api.fail(503, "list", times=None)
            api.drop_watches()
            api.user.remove(MODELS, "default", "goes")
            api.user.put(model("comes"))
            api.user.edit(SERVICES, "default", "stays", {"spec": {"selector": {"model": "another"}}})
            api.forget_history()
            blocked.times = listing.times = 0
            await until(lambda: app.cache.get(MODELS, "default", "comes"), task=task)
            await until(lambda: api.user.find(SERVICES, "default", "stays")["spec"]["selector"] == {"model": "stays"})
            # kopf tells nobody of what was deleted while its watch was broken: the audit finds it.
            await until(lambda: app.cache.get(MODELS, "default", "goes") is None, task=task)
            await until(lambda: app.cache.get(SERVICES, "default", "goes") is None)
            assert app.canary.trouble == ""


async def test_the_last_object_of_a_kind_vanished_while_nobody_watched() -> None:
    """The list that the new watch begins with is empty, so it tells of nothing."""
    with MiniApi() as api:
        api.user.put(model())
        app, _ = make(api)
        async with running(app) as task:
            await until(lambda: len(app.cache.list(SERVICES)) == 1, task=task)
            old = api.user.find(SERVICES, "default", "tiny")["metadata"]["uid"]
            blocked = api.fail(503, "watch", times=None)
            listing = api.fail(503, "list", times=None)
            api.drop_watches()
            api.user.remove(SERVICES, "default", "tiny")
            api.forget_history()
            blocked.times = listing.times = 0
            await until(lambda: api.user.all(SERVICES), task=task)
            assert api.user.find(SERVICES, "default", "tiny")["metadata"]["uid"] != old


async def test_a_watch_that_cannot_go_on_ends_the_process_and_the_next_one_is_right() -> None:
    with MiniApi() as api:
        first, _ = make(api)
        async with running(first, fails=True) as task:
            api.user.put(model())
            await until(lambda: api.user.all(SERVICES), task=task)
            api.gone_as_status = True  # kopf gives up on an answer that no API server gives to a watch
            api.forget_history()
            api.user.remove(SERVICES, "default", "tiny")
            api.drop_watches()
            # Whichever is noticed first: kopf cancels our workers too when it fails.
            with pytest.raises((WatchesEnded, RuntimeError)):
                await asyncio.wait_for(task, SOON_S)
        api.gone_as_status = False
        second, _ = make(api)  # the container restarts in its pod: the lease is still its own
        async with running(second) as task:
            await until(lambda: api.user.all(SERVICES), task=task)


async def test_dropped_watches_lose_no_event() -> None:
    with MiniApi() as api:
        app, _ = make(api, **LONG)
        async with running(app) as task:
            await until(
                lambda: app.cache.counts() is not None and api.watches_opened.count("engrammodels") == 1, task=task
            )
            for number in range(12):
                api.user.put(model(f"m-{number}"))
                api.drop_watches()
                await asyncio.sleep(0.05)
            await until(lambda: len(api.user.all(SERVICES)) == 12, task=task)


async def test_an_api_server_that_is_away_for_20_seconds() -> None:
    with MiniApi() as api:
        app, _ = make(api, **LONG)
        async with running(app) as task:
            api.user.put(model())
            await until(lambda: api.user.all(SERVICES), task=task)
            with api.away():
                api.user.put(model("later"))
                await asyncio.sleep(20)
                assert not task.done()
            await until(lambda: api.user.find(SERVICES, "default", "later"), task=task)
            api.user.edit(SERVICES, "default", "tiny", {"spec": {"selector": None}})
            await until(lambda: api.user.find(SERVICES, "default", "tiny")["spec"].get("selector"), task=task)


async def test_errors_and_hangs_of_every_verb_are_outlived() -> None:
    with MiniApi() as api:
        api.hang_s = 0.3
        for status, verb in itertools.product((429, 500, 503, 0), ("list", "watch", "patch")):
            api.fail(status, verb, SERVICES if verb == "patch" else PODS, times=1)
        api.fail(409, "patch", MODELS, times=2)
        app, _ = make(api, **LONG)
        async with running(app) as task:
            api.user.put(model())
            await until(lambda: api.user.all(SERVICES), task=task)
            await until(lambda: api.user.all(MODELS)[0].get("status"), task=task)
            assert app.canary.trouble == ""


async def test_rotated_credentials_are_read_again() -> None:
    with MiniApi(token="first") as api:
        app, _ = make(api, **LONG)
        async with running(app) as task:
            api.user.put(model())
            await until(lambda: api.user.all(SERVICES), task=task)
            api.token = "second"
            api.drop_watches()
            api.user.put(model("later"))
            await until(lambda: api.user.find(SERVICES, "default", "later"), task=task)


async def test_who_loses_the_lease_stops_at_once_and_writes_nothing_more() -> None:
    with MiniApi() as api:
        app, _ = make(api, lease_duration_s=6.0, lease_renew_s=4.0, lease_retry_s=0.3)
        lost = asyncio.Event()
        app.on_lost = lost.set
        async with running(app, fails=True) as task:
            api.user.put(model())
            await until(lambda: api.user.all(SERVICES), task=task)
            api.user.forget_requests()
            with Stopwatch() as watch:
                api.fail(500, "patch", LEASES, times=None)
                await asyncio.wait_for(lost.wait(), SOON_S)
            assert watch.seconds < 6.0  # before the lease is over for others
            assert len(api.user.writes(leases=True)) >= 3  # and it did not give up at once
            with pytest.raises(LeaseLost, match="not renewed for 4 s"):
                await asyncio.wait_for(task, SOON_S)
            api.user.forget_requests()
            api.user.remove(SERVICES, "default", "tiny")
            await asyncio.sleep(0.5)
            assert api.user.writes(leases=True) == []


async def test_a_write_that_is_under_way_when_the_lease_is_lost_is_not_sent() -> None:
    with MiniApi() as api:
        app, controller = make(api, lease_duration_s=6.0, lease_renew_s=4.0, lease_retry_s=0.3)
        waits = asyncio.Event()

        async def before_write() -> None:
            api.fail(500, "patch", LEASES, times=None)
            waits.set()
            await asyncio.sleep(4.5)

        controller.before_write = before_write
        async with running(app, fails=True) as task:
            api.user.put(model())
            await asyncio.wait_for(waits.wait(), SOON_S)
            with pytest.raises(LeaseLost):
                await asyncio.wait_for(task, SOON_S)
            assert api.user.all(SERVICES) == []


async def test_a_second_replica_serves_health_and_takes_over() -> None:
    """Long before the lease is over: it is given up."""
    with MiniApi() as api:
        first, _ = make(api, **LONG)
        second, looked = make(api, **LONG, identity="op-1")
        async with running(second) as standby:
            async with running(first) as leader:
                # Whoever was first leads; the test wants to know which.
                (lease,) = await until(lambda: api.user.all(LEASES), task=leader)
                leading, other = (first, second) if lease["spec"]["holderIdentity"] == "op-0" else (second, first)
                await until(lambda: leading._synced.is_set(), task=leader)
                await until(lambda: other.port and other._waiting_for == "", task=leader)  # ready, as a standby can be
                assert not other._synced.is_set()
            await until(second._synced.is_set, task=standby)
            api.user.put(model())
            await until(lambda: "tiny" in looked.looks, task=standby)
        (lease,) = api.user.all(LEASES)
        assert lease["spec"]["holderIdentity"] == ""
