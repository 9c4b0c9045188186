"""The histories that real clients send back, over the real engine: what is restored, and that the answer is the same.

The openai client and LangChain's ChatOpenAI re-render each assistant turn in their own way (nulls, dropped reasoning,
tool arguments serialised anew) and cut, edit and fork histories. Each such request must restore what it shares with
what was said before, by the client's usage and by an op that counts rows, and say what it says without any memory.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage, trim_messages
from langchain_openai import ChatOpenAI

from engram_runtime.engine.async_engine import AsyncLLMEngine
from engram_runtime.engine.config import EngineConfig
from engram_runtime.snapshots.types import SnapshotConfig
from tests.support import patience
from tests.support.counting import Counted
from tests.support.serving import NAME, serving
from tests.support.tiny import make_tiny

FAMILIES = {"dense": "llama", "hybrid": "granite"}
TOKENS = 12
SYSTEM = "Please answer the user briefly, and remember what was said before."
TEXTS = ("Who wrote the book?", "And what is the capital of France?", "Thank you very much, and now?")
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
ARGUMENTS = {"place": "Paris", "days": 3}
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>'


@dataclass
class Answer:
    text: str
    message: Any
    """As the client's own objects have it, to be sent back as it is."""
    prompt_tokens: int
    completion_tokens: int
    restored: int


class OpenAIClient:
    """The openai package; replies go back as SDK objects, null fields and all."""

    def __init__(self, url: str) -> None:
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def ask(
        self, messages: list[Any], tools: list[Any] | None = None, max_tokens: int = TOKENS, **extra: Any
    ) -> Answer:
        reply = self._client.chat.completions.create(
            model=NAME,
            messages=messages,
            temperature=0,
            max_tokens=max_tokens,
            extra_body=extra,
            **({"tools": tools} if tools else {}),
        )
        assert reply.usage is not None
        assert reply.usage.prompt_tokens_details is not None
        message = reply.choices[0].message
        used = reply.usage
        cached = reply.usage.prompt_tokens_details.cached_tokens
        return Answer(message.content or "", message, used.prompt_tokens, used.completion_tokens, cached or 0)

    system = staticmethod(lambda text: {"role": "system", "content": text})
    user = staticmethod(lambda text: {"role": "user", "content": text})

    def said(self, answer: Answer, text: str | None = None) -> Any:
        """The reply as it goes back: a dump of the object, `text` in place of its content."""
        dumped = answer.message.model_dump()
        return dumped if text is None else {**dumped, "content": text}

    def calls(self, arguments: dict[str, Any], **dumps: Any) -> Any:
        function = {"name": "weather", "arguments": json.dumps(arguments, **dumps)}
        call = {"id": "call_1", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "function_call": None}

    def tool(self, text: str) -> Any:
        return {"role": "tool", "tool_call_id": "call_1", "content": text}

    def newest(self, messages: list[Any], turns: int) -> list[Any]:
        """The system message and the newest turns, as applications cut their history."""
        return [messages[0], *messages[len(messages) - 2 * turns + 1 :]]


class LangChain:
    """ChatOpenAI; replies go back as AIMessage objects."""

    def __init__(self, url: str) -> None:
        self._options: dict[str, Any] = {
            "base_url": f"{url}/v1",
            "api_key": "none",
            "model": NAME,
            "temperature": 0,
            "max_retries": 0,
        }

    def ask(
        self, messages: list[Any], tools: list[Any] | None = None, max_tokens: int = TOKENS, **extra: Any
    ) -> Answer:
        chat: Any = ChatOpenAI(**self._options, max_tokens=max_tokens, extra_body=extra or None)
        if tools:
            chat = chat.bind_tools(tools)
        message = chat.invoke(messages)
        used = message.usage_metadata
        cached = used["input_token_details"].get("cache_read", 0)
        return Answer(message.content, message, used["input_tokens"], used["output_tokens"], cached)

    system = staticmethod(lambda text: SystemMessage(text))
    user = staticmethod(lambda text: HumanMessage(text))

    def said(self, answer: Answer, text: str | None = None) -> Any:
        return answer.message if text is None else AIMessage(text)

    def calls(self, arguments: dict[str, Any], **dumps: Any) -> Any:
        """It serialises arguments in its own way, whatever the server sent."""
        return AIMessage("", tool_calls=[{"name": "weather", "args": arguments, "id": "call_1"}])

    def tool(self, text: str) -> Any:
        return ToolMessage(text, tool_call_id="call_1")

    def newest(self, messages: list[Any], turns: int) -> list[Any]:
        return trim_messages(
            messages,
            strategy="last",
            token_counter=len,
            max_tokens=2 * turns,
            include_system=True,
            start_on="human",
        )


CLIENTS = {"openai": OpenAIClient, "langchain": LangChain}


class World:
    """A client and its server; `check` is the proof that all of the tests end in."""

    def __init__(self, running: Any, counted: Counted, client: Any) -> None:
        self.running = running
        self.counted = counted
        self.client = client
        self._http = httpx.Client(base_url=running.url, timeout=240)

    def ask(self, messages: list[Any], **fields: Any) -> Answer:
        answer: Answer = self.client.ask(messages, **fields)
        self.settle()
        return answer

    def settle(self) -> None:
        """Until the background work of the last turn is done."""
        deadline = time.monotonic() + 240
        while self.running.server.state.background:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def talk(self, *texts: str, system: bool = True) -> tuple[list[Any], list[Answer]]:
        """A plain conversation; its messages, and the answers."""
        messages = [self.client.system(SYSTEM)] if system else []
        answers = []
        for text in texts:
            messages.append(self.client.user(text))
            answers.append(self.ask(messages))
            messages.append(self.client.said(answers[-1]))
        return messages, answers

    def length(self, *messages: dict[str, Any], tools: list[Any] | None = None) -> int:
        """Tokens of these messages alone, without what makes the model answer."""
        body = {"messages": list(messages), "add_generation_prompt": False, **({"tools": tools} if tools else {})}
        answer = self._http.post("/tokenize", json=body)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["count"])

    def ask_for(self, text: str, messages: list[Any], **fields: Any) -> Answer:
        """As `ask`; the model is made to reply `text`."""
        ids = self._http.post("/tokenize", json={"prompt": f"{text}<|im_end|>"}).json()["tokens"]
        self.counted.say(ids)
        answer = self.ask(messages, max_tokens=len(ids), **fields)
        assert answer.text == text
        return answer

    def check(self, messages: list[Any], shared: int, **fields: Any) -> Answer:
        """At least `shared` tokens are restored, only the rest is computed, and the answer is the stateless one."""
        before = self.counted.rows
        answer = self.client.ask(messages, auto_save=False, **fields)
        rows = self.counted.rows - before
        assert shared <= answer.restored < answer.prompt_tokens
        # The last token of a reply is sampled, never forwarded.
        assert rows == answer.prompt_tokens - answer.restored + answer.completion_tokens - 1
        self.settle()
        whole = self.client.ask(messages, stateful_mode="stateless", **fields)
        assert whole.restored == 0
        assert whole.text == answer.text
        assert whole.prompt_tokens == answer.prompt_tokens
        return answer


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


SAID_SYSTEM = {"role": "system", "content": SYSTEM}


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    made: dict[tuple[str, str], tuple[Any, Counted]] = {}
    with ExitStack() as stack:

        def get(kind: str, template: str) -> tuple[Any, Counted]:
            if (kind, template) not in made:
                path = make_tiny(FAMILIES[kind], tmp_path_factory.mktemp("model") / kind, template=template)
                counted = Counted()

                def load() -> AsyncLLMEngine:
                    config = EngineConfig(str(path), progress=False, device="cpu", max_num_seqs=4, **patience.ENGINE)
                    snapshots = SnapshotConfig(tenant_key=b"k" * 32, **patience.SNAPSHOTS)
                    return AsyncLLMEngine.from_config(config, snapshots, registry=counted.registry)

                made[kind, template] = stack.enter_context(serving(load)), counted
            return made[kind, template]

        yield get


@pytest.fixture(params=FAMILIES)
def kind(request):
    return request.param


@pytest.fixture(params=CLIENTS)
def make_world(request, servers, kind):
    def make(template: str = "tools") -> World:
        running, counted = servers(kind, template)
        return World(running, counted, CLIENTS[request.param](running.url))

    return make


def test_the_reply_comes_back_as_the_client_keeps_it(make_world):
    """SDK objects with nulls, AIMessage objects: the next turn computes the new message only."""
    world = make_world()
    messages, answers = world.talk(*TEXTS[:2])
    said = [SAID_SYSTEM, user(TEXTS[0]), assistant(answers[0].text), user(TEXTS[1]), assistant(answers[1].text)]
    world.check([*messages, world.client.user(TEXTS[2])], world.length(*said))


def test_null_content(make_world):
    """A turn of nothing but tool calls has null content, or an empty one."""
    world = make_world()
    question = world.client.user(TEXTS[0])
    world.ask_for(CALL, [question], tools=[WEATHER])
    shared = world.length(user(TEXTS[0]), assistant(CALL), tools=[WEATHER])
    world.check([question, world.client.calls(ARGUMENTS), world.client.tool("rain")], shared, tools=[WEATHER])


@pytest.mark.parametrize(
    "dumps", [{}, {"separators": (",", ":")}, {"indent": 2}], ids=["spaced", "compact", "indented"]
)
def test_tool_arguments_serialised_anew(make_world, dumps):
    """However the arguments are written down, they are the same arguments."""
    world = make_world()
    question, result = world.client.user(TEXTS[0]), world.client.tool("rain, 12 degrees")
    world.ask_for(CALL, [question], tools=[WEATHER])
    first = [question, world.client.calls(ARGUMENTS), result]
    answer = world.ask(first, tools=[WEATHER])
    again = [question, world.client.calls(ARGUMENTS, **dumps), result, world.client.said(answer)]
    said = [user(TEXTS[0]), assistant(CALL), user("<tool_response>\nrain, 12 degrees\n</tool_response>")]
    shared = world.length(*said, assistant(answer.text), tools=[WEATHER])
    world.check([*again, world.client.user(TEXTS[1])], shared, tools=[WEATHER])


@pytest.mark.parametrize("dropped", [True, False], ids=["dropped", "kept"])
def test_reasoning(make_world, dropped):
    """The thought is gone from the next prompt, by the client's doing or by the template's: neither computes again."""
    world = make_world("think_strip")
    question = world.client.user(TEXTS[0])
    answer = world.ask_for("<think>\nhm\n</think>\n\nyes", [question])
    reply = world.client.said(answer, "yes" if dropped else None)
    world.check([question, reply, world.client.user(TEXTS[1])], world.length(user(TEXTS[0]), assistant("yes")))


def test_trimmed_history(make_world):
    """The oldest turn is cut out behind the system message: that much is still shared."""
    world = make_world()
    messages, _ = world.talk(*TEXTS[:2])
    messages = [*messages, world.client.user(TEXTS[2])]
    trimmed = world.client.newest(messages, 2)
    assert len(trimmed) == len(messages) - 2
    world.check(trimmed, world.length(SAID_SYSTEM))


def test_summarised_history(make_world):
    world = make_world()
    messages, _ = world.talk(*TEXTS[:2])
    summary = world.client.user("Here is a summary of the conversation to date: we spoke of a book.")
    world.check([messages[0], summary, world.client.user(TEXTS[2])], world.length(SAID_SYSTEM))


def test_cleared_tool_result(make_world):
    """An old result is replaced in the middle of the history: what lies before it is shared."""
    world = make_world()
    question, calls = world.client.user(TEXTS[0]), world.client.calls(ARGUMENTS)
    world.ask_for(CALL, [question], tools=[WEATHER])
    answer = world.ask([question, calls, world.client.tool("rain, 12 degrees")], tools=[WEATHER])
    cleared = [question, calls, world.client.tool("[cleared]"), world.client.said(answer), world.client.user(TEXTS[1])]
    world.check(cleared, world.length(user(TEXTS[0]), assistant(CALL), tools=[WEATHER]), tools=[WEATHER])


def test_edit(make_world):
    """An earlier question is put differently."""
    world = make_world()
    messages, answers = world.talk(*TEXTS)
    edited = [*messages[:3], world.client.user("What is the capital of Italy?")]
    world.check(edited, world.length(SAID_SYSTEM, user(TEXTS[0]), assistant(answers[0].text)))


def test_regenerate(make_world):
    """The same question once more: the whole prompt but its end is shared, and greedy says the same."""
    world = make_world()
    messages, answers = world.talk(*TEXTS[:2])
    shared = world.length(SAID_SYSTEM, user(TEXTS[0]), assistant(answers[0].text), user(TEXTS[1]))
    again = world.check(messages[:-1], shared)
    assert again.text == answers[1].text


def test_branches(make_world):
    """Two conversations go on from one history, in turns; neither disturbs the other."""
    world = make_world()
    messages, answers = world.talk(TEXTS[0])
    shared = world.length(SAID_SYSTEM, user(TEXTS[0]), assistant(answers[0].text))
    heads = {}
    for text in TEXTS[1:]:
        branch = [*messages, world.client.user(text)]
        answer = world.check(branch, shared)
        answer = world.ask(branch)
        heads[text] = [*branch, world.client.said(answer)], answer.text
    for text, (branch, reply) in heads.items():
        said = [SAID_SYSTEM, user(TEXTS[0]), assistant(answers[0].text), user(text), assistant(reply)]
        world.check([*branch, world.client.user("Go on")], world.length(*said))
