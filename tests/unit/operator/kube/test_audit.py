"""Differences between cache and cluster: ghosts go, dead watches are told, and what is merely on its way is left."""

from __future__ import annotations

from typing import Any

from engram_operator.kube.audit import Audit, Watch
from engram_operator.kube.kinds import SERVICES, Kind
from tests.support.fake_kube import FakeKube

WATCH = Watch(SERVICES)


def service(name: str, selector: str = "x") -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"selector": {"a": selector}},
    }


class Told:
    def __init__(self, kube: FakeKube) -> None:
        self.gone: list[str] = []
        self.dead: list[Kind] = []
        self.audit = Audit(
            kube,
            kube.cache,
            (WATCH,),
            (None,),
            lambda kind, obj: self.gone.append(obj["metadata"]["name"]),
            self.dead.append,
        )


async def test_what_the_cluster_has_no_more_leaves_the_cache() -> None:
    kube = FakeKube()
    told = Told(kube)
    for name in ("a", "b"):
        kube.put(service(name))
    kube.follow = False
    kube.remove(SERVICES, "default", "a")
    await told.audit.compare(WATCH, judge=False)
    assert told.gone == ["a"]
    assert kube.cache.get(SERVICES, "default", "a") is None
    assert kube.cache.get(SERVICES, "default", "b") is not None
    assert told.dead == []


async def test_an_object_made_while_listing_stays() -> None:
    kube = FakeKube()
    told = Told(kube)
    kube.put(service("old"))
    kube.fail(200, "list", SERVICES, action=lambda: None)
    newer = service("new")
    newer["metadata"].update(uid="1", resourceVersion=str(kube.store.version + 5))
    kube.cache.put(SERVICES, newer)  # an event that is ahead of the list
    await told.audit.compare(WATCH, judge=True)
    assert told.gone == []


async def test_a_change_that_no_event_brought_for_a_whole_round_is_a_dead_watch() -> None:
    kube = FakeKube()
    told = Told(kube)
    kube.put(service("a"))
    kube.follow = False
    kube.put(service("a", "y"))
    await told.audit.compare(WATCH, judge=True)
    assert told.dead == []  # it may be on its way
    await told.audit.compare(WATCH, judge=True)
    assert told.dead == [SERVICES]


async def test_events_that_arrive_late_are_no_dead_watch() -> None:
    kube = FakeKube()
    told = Told(kube)
    kube.put(service("a"))
    kube.follow = False
    for change in "xyz":
        kube.put(service("a", change))
        await told.audit.compare(WATCH, judge=True)
        kube.catch_up()
    assert told.dead == []
