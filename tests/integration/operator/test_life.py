"""One operator's life against an API server: create, idle, drift, delete, and an orderly end."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import httpx

from engram_operator.kube.kinds import LEASES, MODELS, SERVICES
from tests.integration.operator.harness import SOON_S, at_rest, make, model, running, until
from tests.support.miniapi import MiniApi
from tests.support.stopwatch import Stopwatch


async def test_from_apply_to_delete() -> None:
    with MiniApi() as api:
        app, _ = make(api)
        async with AsyncExitStack() as life:
            task = await life.enter_async_context(running(app))
            await until(lambda: api.user.all(LEASES), task=task)
            made = api.user.put(model())
            await until(lambda: api.user.find(SERVICES, "default", "tiny"), task=task)
            await until(lambda: api.user.all(MODELS)[0].get("status") == {"desiredReplicas": 1})
            # Until it has seen its own writes it may rightly repeat them: it applies.
            await until(lambda: app.cache.list(SERVICES) and app.cache.list(MODELS)[0].get("status"), task=task)
            await until(lambda: at_rest(app), task=task)

            live = api.user.all(MODELS)[0]["metadata"]
            assert "finalizers" not in live
            assert "annotations" not in live  # kopf leaves no trace

            version_before = {kind: len(api.user.all(kind)) for kind in (MODELS, SERVICES)}
            api.user.forget_requests()
            await asyncio.sleep(3)
            assert api.user.writes() == []  # idle
            assert version_before == {kind: len(api.user.all(kind)) for kind in (MODELS, SERVICES)}

            api.user.edit(SERVICES, "default", "tiny", {"spec": {"selector": {"model": "another"}}})
            await until(lambda: api.user.all(SERVICES)[0]["spec"]["selector"] == {"model": "tiny"})
            uid = api.user.all(SERVICES)[0]["metadata"]["uid"]
            api.user.remove(SERVICES, "default", "tiny")
            await until(lambda: (s := api.user.all(SERVICES)) and s[0]["metadata"]["uid"] != uid)
            # Without the label it is out of sight; applying it again brings it back.
            api.user.edit(SERVICES, "default", "tiny", {"metadata": {"labels": {"app.kubernetes.io/managed-by": None}}})
            await until(lambda: api.user.all(SERVICES)[0]["metadata"].get("labels"))

            api.user.edit(MODELS, "default", "tiny", {"spec": {"replicas": 3}})
            await until(lambda: api.user.all(MODELS)[0]["status"] == {"desiredReplicas": 3})

            api.user.remove(MODELS, "default", "tiny")
            await until(lambda: app.cache.list(SERVICES) == [] == app.cache.list(MODELS))
            assert made["metadata"]["uid"]
            with Stopwatch() as watch:
                await life.aclose()
        assert watch.seconds < 15
        (lease,) = api.user.all(LEASES)
        assert lease["spec"]["holderIdentity"] == ""  # given up, so another need not wait


async def test_what_was_there_before_is_reconciled_and_never_from_half_a_list() -> None:
    with MiniApi() as api:
        for number in range(40):
            api.user.put(model(f"m-{number:02}"))
        services_late = api.fail(503, "list", SERVICES, times=2)
        app, controller = make(api)
        async with running(app) as task:
            await until(lambda: len(app.cache.list(MODELS)) == 40, task=task)
            assert services_late.times == 0 or controller.looks == []
            await until(lambda: len(api.user.all(SERVICES)) == 40)
            assert set(controller.looks) == {f"m-{number:02}" for number in range(40)}


async def said(http: httpx.AsyncClient, url: str, text: str) -> httpx.Response:
    """The first answer with this text."""
    end = asyncio.get_running_loop().time() + SOON_S
    while text not in (answer := await http.get(url)).text:
        assert asyncio.get_running_loop().time() < end, answer.text
        await asyncio.sleep(0.02)
    return answer


async def test_health_and_metrics_tell_what_goes_on() -> None:
    with MiniApi() as api:
        api.store.served.discard(MODELS)
        app, _ = make(api)
        async with running(app) as task, httpx.AsyncClient(timeout=SOON_S) as http:
            await until(lambda: app.port, task=task)
            url = f"http://127.0.0.1:{app.port}"
            assert (await http.get(f"{url}/healthz")).status_code == 200
            waiting = await said(http, f"{url}/readyz", "engrammodels")
            assert waiting.status_code == 503

            api.store.served.add(MODELS)  # the CRDs are installed
            api.user.put(model())
            await until(lambda: api.user.all(MODELS)[0].get("status"), task=task)
            assert (await said(http, f"{url}/readyz", "ok\n")).status_code == 200
            # Until it has seen its own writes it may rightly repeat them.
            await until(lambda: app.cache.list(SERVICES) and app.cache.list(MODELS)[0].get("status"), task=task)
            await until(lambda: at_rest(app), task=task)
            text = (await http.get(f"{url}/metrics")).text
            writes = sum(verb == "patch" and plural == "services" for verb, plural, *_ in api.user.writes())
            assert writes > 0
            for line in (
                'engram_operator_reconciles_total{controller="ServiceController",outcome="ok"}',
                f'engram_operator_writes_total{{kind="Service",verb="apply"}} {writes}.0',
                "engram_operator_leader 1.0",
                "engram_operator_queue_depth 0.0",
                'engram_operator_objects{kind="EngramModel"} 1.0',
                "engram_operator_watch_age_seconds",
                "process_resident_memory_bytes",
            ):
                assert line in text

            app.canary.limit_s = -1.0
            dead = await http.get(f"{url}/healthz")
            assert dead.status_code == 503
            assert "no watch event" in dead.text
            app.canary.limit_s = 90.0


async def test_only_watched_namespaces_are_seen() -> None:
    with MiniApi() as api:
        app, _ = make(api, watch_namespaces=("a", "b"), operator_namespace="b")
        for namespace in ("a", "b", "c"):
            api.user.put({**model(), "metadata": {"name": "tiny", "namespace": namespace}})
        async with running(app) as task:
            await until(lambda: len(api.user.all(SERVICES)) == 2, task=task)
            assert {s["metadata"]["namespace"] for s in api.user.all(SERVICES)} == {"a", "b"}
            assert [lease["metadata"]["namespace"] for lease in api.user.all(LEASES)] == ["b"]
        asked = {(r.kind.plural, r.namespace) for r in api.store.requests if r.verb in ("list", "watch")}
        assert {namespace for _, namespace in asked} == {"a", "b"}
