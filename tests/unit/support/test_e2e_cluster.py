"""Who may use a cluster that is up, and when its API server was away: the notes that runs leave for each other."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.e2e import store
from tests.e2e.cluster.cluster import Busy, Cluster
from tests.e2e.cluster.layout import Layout
from tests.support.s3_process import S3Server


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    layout = Layout(root=tmp_path / "cluster")
    layout.root.mkdir()
    return Cluster(layout)


def other(cluster: Cluster) -> Cluster:
    return Cluster(cluster.layout)


def dead_process() -> int:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def test_a_cluster_of_a_person_is_kept_and_stays(cluster: Cluster) -> None:
    assert (cluster.kept(), cluster.stays()) == (False, False)
    cluster.mark_kept()
    assert (cluster.kept(), cluster.stays()) == (True, True)


def test_a_cluster_of_a_run_is_shared_while_the_run_lives(cluster: Cluster) -> None:
    cluster.acquire()
    with pytest.raises(Busy):
        other(cluster).acquire(shared=True)
    cluster.keep_for_me()
    helper = other(cluster)
    helper.acquire(shared=True)
    assert (helper.kept(), helper.stays()) == (True, False)
    with pytest.raises(Busy):
        other(cluster).acquire()
    (cluster.layout.root / "kept").write_text(str(dead_process()))  # killed before it took the cluster down
    assert not helper.kept()


def test_the_store_of_a_killed_run_is_not_found(cluster: Cluster) -> None:
    server = S3Server("http://198.18.0.2:9", "key", "secret", "radosgw")
    assert store.shared(cluster.layout) is None
    store.announce(cluster.layout, server, os.getpid())
    assert store.shared(cluster.layout) == server
    store.announce(cluster.layout, server, dead_process())
    assert store.shared(cluster.layout) is None


def test_refusals_during_an_outage_are_told_from_others(cluster: Cluster) -> None:
    before = datetime.now(UTC) - timedelta(seconds=1)
    assert not cluster.was_out(before)
    with cluster.outage():
        during = datetime.now(UTC)
    assert cluster.was_out(during)
    assert not cluster.was_out(before)
    assert not cluster.was_out(datetime.now(UTC) + timedelta(seconds=1))


def test_what_passed_on_it_is_remembered(cluster: Cluster) -> None:
    assert cluster.passed() == set()
    cluster.note_test("tests/e2e/test_a.py::test_b[c d]")
    assert other(cluster).passed() == {"tests/e2e/test_a.py::test_b[c d]"}
