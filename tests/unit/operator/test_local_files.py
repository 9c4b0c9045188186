"""Files of the local mode: the endpoints that clients read, the dotenv file, the tenant key, the events."""

from __future__ import annotations

import io
import json
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_operator.errors import ResourceError
from engram_operator.local.endpoints import Endpoint, EndpointsFile
from engram_operator.local.events import Event, Reporter
from engram_operator.local.secrets import LocalSecrets, read_dotenv, tenant_key, variable_prefix
from engram_operator.settings import LocalSettings

ONE = Endpoint("m-0", "http://127.0.0.1:30000", "http://127.0.0.1:31000")


def models(path: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads(path.read_text())["models"]
    return found


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_endpoints_are_published_and_withdrawn(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "endpoints.json"
    file = EndpointsFile(path, pid=os.getpid())
    file.publish("Org/M", "ns", [ONE])
    assert json.loads(path.read_text()) == {
        "version": 1,
        "models": {
            "Org/M": {
                "namespace": "ns",
                "endpoints": [{"name": "m-0", "url": ONE.url, "admin_url": ONE.admin_url}],
                "pid": os.getpid(),
            }
        },
    }
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    file.withdraw(["Org/M", "never"])
    assert models(path) == {}
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["endpoints.json", "endpoints.lock"]


def test_entries_of_others_stay_while_they_live(tmp_path: Path) -> None:
    path = tmp_path / "endpoints.json"
    ours, theirs = EndpointsFile(path), EndpointsFile(path, pid=os.getppid())
    EndpointsFile(path, pid=dead_pid()).publish("gone", "default", [ONE])
    theirs.publish("theirs", "default", [ONE])
    assert set(models(path)) == {"theirs"}
    with pytest.raises(ResourceError, match=r'the model name "theirs" is already served by another engram up \(pid'):
        ours.refuse_taken(["mine", "theirs"])
    ours.refuse_taken(["mine", "gone"])
    ours.publish("mine", "default", [])
    ours.withdraw(["mine", "theirs"])
    assert set(models(path)) == {"theirs"}


def test_many_writers_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "endpoints.json"
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda i: EndpointsFile(path).publish(f"m{i}", "default", [ONE]), range(40)):
            pass
    assert set(models(path)) == {f"m{i}" for i in range(40)}


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"version": 2, "models": {"x": {}}}', '{"version": 1, "models": []}', "null"]
)
def test_a_file_we_do_not_understand_is_replaced(tmp_path: Path, text: str) -> None:
    path = tmp_path / "endpoints.json"
    path.write_text(text)
    EndpointsFile(path).publish("m", "default", [ONE])
    assert set(models(path)) == {"m"}


def test_dotenv(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    path.write_text(
        '# comment\n\nS3__ID=abc # not part\nexport S3__KEY=\'a # b\'\nAPI_KEYS__team-1.a="one\\ntwo \\"q\\" \\\\"\n'
        "s3__low=x\nE__K=\nH__K=a#b\n"
    )
    assert read_dotenv(path) == {
        ("S3", "ID"): "abc",
        ("S3", "KEY"): "a # b",
        ("API_KEYS", "team-1.a"): 'one\ntwo "q" \\',
        ("S3", "low"): "x",
        ("E", "K"): "",
        ("H", "K"): "a#b",
    }


def test_dotenv_problems_name_the_line_and_no_value(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    path.write_text("A__B=fine\nHF_TOKEN=hush\nA__C='open\nA__../x=hush\n")
    with pytest.raises(ResourceError) as caught:
        read_dotenv(path)
    assert [problem.split(": ")[0] for problem in caught.value.problems] == [f"{path}:{n}" for n in (2, 3, 4)]
    assert "hush" not in str(caught.value)
    with pytest.raises(ResourceError, match="No such file"):
        read_dotenv(tmp_path / "none")


@given(st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"])))
def test_a_quoted_value_comes_back(tmp_path_factory: pytest.TempPathFactory, value: str) -> None:
    path = tmp_path_factory.mktemp("dotenv") / ".env"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    path.write_text(f'A__B="{escaped}"\n', encoding="utf-8")
    assert read_dotenv(path) == {("A", "B"): value}


def test_secrets_by_name(tmp_path: Path) -> None:
    secrets = LocalSecrets(tmp_path, {("API_KEYS", "alice"): "sk"})
    assert variable_prefix("api-keys") == variable_prefix("api.keys") == "API_KEYS"
    assert secrets.read("api-keys") == {"alice": b"sk"}
    assert secrets.read("other") == {}
    assert secrets.read("engram-tenant-key") == {"key": (tmp_path / "tenant-key").read_bytes()}
    given_key = LocalSecrets(tmp_path, {("ENGRAM_TENANT_KEY", "key"): "k" * 32})
    assert given_key.read("engram-tenant-key") == {"key": b"k" * 32}


def test_the_tenant_key_is_private_stable_and_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "state" / "tenant-key"
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: tenant_key(path), range(16)))
    assert len(keys) == 1
    assert len(keys.pop()) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["tenant-key"]
    path.write_text("short")
    with pytest.raises(ResourceError, match=r"tenant-key: the tenant key is damaged \(5 bytes\): put its backup back"):
        tenant_key(path)
    assert path.read_text() == "short"


def test_settings() -> None:
    assert LocalSettings.from_environment({"XDG_STATE_HOME": "/s", "A": "1"}).state_dir == Path("/s/engram")
    assert LocalSettings.from_environment({"HOME": "/h"}).state_dir == Path("/h/.local/state/engram")
    with pytest.raises(ValueError, match="XDG_STATE_HOME must be an absolute path, got 'x'"):
        LocalSettings.from_environment({"XDG_STATE_HOME": "x"})


def test_events_for_people_and_for_programs() -> None:
    event = Event("default/m-0", "Ready", "Ready", "http://x", {"url": "http://x"})
    person, program = io.StringIO(), io.StringIO()
    Reporter(person, as_json=False)(event)
    Reporter(program, as_json=True)(event)
    assert person.getvalue()[8:] == "  default/m-0              Ready        Ready: http://x\n"
    entry = json.loads(program.getvalue())
    assert entry.pop("time") > 1e9
    assert entry == {
        "subject": "default/m-0", "phase": "Ready", "reason": "Ready", "message": "http://x", "url": "http://x"
    }  # fmt: skip
