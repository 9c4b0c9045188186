"""The object store of a run, in the cluster's network: started once, and found by every process of the run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.cluster.layout import STORE_IP, Layout
from tests.support import radosgw
from tests.support.s3_process import S3Server


@contextmanager
def running(layout: Layout) -> Iterator[S3Server]:
    """It ends with this process, also when that is killed."""
    enter = (*layout.enter(), "setpriv", "--pdeathsig", "KILL")
    with radosgw.running_radosgw(place=radosgw.Place(STORE_IP, enter)) as server:
        yield server


@contextmanager
def sharing(layout: Layout) -> Iterator[S3Server]:
    """The same, and inside the block other processes find it by `shared`."""
    with running(layout) as server:
        announce(layout, server, os.getpid())
        try:
            yield server
        finally:
            _note(layout).unlink(missing_ok=True)


def announce(layout: Layout, server: S3Server, owner: int) -> None:
    """`owner`: the process that it ends with."""
    place = [server.url, server.access_key, server.secret_key, server.name]
    _note(layout).write_text(json.dumps({"owner": owner, "server": place}))


def shared(layout: Layout) -> S3Server | None:
    """None when nobody shares one, or whoever did so was killed."""
    note = _note(layout)
    if not note.exists():
        return None
    found = json.loads(note.read_text())
    return S3Server(*found["server"]) if Path(f"/proc/{found['owner']}").exists() else None


def _note(layout: Layout) -> Path:
    return layout.root / "store.json"
