"""A node is lost with a replica on it, and with the operator: nobody does anything, and conversations go on.

At Kubernetes' own settings a silent node is given up after 50 s and its pods are evicted 30 s later.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.e2e import pods
from tests.e2e.application import Reply, Said
from tests.e2e.caller import PORT, Caller
from tests.e2e.cluster.client import DIRECT, Object, condition
from tests.e2e.cluster.cluster import Cluster
from tests.e2e.conftest import TIMINGS, ObjectStore
from tests.e2e.under_fault.conftest import INTRODUCTION, MODEL, READY_SECONDS, Served, is_serving

REPLACED_SECONDS = 90  # at the default grace period of the node monitor
DEFAULT_GRACE, SHORT_GRACE = 50, 8
OPERATOR_LABELS = "app.kubernetes.io/component=operator"
TRIES = 16
HEADER = "x-engram-conversation-id"
SHORT, LONG = 16, 512
WRITTEN_SECONDS, WRITTEN_IN_SECONDS = 1, 30
ANSWER_SECONDS = 15  # 2 s of them until a connection that nobody takes is given up


@contextmanager
def only_on(cluster: Cluster, node: str) -> Iterator[None]:
    """New pods inside the block go to this node."""
    others = [name for name in cluster.nodes if name != node]
    cluster.kubectl("cordon", *others)
    try:
        yield
    finally:
        cluster.kubectl("uncordon", *others)


def far_replica(cluster: Cluster, served: Served) -> Object:
    """One replica on the node that will be lost, the other on the one that stays."""
    far = cluster.nodes[-1]
    found = served.settle()
    if len({pod["spec"]["nodeName"] for pod in found.values()}) == 1:
        name = max(found)
        with only_on(cluster, far if found[name]["spec"]["nodeName"] != far else cluster.nodes[0]):
            cluster.kubectl("delete", "pod", name, namespace=served.namespace)
            found = served.settle()
    (there,) = [pod for pod in found.values() if pod["spec"]["nodeName"] == far]
    return there


def begin_on(served: Served, replica: str) -> tuple[list[dict[str, str]], Reply]:
    """A conversation whose home is this replica, and its first turn."""
    say = [Said(f"This is story {number}. {INTRODUCTION}", anew=True) for number in range(TRIES)]
    for said, line in zip(say, served.application.converse(MODEL, say, history=[]), strict=False):
        reply = Reply(**line)
        if reply.engram["replica"] == replica:
            return [{"role": "user", "content": said.text}, {"role": "assistant", "content": reply.text}], reply
    raise AssertionError(f"no conversation of {TRIES} has its home on {replica}")


def replaced(cluster: Cluster, served: Served, lost: Object, seconds: float) -> Object:
    """The pod that took the lost one's name, on another node."""

    def found() -> Object | None:
        pod = served.pods().get(lost["metadata"]["name"])
        there = pod is not None and pod["metadata"]["uid"] != lost["metadata"]["uid"] and pod["spec"].get("nodeName")
        return pod if there else None

    pod = cluster.until("the lost replica is replaced", found, seconds)
    assert pod["spec"]["nodeName"] != lost["spec"]["nodeName"]
    return pod


def serving(cluster: Cluster, served: Served, name: str) -> Object:
    def found() -> Object | None:
        pod = served.pods().get(name)
        return pod if pod is not None and is_serving(pod) else None

    return cluster.until(f"{name} serves", found, READY_SECONDS)


def assert_continued(reply: Reply, before: Reply) -> None:
    assert not reply.engram.get("restore_failed")
    assert reply.engram["restored_tokens"] >= before.prompt_tokens
    assert reply.engram["restored_tokens"] + reply.engram["prefilled_tokens"] == reply.prompt_tokens


def turn(served: Served, pod: Object, messages: list[dict[str, str]], conversation: str) -> Reply:
    """One turn said to this very pod."""
    answer = served.caller.ask(chat_url(pod), chat(messages, SHORT), headers={HEADER: conversation})
    assert answer.status == 200, answer.text
    return reply_of(answer.json)


def turn_from_here(pod: Object, messages: list[dict[str, str]], conversation: str) -> Reply:
    """A long one said by this machine, which costs no `kubectl exec`."""
    headers = {"content-type": "application/json", HEADER: conversation}
    request = urllib.request.Request(chat_url(pod), json.dumps(chat(messages, LONG)).encode(), headers)
    with DIRECT.open(request, timeout=60) as answer:
        return reply_of(json.load(answer))


def chat_url(pod: Object) -> str:
    return f"http://{pod['status']['podIP']}:{PORT}/v1/chat/completions"


def chat(messages: list[dict[str, str]], tokens: int) -> dict[str, object]:
    return {"model": MODEL, "messages": messages, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}


def reply_of(answer: Object) -> Reply:
    return Reply(answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"], answer["engram"])


def after(messages: list[dict[str, str]], reply: Reply, text: str) -> list[dict[str, str]]:
    return [*messages, {"role": "assistant", "content": reply.text}, {"role": "user", "content": text}]


def lost_event(cluster: Cluster, served: Served) -> bool:
    events = cluster.objects(f"/apis/events.k8s.io/v1/namespaces/{served.namespace}/events")
    return any(event["reason"] == "NodeLost" and event["regarding"]["name"] == MODEL for event in events)


def node_is_ready(cluster: Cluster, name: str) -> bool:
    return condition(cluster.read(f"/api/v1/nodes/{name}"), "Ready").get("status") == "True"


def test_partitioned_from_the_control_plane_with_the_operator_on_it(
    cluster: Cluster, operator: str, object_store: ObjectStore, served: Served, request: pytest.FixtureRequest
) -> None:
    old = far_replica(cluster, served)
    name, far = old["metadata"]["name"], old["spec"]["nodeName"]
    with only_on(cluster, far):
        cluster.kubectl("delete", "pod", "--selector", OPERATOR_LABELS, namespace=operator)
        cluster.kubectl("rollout", "status", "deployment", "--timeout=120s", namespace=operator)
    history, first = begin_on(served, name)

    began = time.monotonic()
    cluster.partition(far, control_plane_only=True)
    try:
        new = replaced(cluster, served, old, REPLACED_SECONDS)
        took = time.monotonic() - began
        new = serving(cluster, served, name)
        request.config.stash[TIMINGS]["lost node (50 s): replaced"] = took
        request.config.stash[TIMINGS]["lost node (50 s): serves again"] = time.monotonic() - began
        assert took > DEFAULT_GRACE  # it was given up by Kubernetes, not by us
        assert lost_event(cluster, served)
        (second,) = served.application.say(MODEL, "Which hive was best?", history=history)
        assert second.engram["replica"] == name
        assert_continued(second, first)
        two_of_a_name(cluster, object_store, served, old, new)
    finally:
        cluster.heal(far)
    cluster.until(f"{far} is back", lambda: node_is_ready(cluster, far), 60)
    cluster.until("the old process has ended", lambda: not pods.processes(cluster, old, "serve"), 90)
    (third,) = served.application.say(MODEL, "And in which season did I look?", history=history)
    assert_continued(third, second)


def two_of_a_name(cluster: Cluster, store: ObjectStore, served: Served, old: Object, new: Object) -> None:
    """The old process runs on beside its namesake and reaches the store. Both go on from one turn at once: one of them
    becomes a branch, both are kept, and either restores what the other has written."""
    assert pods.processes(cluster, old, "serve")
    beginning = [{"role": "user", "content": f"We two share this. {INTRODUCTION}"}]
    common = turn(served, old, beginning, "shared")
    written(cluster, store, served)
    sides = {"new": new, "old": old}
    said = {side: after(beginning, common, f"The {side} one asks: which hive was best?") for side in sides}
    # Long answers: each has begun before the other is stored. Who knows the other's turn would replace it, as an edit.
    with ThreadPoolExecutor(len(sides)) as threads:
        begun = {side: threads.submit(turn_from_here, pod, said[side], "shared") for side, pod in sides.items()}
        replies = {side: future.result() for side, future in begun.items()}
    for reply in replies.values():
        assert_continued(reply, common)

    def branches() -> list[str]:
        return sorted({entry["branch_name"] for entry in kept(served, new, "shared") if entry["turn_number"] == 2})

    cluster.until("both turns are kept", lambda: len(branches()) == 2, WRITTEN_IN_SECONDS)
    assert branches()[0] == "main"
    for side, pod in (("new", old), ("old", new)):  # crosswise, so from the store
        reply = turn(served, pod, after(said[side], replies[side], "Are you sure?"), "shared")
        assert_continued(reply, replies[side])


def kept(served: Served, pod: Object, conversation: str) -> list[Object]:
    """What a replica lists of a conversation, the whole store included."""
    inside = Caller(served.kube, served.namespace, pod["metadata"]["name"])
    answer = inside.ask(f"http://127.0.0.1:{PORT}/v1/snapshots?conversation_id={conversation}")
    assert answer.status == 200, answer.text
    return list(answer.json["data"])


def written(cluster: Cluster, store: ObjectStore, served: Served) -> None:
    """Waits until what was said is in the bucket."""
    before: list[str] = []

    def still() -> bool:
        nonlocal before
        time.sleep(WRITTEN_SECONDS)
        last, before = before, store.keys(served.bucket)
        return last == before

    cluster.until("turns are written", still, WRITTEN_IN_SECONDS)


def test_a_machine_that_is_dead_and_silent(cluster: Cluster, served: Served, request: pytest.FixtureRequest) -> None:
    old = far_replica(cluster, served)
    name, far = old["metadata"]["name"], old["spec"]["nodeName"]
    history, first = begin_on(served, name)
    with cluster.grace(f"{SHORT_GRACE}s"):
        began = time.monotonic()
        cluster.partition(far)
        cluster.kill(far)
        try:
            (second,) = served.application.say(MODEL, "Which hive was best?", history=history)
            request.config.stash[TIMINGS]["dead node: the next answer took"] = second.seconds
            assert second.seconds < ANSWER_SECONDS
            assert second.engram["replica"] != name  # long before anybody knows that the node is gone
            assert_continued(second, first)
            replaced(cluster, served, old, REPLACED_SECONDS - DEFAULT_GRACE + SHORT_GRACE)
            request.config.stash[TIMINGS]["dead node (8 s): replaced"] = time.monotonic() - began
            serving(cluster, served, name)
        finally:
            cluster.heal(far)
        cluster.until(f"{far} is back", lambda: node_is_ready(cluster, far), 60)
    (third,) = served.application.say(MODEL, "And in which season did I look?", history=history)
    assert_continued(third, second)
    served.settle()
