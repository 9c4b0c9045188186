"""hf:// downloads against a hub on loopback: whole or not at all, resumed, checked, once per volume."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from engram_runtime.fetching.errors import FetchError
from engram_runtime.fetching.folder import fetch, is_complete
from engram_runtime.fetching.hub import Hub
from engram_runtime.fetching.report import Report
from engram_runtime.fetching.transfer import TransferOptions
from tests.support.fake_hub import CHECKPOINT, COMMIT, OTHER, running_hub

URI = "hf://org/model"
QUICK = TransferOptions(workers=4, part_bytes=32 << 10, attempts=3, first_pause=0.01, longest_pause=0.02)
SECONDS = 240  # for what happens at once unless the machine is busy
WANTED = {"config.json", "tokenizer_config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}


@pytest.fixture
def hub():
    with running_hub() as found:
        yield found


class Fetcher:
    def __init__(self, hub, folder):
        self.hub, self.folder = hub, folder
        self.lines: list[str] = []

    def __call__(self, revision=None, token=None, options=QUICK, **report):
        source = Hub(URI, revision=revision, endpoint=self.hub.url, token=token)
        try:
            fetch(source, self.folder, Report(self.lines.append, **report), options)
        finally:
            source.close()

    def fails(self, **given):
        with pytest.raises(FetchError) as caught:
            self(**given)
        assert not is_complete(self.folder, URI, given.get("revision"))
        assert "signature=secret" not in str(caught.value)
        return caught.value.reason, str(caught.value)

    def names(self):
        return {path.name for path in self.folder.iterdir() if not path.name.startswith(".")}


def until(condition):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@pytest.fixture
def fetcher(hub, tmp_path):
    return Fetcher(hub, tmp_path / "models" / "m")


def test_what_a_server_needs_and_nothing_else(hub, fetcher):
    fetcher()
    assert fetcher.names() == WANTED  # no pickle, no other layout, no prose
    for name in WANTED:
        assert (fetcher.folder / name).read_bytes() == CHECKPOINT[name]
    mark = json.loads((fetcher.folder / ".complete").read_text())
    assert (mark["uri"], mark["revision"], mark["requested_revision"]) == (URI, COMMIT, None)
    assert {entry["path"] for entry in mark["files"]} == WANTED
    assert all(entry["digest"] for entry in mark["files"])
    assert [path.name for path in (fetcher.folder / ".fetch").iterdir()] == ["lock"]
    ranges = [request[2] for request in hub.file_requests("model.safetensors")]
    assert len(ranges) == 8
    assert f"complete at revision {COMMIT}, 5 files" in fetcher.lines[-1]


def test_a_complete_folder_needs_no_hub(hub, fetcher):
    fetcher()
    before = len(hub.requests)
    hub.branches["main"] = OTHER  # and stays what it is when a branch moves
    fetcher()
    assert len(hub.requests) == before
    (fetcher.folder / "tokenizer.json").unlink()
    assert not is_complete(fetcher.folder, URI, None)


def test_the_revision_is_resolved_once(hub, fetcher):
    """A branch that moves between two tries must not mix two commits."""
    hub.statuses = [500] * 40
    assert fetcher.fails()[0] == "HubError"
    hub.statuses = []
    hub.revisions[OTHER] = {**CHECKPOINT, "model.safetensors": b"new weights" * 1000}
    hub.branches["main"] = OTHER
    fetcher()
    assert json.loads((fetcher.folder / ".complete").read_text())["revision"] == COMMIT
    assert (fetcher.folder / "model.safetensors").read_bytes() == CHECKPOINT["model.safetensors"]


def test_another_revision_replaces_the_folder(hub, fetcher):
    hub.revisions[OTHER] = {**CHECKPOINT, "model.safetensors": b"new weights" * 1000}
    del hub.revisions[OTHER]["chat_template.jinja"]
    hub.branches["v2"] = OTHER
    fetcher()
    config = len(hub.file_requests("/config.json"))
    fetcher(revision="v2")
    assert (fetcher.folder / "model.safetensors").read_bytes() == b"new weights" * 1000
    assert fetcher.names() == WANTED - {"chat_template.jinja"}
    assert len(hub.file_requests("/config.json")) == config  # what is the same stays


def test_redirects_carry_no_token(hub, fetcher):
    hub.token = "hf_secret"
    fetcher(token="hf_secret")
    assert {request[3] for request in hub.requests if request[0] == "cdn"} == {""}
    assert {request[3] for request in hub.requests if request[0] == "hub"} == {"Bearer hf_secret"}
    assert not any("hf_secret" in path.read_text(errors="ignore") for path in fetcher.folder.rglob("*.json"))


@pytest.mark.parametrize(
    ("change", "given", "reason", "said"),
    [
        ({"token": "right"}, {}, "NotFound", "a token is needed"),
        ({"token": "right"}, {"token": "wrong"}, "NotFound", "the token is not one that it takes"),
        ({"gated": True}, {}, "AccessDenied", "accept its terms"),
        ({}, {"revision": "no-such"}, "RevisionNotFound", "no-such"),
        ({"statuses": [404]}, {}, "RevisionNotFound", COMMIT),
        ({"ranges": False}, {}, "NoRanges", "cannot be resumed"),
    ],
)
def test_what_the_hub_refuses_is_said_plainly(hub, fetcher, change, given, reason, said):
    for name, value in change.items():
        setattr(hub, name, value)
    found, message = fetcher.fails(**given)
    assert (found, said in message) == (reason, True), message


def test_errors_that_pass_are_tried_again(hub, fetcher):
    hub.statuses = [500, 503, 429, 502]
    hub.truncate = 5
    fetcher(options=replace(QUICK, attempts=10))  # all of them may meet one part, when the others' threads are late
    assert (fetcher.folder / "model.safetensors").read_bytes() == CHECKPOINT["model.safetensors"]


def test_a_cut_part_goes_on_where_it_broke(hub, fetcher):
    hub.truncate = 1
    fetcher(options=TransferOptions(workers=1, part_bytes=1 << 20, attempts=3, first_pause=0.01))
    ranges = [request[2] for request in hub.file_requests("model.safetensors")]
    assert ranges in (["bytes=0-262143"], ["bytes=0-262143", "bytes=131072-262143"])
    assert hub.truncate == 0


def test_a_wrong_byte_is_downloaded_again(hub, fetcher):
    hub.corrupt = 1
    fetcher()
    assert (fetcher.folder / "model.safetensors").read_bytes() == CHECKPOINT["model.safetensors"]
    assert (fetcher.folder / "tokenizer.json").read_bytes() == CHECKPOINT["tokenizer.json"]
    assert any("downloading it again" in line for line in fetcher.lines)


def test_a_wrong_digest_gives_up_and_leaves_nothing_to_load(hub, fetcher):
    hub.wrong_digest = True
    reason, message = fetcher.fails()
    assert reason == "ChecksumMismatch"
    assert "model.safetensors" in message
    assert not (fetcher.folder / "model.safetensors").exists()


def test_without_digests_sizes_still_count(hub, fetcher):
    hub.digests = False
    fetcher()
    assert (fetcher.folder / "model.safetensors").read_bytes() == CHECKPOINT["model.safetensors"]


def test_shards_are_those_of_the_index(hub, fetcher):
    files = hub.revisions[COMMIT]
    del files["model.safetensors"]
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    files |= {"model-1.safetensors": b"1" * 5000, "model-2.safetensors": b"2" * 5000, "extra.safetensors": b"3"}
    fetcher()
    assert {"model-1.safetensors", "model-2.safetensors"} <= fetcher.names()
    assert "extra.safetensors" not in fetcher.names()
    shutil.rmtree(fetcher.folder)
    del files["model-2.safetensors"]
    assert fetcher.fails()[0] == "Incomplete"
    files["model.safetensors.index.json"] = b'{"weight_map": {"a": "../../etc/passwd"}}'
    assert fetcher.fails()[0] == "BadIndex"


def test_a_pickle_is_no_checkpoint(hub, fetcher):
    del hub.revisions[COMMIT]["model.safetensors"]
    reason, message = fetcher.fails()
    assert reason == "NoSafetensors"
    assert "pytorch_model.bin" in message


def test_names_from_outside_stay_inside(hub, fetcher, tmp_path):
    hub.revisions[COMMIT] |= {
        "../evil.json": b"{}",
        "/etc/evil.json": b"{}",
        "a/b/c.json": b"{}",
        ".fetch/x.json": b"{}",
    }
    fetcher()
    assert fetcher.names() == WANTED
    assert not list(tmp_path.rglob("evil.json"))


def test_too_small_a_volume_is_said_before_a_byte_is_moved(hub, fetcher, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=(16 << 20) + 100))
    reason, message = fetcher.fails()
    assert reason == "NoSpace"
    assert "give the volume more room" in message
    assert hub.file_requests() == []


def test_an_unreachable_hub(tmp_path):
    source = Hub(URI, endpoint="http://127.0.0.1:9")
    with pytest.raises(FetchError) as caught:
        fetch(source, tmp_path / "m", Report(lambda line: None), QUICK)
    assert caught.value.reason == "Unreachable"


def test_replicas_on_one_volume_download_once(hub, fetcher):
    hub.hold_from = 0
    failures: list[BaseException] = []

    def work():
        try:
            fetcher()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: sum("waiting" in line for line in fetcher.lines) >= 2)
    hub.released.set()
    for thread in threads:
        thread.join(SECONDS)
    assert failures == []
    assert len(hub.file_requests("model.safetensors")) == 8
    assert sum("from before" in line for line in fetcher.lines) == 2


def engram(hub, folder, *more, **environment):
    command = [sys.executable, "-m", "engram_runtime.cli", "fetch", URI, "--path", str(folder), *more]
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_kill_9_in_the_middle_and_the_next_try_goes_on(hub, tmp_path):
    data = os.urandom(20 << 20) + b"odd"
    hub.revisions[COMMIT]["model.safetensors"] = data
    hub.hold_from = (16 << 20) + 100_000  # in the middle of the second part
    folder = tmp_path / "m"
    process = engram(hub, folder, "--parallel", "1")
    journal = folder / ".fetch" / "model.safetensors.journal"
    until(lambda: journal.exists() and journal.read_text().count("\n") >= 2)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (folder / "model.safetensors").exists()
    assert not (folder / ".complete").exists()
    with journal.open("a") as file:
        file.write("1")  # as a kill in the middle of a line leaves it
    hub.released.set()
    before = len(hub.file_requests("model.safetensors"))
    process = engram(hub, folder)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    assert (folder / "model.safetensors").read_bytes() == data
    again = [request[2] for request in hub.file_requests("model.safetensors")[before:]]
    assert again == [f"bytes={16 << 20}-{len(data) - 1}"]  # the first part, 16 MiB, was not asked for again
    assert "are here from an earlier try" in out


def test_a_part_file_that_lies_is_found_out(hub, fetcher):
    """A node that lost power may keep the journal and lose the bytes."""
    fetcher()
    (fetcher.folder / ".complete").unlink()
    target = fetcher.folder / "model.safetensors"
    scratch = fetcher.folder / ".fetch"
    size = target.stat().st_size
    target.unlink()
    (scratch / "model.safetensors.partial").write_bytes(bytes(size))
    identity = [size, f"sha256:{hashlib.sha256(CHECKPOINT['model.safetensors']).hexdigest()}", ""]
    lines = [json.dumps({"identity": identity, "part_bytes": 32 << 10}), *map(str, range(8)), ""]
    (scratch / "model.safetensors.journal").write_text("\n".join(lines))
    fetcher()
    assert target.read_bytes() == CHECKPOINT["model.safetensors"]


def test_the_command_tells_the_termination_message(hub, tmp_path):
    log = tmp_path / "termination-log"
    log.touch()
    process = engram(hub, tmp_path / "m", "--termination-log", str(log), "--revision", "no-such")
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert err.startswith("engram: RevisionNotFound: ")
    assert "Traceback" not in err
    assert log.read_text().startswith("RevisionNotFound: hf://org/model")
    process = engram(hub, tmp_path / "m", "--termination-log", str(log))
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    assert log.read_text().strip() == out.strip().splitlines()[-1]


def test_tokens_come_from_files_or_the_environment(hub, tmp_path):
    hub.token = "hf_secret"
    folder = tmp_path / "credentials"
    folder.mkdir()
    (folder / "HF_TOKEN").write_text("hf_secret\n")
    for target, more, environment, code in (
        ("a", ["--credentials-dir", str(folder)], {}, 0),
        ("b", [], {"HF_TOKEN": "hf_secret"}, 0),
        ("c", ["--credentials-dir", str(folder), "--token-free"], {}, 1),
        ("d", ["--credentials-dir", str(tmp_path / "none")], {}, 1),
    ):
        process = engram(hub, tmp_path / target, *more, **environment)
        out, err = process.communicate(timeout=SECONDS)
        assert process.returncode == code, err
        assert "hf_secret" not in out + err


def test_progress_is_told_now_and_then(hub, fetcher, tmp_path):
    hub.chunk_seconds = 0.01
    fetcher(every_seconds=0.0, termination_log=tmp_path / "absent")
    assert any("%" in line and "s left" in line for line in fetcher.lines)
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize("uri", ["hf://", "hf://a/b/c", "hf://../x", "s3://a/b", "hf://a b/c"])
def test_a_uri_that_is_none(uri):
    with pytest.raises(ValueError, match="uri must be"):
        Hub(uri)
