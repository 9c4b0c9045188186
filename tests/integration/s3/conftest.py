"""S3 servers of the session, each started once and only when a test asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import radosgw as ceph
from tests.support.moto_server import running_moto
from tests.support.radosgw import running_radosgw
from tests.support.s3_process import S3Server


@pytest.fixture(scope="session")
def moto() -> Iterator[S3Server]:
    with running_moto() as server:
        yield server


@pytest.fixture(scope="session")
def radosgw() -> Iterator[S3Server]:
    reason = ceph.missing()
    if reason is not None:
        pytest.skip(reason)
    with running_radosgw() as server:
        yield server
