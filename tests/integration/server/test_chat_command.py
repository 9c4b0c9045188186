"""`engram chat` against a server: history, commands, statistics, errors that do not end the conversation."""

from __future__ import annotations

import io

import pytest

from engram_runtime.cli.main import main
from tests.support.fake_engine import FakeEngine
from tests.support.fake_snapshots import FakeSnapshots
from tests.support.serving import serving
from tests.support.tiny import make_tokenizer


@pytest.fixture
def chat(monkeypatch, capsys):
    """(engine, function that types lines and returns exit code, standard output, standard error)."""
    engine = FakeEngine(make_tokenizer(), snapshots=FakeSnapshots())
    with serving(lambda: engine) as running:

        def say(text, *flags):
            monkeypatch.setattr("sys.stdin", io.StringIO(text))
            code = main(["chat", "--base-url", f"{running.url}/v1/", "--max-tokens", "200", *flags])
            shown = capsys.readouterr()
            return code, shown.out, shown.err

        yield engine, say


def prompts(engine):
    return [engine.tokenizer.decode(ids) for ids, _, _ in engine.requests]


def test_the_history_grows_and_the_conversation_is_named(chat):
    engine, say = chat
    code, out, err = say("Hello\n\nMore\n/exit\nnever sent\n", "--stats", "--temperature", "0")
    assert code == 0
    assert len(out.splitlines()) == 2
    assert "Your prompt had" in out
    first, second = prompts(engine)
    assert second.startswith(first[: first.index("<|im_start|>assistant")])
    assert out.splitlines()[0] in second
    assert engine.requests[1][2].conversation_id == "c1"
    assert "restored from gpu" in err.splitlines()[1]


def test_commands(chat):
    engine, say = chat
    say("/system Be brief.\nHello\n/clear\nAgain\n/nonsense\n", "--conversation-id", "mine")
    first, second = prompts(engine)
    assert "Be brief." in first
    assert "Be brief." in second
    assert "Hello" not in second
    say("Hello\n", "--conversation-id", "mine", "--system", "Be kind.")
    assert engine.requests[-1][2].conversation_id == "mine"
    assert "Be kind." in prompts(engine)[-1]


def test_errors_are_one_line(chat):
    engine, say = chat
    code, _, err = say("word " * 5000 + "\n")
    assert code == 1
    assert err.startswith("engram: 400: This model's maximum context length")
    engine.fail_after = 2
    code, _, err = say("Hello\n")
    assert (code, "a step failed" in err) == (1, True)
    assert "Traceback" not in err
