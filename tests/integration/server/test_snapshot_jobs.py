"""`engram snapshots` on a store alone, as a Job runs it: whose snapshot it is need not be said, and gone is gone."""

from __future__ import annotations

import json
import os

import pytest

from engram_runtime.cli.main import main
from tests.support.snapshots import KEY, World, tokens


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path, disk=False)
    yield made
    made.service.close()


@pytest.fixture
def engram(world, tmp_path, capsys):
    key = tmp_path / "key"
    key.write_bytes(KEY)
    log = tmp_path / "termination-log"
    log.touch()

    def run(action, *args):
        """(exit code, lines, standard error, termination message)"""
        where = ["--store", f"file://{world.store_path}", "--tenant-key-file", str(key)]
        ended = ["--termination-log", str(log)] if action in ("rm", "sweep") else []
        code = main(["snapshots", action, *args, *where, *ended])
        said = capsys.readouterr()
        return code, said.out.splitlines(), said.err, log.read_text().strip()

    return run


def saved(world):
    return [world.save(tokens(40, seed=n), "talk", n, tenant=t).snapshot_id for n, t in ((1, "acme"), (2, "beta"))]


def test_rm_needs_no_tenant(world, engram):
    first, second = saved(world)
    code, lines, err, note = engram("rm", first, second, "--json")
    assert (code, err) == (0, "")
    assert [json.loads(line) for line in lines] == [
        {"id": first, "deleted": True, "error": None},
        {"id": second, "deleted": True, "error": None},
    ]
    assert json.loads(note) == {"snapshots_deleted": 2, "snapshots_missing": 0}
    world.start()
    assert world.service.overview.page().items == []
    # Other replicas are told: one record for each tenant.
    assert sum("/gone/" in str(path) for path in world.store_path.rglob("*") if path.is_file()) == 2
    code, lines, _, note = engram("rm", first, "0" * 32)
    assert (code, lines) == (0, [f"{first} was not there", f"{'0' * 32} was not there"])
    assert json.loads(note)["snapshots_missing"] == 2


def test_rm_of_one_tenant_leaves_the_others(world, engram):
    first, second = saved(world)
    code, *_ = engram("rm", first, second, "--tenant", "acme")
    assert code == 0
    assert [view.snapshot_id for view in world.service.overview.page().items] == [second]


def test_what_cannot_be_deleted_is_an_error_and_does_not_keep_the_rest(world, engram):
    first, second = saved(world)
    (damaged,) = (path for path in world.store_path.rglob(first) if "/snap/" in str(path))
    damaged.write_bytes(b"\0" * damaged.stat().st_size)
    code, _, err, note = engram("rm", first, second)
    assert code == 1
    assert err.startswith(f"engram: {first}: ")
    assert note in err
    assert "Traceback" not in err
    code, lines, *_ = engram("rm", second)
    assert (code, lines) == (0, [f"{second} was not there"])
    code, _, err, note = engram("rm", "../../etc")
    assert (code, "must be 32" in err, "must be 32" in note) == (1, True, True)


def test_ls_of_everybody_shows_hashes(world, engram):
    first, second = saved(world)
    code, lines, *_ = engram("ls", "--all-tenants", "--json")
    rows = [json.loads(line) for line in lines]
    assert (code, [row["id"] for row in rows]) == (0, [second, first])
    assert "talk" not in "".join(lines)
    views = {view.snapshot_id: view for view in world.service.overview.page().items}
    for row in rows:
        view = views[row["id"]]
        assert (row["tenant"], row["conversation_id"]) == (view.tenant_hash, view.conversation_hash)
    assert engram("ls")[1][1:] == []  # the default tenant has none
    assert engram("ls", "--all-tenants", "--tenant", "x")[0] == 1


def test_sweep_applies_retention(world, engram):
    first = world.save(tokens(40), "a", 1, tenant="acme").snapshot_id
    second = world.save(tokens(60), "b", 1, tenant="acme").snapshot_id
    for path in world.store_path.rglob("*"):
        if path.is_file():
            old = path.stat().st_mtime - 86400  # past the grace period
            os.utime(path, (old, old))
    code, lines, err, note = engram("sweep", "--json", "--retention-max-conversations", "1")
    assert (code, err) == (0, "")
    assert json.loads(lines[-1]) == json.loads(note)
    assert json.loads(note)["snapshots_deleted"] == 1
    world.start()
    assert [view.snapshot_id for view in world.service.overview.page().items] == [second]
    assert first != second
    assert engram("sweep")[1][0].startswith("0 snapshots")


def test_a_store_that_cannot_be_reached_fails_the_job(world, engram, tmp_path, capsys):
    key, log = tmp_path / "key", tmp_path / "termination-log"
    where = ["--store", "s3://bucket/x", "--s3-endpoint-url", "http://127.0.0.1:9", "--tenant-key-file", str(key)]
    credentials = tmp_path / "credentials"
    credentials.mkdir()
    (credentials / "access-key-id").write_text("id")
    (credentials / "secret-access-key").write_text("secret")
    where += ["--s3-credentials-dir", str(credentials), "--termination-log", str(log)]
    assert main(["snapshots", "sweep", *where]) == 1  # to a server this is no reason to stop; to a Job it is
    err = capsys.readouterr().err
    assert err.startswith("engram: ")
    assert "127.0.0.1" in err
    assert log.read_text().strip() in err
