"""What a turn continues and leaves behind: restore_from, delta, modes, branches, dates, the background warm-up."""

from __future__ import annotations

import json
from datetime import datetime

import pytest

from engram_runtime.errors import SnapshotError
from engram_runtime.server.conversation import Base, RecentTurns, Record, parse_selector
from engram_runtime.server.errors import ApiError
from engram_runtime.server.tenants import Principal


def user(text):
    return {"role": "user", "content": text}


async def hold(api, *texts, **fields):
    """A conversation by full history; (answers, messages with all replies)."""
    messages, answers = [], []
    for text in texts:
        messages.append(user(text))
        answer = await api.chat(messages=list(messages), **fields)
        assert answer.status_code == 200, answer.text
        answers.append(answer.json())
        messages.append({"role": "assistant", "content": answers[-1]["choices"][0]["message"]["content"]})
        await api.settle()
    return answers, messages


async def test_plain_clients_prefill_only_what_is_new(api):
    """Full history, no conversation field at all: from the second turn on the history is restored."""
    answers, _messages = await hold(api, "Hello there", "And then?", "Thanks")
    assert answers[0]["engram"]["restored_tokens"] == 0
    for number, answer in enumerate(answers[1:], 1):
        warmed = api.engine.warmed[number - 1][0]
        assert answer["engram"]["restored_tokens"] == len(warmed)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(warmed)
        assert answer["engram"]["prefilled_tokens"] == answer["usage"]["prompt_tokens"] - len(warmed)
        assert answer["engram"]["prefilled_tokens"] < 16


async def test_engine_is_told_everything(api):
    await api.chat(messages=[user("Hello"), {"role": "assistant", "content": "Yes"}, user("More")], conversation_id="c")
    ids, _, turn = api.engine.requests[0]
    assert (turn.tenant, turn.conversation_id, turn.branch_name, turn.turn_number) == ("default", "c", "main", None)
    assert 0 < turn.boundaries["user_start"] < turn.boundaries["history"] < len(ids)
    assert turn.candidates[:2] == (turn.boundaries["history"], turn.boundaries["user_start"])
    assert (turn.restore, turn.save, turn.durable) == (True, True, True)
    record = json.loads(turn.messages)
    assert [message["content"] for message in record["messages"]] == ["Hello", "Yes", "More"]
    assert record["prompt_tokens"] == len(ids)
    assert len(turn.tokenizer_digest) == len(turn.template_digest) == 64


ASKED, SAID = user("Hello"), {"role": "assistant", "content": "Yes"}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "rain"}


@pytest.mark.parametrize(
    ("messages", "fields", "told"),
    [
        ([ASKED], {}, False),
        ([ASKED, SAID, user("More")], {}, False),
        ([ASKED, CALLED, RESULT], {}, True),
        ([ASKED, CALLED, RESULT, RESULT], {}, True),
        ([ASKED, CALLED, RESULT, SAID, user("More")], {}, False),
        ([ASKED, SAID], {}, True),
        ([ASKED, SAID], {"continue_final_message": True, "add_generation_prompt": False}, False),
        ([SAID], {}, True),
    ],
    ids=["first", "next", "tool", "two tools", "after a tool", "once more", "goes on", "no user"],
)
async def test_the_engine_is_told_where_no_user_follows_the_last_answer(api, messages, fields, told):
    """What is asked now then begins behind that answer, and user_start lies before it."""
    answer = await api.chat(messages=messages, conversation_id="c", **fields)
    assert answer.status_code == 200, answer.text
    _, _, turn = api.engine.requests[0]
    assert turn.answered == (turn.boundaries["history"] - 1 if told else None)
    await api.settle()
    assert all(warmed.answered is None for _, warmed in api.engine.warmed)


async def test_restore_from_equals_full_history(api):
    _, messages = await hold(api, "Hello there", "And then?", conversation_id="c")
    full = (await api.chat(messages=[*messages, user("Thanks")], auto_save=False)).json()
    short = (await api.chat("Thanks", restore_from="c:2")).json()
    assert api.engine.requests[-1][0] == api.engine.requests[-2][0]
    assert short["choices"] == full["choices"]
    assert short["usage"] == full["usage"]
    assert short["engram"]["conversation_id"] == "c"
    assert short["engram"]["turn_number"] == 3
    assert short["engram"]["prefilled_tokens"] < 16


@pytest.mark.parametrize("warmed", [True, False])
async def test_restore_from_the_store_alone(api, make_api, warmed):
    """Another replica: nothing in memory. A turn_end snapshot holds the reply as tokens only."""
    _, messages = await hold(api, "Hello there", "And then?", conversation_id="c")
    if not warmed:
        for key in [key for key, (info, _) in api.snapshots.entries.items() if info.boundary == "next_history"]:
            del api.snapshots.entries[key]
    other = make_api(engine=api.engine)
    answer = await other.chat("Thanks", restore_from="c:2")
    assert answer.status_code == 200, answer.text
    ids, _, turn = api.engine.requests[-1]
    assert turn.restore_from in {info.snapshot_id for info, _ in api.snapshots.entries.values()}
    await api.chat(messages=[*messages, user("Thanks")])
    assert api.engine.requests[-1][0] == ids


async def test_restore_from_a_snapshot_id_goes_on_on_its_branch(api):
    await hold(api, "Hello there", conversation_id="c", branch_name="what-if")
    snapshot = next(info for info, _ in api.snapshots.entries.values() if info.boundary == "next_history")
    answer = (await api.chat("Thanks", restore_from=snapshot.snapshot_id)).json()
    assert (answer["engram"]["conversation_id"], answer["engram"]["branch_name"]) == ("c", "what-if")
    assert answer["engram"]["turn_number"] == 2


async def test_a_new_branch_forks_from_main(api):
    await hold(api, "Hello there", "And then?", conversation_id="c")
    answer = (await api.chat("Otherwise?", restore_from="c:1", branch_name="alt")).json()["engram"]
    assert (answer["branch_name"], answer["turn_number"]) == ("alt", 2)
    record = json.loads(api.engine.requests[-1][2].messages)
    assert [message["content"] for message in record["messages"]][::2] == ["Hello there", "Otherwise?"]


async def test_conversation_ids_may_hold_colons(api):
    await hold(api, "Hello there", conversation_id="user:7:chat")
    assert (await api.chat("Thanks", restore_from="user:7:chat:1")).status_code == 200
    assert parse_selector("user:7:chat:1") == ("user:7:chat", 1)


async def test_unknown_restores_are_404(api):
    for selector in ("nobody:1", "0" * 32):
        answer = await api.chat(restore_from=selector)
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "restore_from")
    await hold(api, "Hello there", conversation_id="c")
    assert (await api.chat(restore_from="c:7")).status_code == 404


async def test_delta_continues_the_head_and_asks_for_the_history_when_it_is_gone(api, make_api):
    _, messages = await hold(api, "Hello there", conversation_id="c")
    answer = await api.chat("More", conversation_id="c", delta=True)
    assert answer.status_code == 200
    short = api.engine.requests[-1][0]
    await api.chat(messages=[*messages, user("More")])
    assert api.engine.requests[-1][0] == short
    await api.settle()
    assert (await make_api(engine=api.engine).chat("More", conversation_id="c", delta=True)).status_code == 200
    gone = await api.chat("More", conversation_id="unknown", delta=True)
    assert (gone.status_code, gone.json()["error"]["code"]) == (409, "need_full_history")
    other_branch = await api.chat("More", conversation_id="c", branch_name="b", delta=True)
    assert other_branch.status_code == 409


async def test_delta_is_offered_to_those_who_may_use_it(api, make_api):
    for fields in ({}, {"stream": True}):
        assert (await api.chat(**fields)).headers["x-engram-features"] == "delta"
    assert "x-engram-features" not in (await make_api(client="192.0.2.7").chat()).headers


async def test_tools_of_the_base_stay_unless_hidden(api):
    tool = {"type": "function", "function": {"name": "weather"}}
    await hold(api, "Hello there", conversation_id="c", tools=[tool])
    for fields, shown in (({}, True), ({"tool_choice": "none"}, False)):
        await api.chat("More", restore_from="c:1", **fields)
        assert ("weather" in api.engine.tokenizer.decode(api.engine.requests[-1][0])) == shown


async def test_delta_by_headers(api):
    await hold(api, "Hello there", conversation_id="c")
    headers = {"x-engram-conversation-id": "c", "x-engram-delta": "true"}
    answer = (await api.chat("More", headers=headers)).json()
    assert answer["engram"]["conversation_id"] == "c"
    assert len(json.loads(api.engine.requests[-1][2].messages)["messages"]) == 3


async def test_body_wins_over_headers(api):
    await api.chat(conversation_id="body", headers={"x-engram-conversation-id": "header"})
    assert api.engine.requests[0][2].conversation_id == "body"


async def test_broken_store_is_an_error_only_for_who_names_it(api):
    await hold(api, "Hello there", conversation_id="c")
    api.snapshots.error = SnapshotError("the store is down")
    assert (await api.chat("Thanks")).status_code == 200
    broken = await api.chat("Thanks", restore_from="old:1")
    assert (broken.status_code, broken.json()["error"]["code"]) == (503, "snapshot_unavailable")


@pytest.mark.parametrize(
    ("fields", "restore", "save"),
    [
        ({}, True, True),
        ({"auto_save": False}, True, False),
        ({"stateful_mode": "stateless"}, False, False),
        ({"stateful_mode": "explicit"}, False, False),
        ({"stateful_mode": "explicit", "auto_save": True}, False, True),
        ({"stateful_mode": "explicit", "conversation_id": "c", "delta": True}, True, False),
        ({"prompt_logprobs": 0}, False, True),
    ],
)
async def test_modes(api, fields, restore, save):
    await hold(api, "Hello there", conversation_id="c")
    await api.chat("More", **fields)
    turn = api.engine.requests[-1][2]
    assert (turn.restore, turn.save) == (restore, save)


async def test_nothing_is_warmed_for_what_is_not_saved(api):
    for fields in ({"auto_save": False}, {"n": 2}, {"stateful_mode": "stateless"}):
        await api.chat(**fields)
        await api.settle()
    assert api.engine.warmed == []


async def test_warm_up_belongs_to_the_turn(api):
    _answers, messages = await hold(api, "Hello there", conversation_id="c")
    ids, turn = api.engine.warmed[0]
    assert (turn.conversation_id, turn.turn_number, turn.branch_name) == ("c", 1, "main")
    assert json.loads(turn.messages)["messages"] == messages
    assert "prompt_tokens" not in json.loads(turn.messages)
    following = (await api.http.post("/tokenize", json={"messages": [*messages, user("x")]})).json()["tokens"]
    assert following[: len(ids)] == ids


async def test_a_warm_up_that_fails_is_counted_and_harms_nobody(api):
    async def broken(*_, **__):
        raise RuntimeError("no room")

    api.engine.warm = broken
    await hold(api, "Hello there")
    assert 'engram_rewarm_requests_total{result="failed"} 1.0' in api.state.metrics.render().decode()


async def test_dates_stay_those_of_the_conversation(make_api):
    api = make_api("date")
    yesterday = datetime(2026, 1, 2, 23, 59)
    _, messages = await hold(api, "Hello there")
    said = [{**message} for message in messages]
    api.state.dates.pin("default", None, said, yesterday)
    await api.chat(messages=[*messages, user("More")])
    assert "02 January 2026" in api.engine.tokenizer.decode(api.engine.requests[-1][0])
    await api.chat(messages=[user("Hello there")])
    assert "02 January 2026" not in api.engine.tokenizer.decode(api.engine.requests[-1][0])


async def test_dates_come_back_from_the_store(make_api):
    """After a restart the date is read from the conversation's head."""
    api = make_api("date")
    _, messages = await hold(api, "Hello there", conversation_id="c")
    for key, (info, content) in api.snapshots.entries.items():
        record = json.loads(content.messages) | {"date": "2026-01-02T23:59:00"}
        api.snapshots.entries[key] = (info, type(content)([], [], json.dumps(record).encode(), "", ""))
    other = make_api(engine=api.engine)
    await other.chat(messages=[*messages, user("More")], conversation_id="c")
    assert "02 January 2026" in api.engine.tokenizer.decode(api.engine.requests[-1][0])


async def test_completions_join_conversations_when_asked(api):
    await api.complete("Once upon")
    assert api.engine.requests[-1][2].save is False
    first = (await api.complete("Once upon", conversation_id="story", max_tokens=4)).json()
    assert first["engram"]["conversation_id"] == "story"
    answer = await api.complete(" and then", restore_from="story:1", max_tokens=4)
    assert answer.status_code == 200, answer.text
    text = api.engine.tokenizer.decode(api.engine.requests[-1][0])
    assert text == "Once upon" + first["choices"][0]["text"] + " and then"
    chat = await api.chat(restore_from="story:1")
    assert (chat.status_code, chat.json()["error"]["param"]) == (400, "restore_from")


async def test_strangers_without_keys_have_no_memory(make_api):
    """Beyond loopback everyone would be one tenant: only what names nothing works."""
    api = make_api(client="192.0.2.7")
    assert (await api.chat()).status_code == 200
    for fields in ({"restore_from": "c:1"}, {"conversation_id": "c", "delta": True}):
        answer = await api.chat(**fields)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "keys_required")
    assert (await api.http.get("/v1/snapshots")).status_code == 403


def test_records_survive_storage():
    record = Record((user("Zürich"),), ({"type": "function"},), {"mode": "x"}, datetime(2026, 1, 2, 3, 4, 5), 7)
    assert Record.load(record.dump()) == record
    for data in (b"{}", b"[]", b"x", b'{"version": 1}', b'{"version": 1, "messages": [1]}'):
        with pytest.raises(ValueError):
            Record.load(data)


def test_recent_turns_are_bounded_and_forget():
    recent = RecentTurns(100)
    for number in range(1, 6):
        record = Record((user(str(number)),))
        recent.remember("t", Base(record, "c", "main", number, f"{number:032x}"), 30)
    assert recent.turn("t", "c", "main", 1) is None
    assert recent.turn("t", "c", "main", None) == Base(Record((user("5"),)), "c", "main", 5)
    assert recent.snapshot("t", f"{4:032x}") is not None
    assert recent.snapshot("other", f"{4:032x}") is None
    assert recent.turn("other", "c", "main", None) is None
    recent.forget("t", "c", 5)
    assert recent.turn("t", "c", "main", None) is None
    recent.forget_branch("t", "c", "main")
    assert recent.snapshot("t", f"{4:032x}") is None


def test_principals_without_memory_say_what_to_do():
    with pytest.raises(ApiError, match="--api-keys-dir"):
        Principal("default", remembers=False).require_memory("delta")
