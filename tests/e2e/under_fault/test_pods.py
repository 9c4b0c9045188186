"""An engine dies at once, as when it runs out of memory: in the middle of a stream, and before a first byte."""

from __future__ import annotations

import os
import signal

from tests.e2e import pods
from tests.e2e.application import Reply, Said
from tests.e2e.cluster.cluster import Cluster
from tests.e2e.under_fault.conftest import INTRODUCTION, MODEL, Served

TOKENS = 2000
LONG = {"max_tokens": TOKENS, "extra_body": {"ignore_eos": True}}
DELTAS = 5  # that were delivered when the engine is killed
RUNNING = "engram_num_requests_running"


def kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)


def assert_restored(reply: Reply, first: Reply) -> None:
    """Everything of the first turn's prompt came from the store, and every token is accounted for."""
    assert not reply.engram.get("restore_failed")
    assert reply.engram["restored_tokens"] >= first.prompt_tokens
    assert reply.engram["restored_tokens"] + reply.engram["prefilled_tokens"] == reply.prompt_tokens


def test_killed_in_the_middle_of_a_stream(cluster: Cluster, served: Served) -> None:
    before = served.settle()
    history: list[dict[str, str]] = []
    (first,) = served.application.say(MODEL, INTRODUCTION, history=history)
    home = first.engram["replica"]
    (engine,) = pods.processes(cluster, before[home], "serve")
    texts, errors, replies = [], [], []
    say = [Said("Tell me all about them.", stream=True, may_fail=True), Said("In which season do I look at them?")]
    for line in served.application.converse(MODEL, say, history=history, options=LONG):
        if "delta" in line:
            texts.append(line["delta"])
            if len(texts) == DELTAS:
                kill(engine)
        elif "error" in line:
            errors.append(line)
        else:
            replies.append(Reply(**line))

    assert [error["error"] for error in errors] == ["APIConnectionError"]  # what was delivered cannot be taken back
    assert DELTAS <= len(texts) < TOKENS
    (after,) = replies
    assert after.engram["replica"] != home
    assert_restored(after, first)
    restarted = served.settle()[home]
    assert restarted["metadata"]["uid"] == before[home]["metadata"]["uid"]
    assert [status["restartCount"] for status in restarted["status"]["containerStatuses"]] == [1]


def test_killed_before_the_first_byte(cluster: Cluster, served: Served) -> None:
    before = served.settle()
    history: list[dict[str, str]] = []
    (first,) = served.application.say(MODEL, f"Hello. {INTRODUCTION}", history=history)
    home = first.engram["replica"]
    (engine,) = pods.processes(cluster, before[home], "serve")
    lines = served.application.converse(MODEL, [Said("Tell me all about them.")], history=history, options=LONG)
    url = f"http://{before[home]['status']['podIP']}:8001/metrics"

    def runs() -> bool:
        metrics = served.caller.ask(url).text.splitlines()
        return any(line.startswith(RUNNING) and float(line.split()[-1]) > 0 for line in metrics)

    cluster.until("the request runs", runs, 30)
    kill(engine)

    (line,) = lines  # and no error
    after = Reply(**line)
    assert after.engram["replica"] != home
    assert_restored(after, first)
    served.settle()
