"""Which turns become durable, and when."""

from __future__ import annotations

import time

import pytest

from engram_runtime.errors import NotFound
from engram_runtime.server.config import ServerConfig
from engram_runtime.server.saving import SavePolicy

BRANCH = ("t", "c", "main")


def policy(**fields):
    return SavePolicy(ServerConfig(served_model_name="x", **fields))


class Service:
    def __init__(self):
        self.saved = []

    def save_now(self, tenant, conversation, *, branch_name):
        if conversation == "gone":
            raise NotFound("gone")
        self.saved.append((tenant, conversation, branch_name))


def test_each_turn_by_default():
    saving = policy()
    assert saving.durable(*BRANCH)
    saving.ended(BRANCH, True)
    assert saving.durable(*BRANCH)


def test_at_most_once_per_interval():
    saving = policy(save_min_interval_seconds=60)
    assert saving.durable(*BRANCH)
    saving.ended(BRANCH, True)
    assert not saving.durable(*BRANCH)
    assert saving.durable("t", "another", "main")
    assert saving.durable("t", None, "main")


async def test_silent_conversations_are_saved_once():
    saving, service = policy(save_turn_end=False, save_idle_seconds=1), Service()
    assert not saving.durable(*BRANCH)
    before = time.monotonic()
    saving.ended(BRANCH, False)
    saving.ended(("t", "gone", "main"), False)
    assert await saving.save_silent(service, before) == 0
    assert await saving.save_silent(service, time.monotonic() + 1) == 1
    assert service.saved == [BRANCH]
    assert await saving.save_silent(service, time.monotonic() + 1) == 0


async def test_without_an_idle_time_nothing_runs():
    await policy().run(Service())


@pytest.mark.parametrize(
    "fields",
    [
        {"served_model_name": " "},
        {"port": 70000},
        {"port": 5, "admin_port": 5},
        {"max_queue": -1},
        {"max_num_seqs": 0},
        {"render_timeout": 0},
        {"drain_timeout": -1},
    ],
)
def test_configuration_names_the_field(fields):
    with pytest.raises(ValueError) as caught:
        ServerConfig(**{"served_model_name": "x", **fields})
    assert str(caught.value).split(" ")[0] in fields


async def test_the_engine_is_told(make_api):
    api = make_api(save_turn_end=False)
    await api.chat(conversation_id="c")
    assert api.engine.requests[0][2].durable is False
