"""The check of `helm test`: it passes only when a replica remembered, and says what is wrong otherwise."""

from __future__ import annotations

import io
import json
import threading
import urllib.error
from email.message import Message
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from engram_operator import chat_check
from engram_operator.chat_check import CheckFailed, Turn, check, http_post, main
from tests.support import patience
from tests.support.virtual_clock import VirtualClock
from tests.unit.chart.rendering import one, render

LIMIT = ("--timeout-seconds", str(patience.SECONDS))
SERVICE, REPLICA = "http://chat", "http://chat-0"


@pytest.fixture(autouse=True)
def virtual_time(monkeypatch):
    monkeypatch.setattr(chat_check, "time", VirtualClock())


class Model:
    """Counts a token a character, and remembers whole blocks when `remembers`."""

    def __init__(self, *, remembers: bool = True, failures: list[Exception] | None = None) -> None:
        self.remembers = remembers
        self.failures = failures or []
        self.asked: list[tuple[str, Turn]] = []
        self.known = 0

    def __call__(self, url: str, body: Turn, timeout_s: float) -> Turn:
        self.asked.append((url, body))
        if self.failures:
            raise self.failures.pop(0)
        prompt = sum(len(message["content"]) for message in body["messages"])
        restored = self.known // 16 * 16 if self.remembers and len(body["messages"]) > 1 else 0
        self.known = prompt
        said: dict[str, Any] = {"restored_tokens": restored, "prefilled_tokens": prompt - restored, "tier": "gpu"}
        return {
            "choices": [{"message": {"role": "assistant", "content": "The third."}}],
            "usage": {"prompt_tokens": prompt},
            "engram": said,
        }


def run(model: Model, timeout_s: float = 5.0) -> list[str]:
    lines: list[str] = []
    options: dict[str, Any] = {"timeout_s": timeout_s, "pause_s": 0.01, "log": lines.append}
    check(model, model="chat", service_url=SERVICE, replica_url=REPLICA, **options)
    return lines


def refused(status: int) -> urllib.error.HTTPError:
    return urllib.error.HTTPError(SERVICE, status, "", Message(), io.BytesIO(b'{"error": "no such model"}'))


def test_two_turns_of_one_conversation_on_one_replica():
    model = Model()
    assert "restored" in run(model)[-1]
    service, first, second = model.asked
    assert [url for url, _ in model.asked] == [f"{base}/v1/chat/completions" for base in (SERVICE, REPLICA, REPLICA)]
    assert first[1]["conversation_id"] == second[1]["conversation_id"] != service[1]["conversation_id"]
    assert second[1]["messages"][: len(first[1]["messages"])] == first[1]["messages"]
    assert second[1]["messages"][1] == {"role": "assistant", "content": "The third."}


def test_a_replica_that_computes_everything_again_fails():
    with pytest.raises(CheckFailed, match="restored 0 tokens"):
        run(Model(remembers=False))


def test_a_model_that_is_still_starting_is_waited_for():
    model = Model(failures=[ConnectionRefusedError("refused"), refused(503)])
    run(model)
    assert len(model.asked) == 5


def test_a_refusal_is_not_waited_for():
    with pytest.raises(CheckFailed, match=r"404: .*no such model"):
        run(Model(failures=[refused(404)]))


def test_giving_up_says_what_the_last_try_said():
    with pytest.raises(CheckFailed, match="Name or service not known"):
        run(Model(failures=[OSError("Name or service not known")] * 1000), timeout_s=0.05)


def test_over_http_with_a_key(tmp_path, capsys):
    """The whole command against a real socket, the API key from a file."""
    model, headers = Model(), []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            headers.append(self.headers["Authorization"])
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = json.dumps(model(self.path, body, 1.0)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    token = tmp_path / "token"
    token.write_text("sk-1\n")
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        code = main(["--model", "chat", "--service-url", url, "--token-file", str(token), *LIMIT])
        model.remembers = False
        failed = main(["--model", "chat", "--service-url", url, *LIMIT])
        server.shutdown()
    assert (code, failed) == (0, 1)
    assert headers[:3] == ["Bearer sk-1"] * 3
    assert headers[3:] == [None] * 3
    assert "failed: the second turn restored 0 tokens" in capsys.readouterr().err


def test_a_proxy_in_the_environment_is_not_asked(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://192.0.2.1:1")
    with pytest.raises(OSError, match="refused"):
        http_post(None)("http://127.0.0.1:1", {}, patience.SECONDS)


def test_the_test_pod_asks_a_replica_by_its_stable_name():
    values = {"helmTest": {"model": "chat", "namespace": "team-a", "servedName": "org/chat", "apiKeySecret": "key"}}
    pod = one(render(values), "Pod")
    args = pod["spec"]["containers"][0]["args"]
    assert "--model=org/chat" in args
    assert "--service-url=http://chat.team-a.svc:8000" in args
    assert "--replica-url=http://chat-0.chat-pods.team-a.svc:8000" in args
    assert "--token-file=/etc/engram/api-key/token" in args
    assert pod["spec"]["volumes"][0]["secret"]["secretName"] == "key"


def test_a_model_made_for_the_test_goes_with_it():
    values = {"helmTest": {"create": {"uri": "file:///opt/tiny", "image": "engine:1", "args": ["--x"]}}}
    model, pod = one(render(values), "EngramModel"), one(render(values), "Pod")
    name = model["metadata"]["name"]
    assert f"--service-url=http://{name}.engram-system.svc:8000" in pod["spec"]["containers"][0]["args"]
    assert model["spec"]["engine"]["image"] == "engine:1"
    for obj in (model, pod):
        annotations = obj["metadata"]["annotations"]
        assert annotations["helm.sh/hook"] == "test"
        assert annotations["helm.sh/hook-delete-policy"] == "before-hook-creation,hook-succeeded"
