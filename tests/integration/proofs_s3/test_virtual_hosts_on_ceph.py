"""Buckets as host names, on a gateway that checks the signature over the host: what Amazon and others expect.

No name service is asked for the names: a forward proxy takes the requests to the gateway, whatever host they name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engram_runtime.errors import Conflict, NotFound
from engram_runtime.snapshots.io.s3.store import S3Store
from tests.support.radosgw import HOST_NAME
from tests.support.s3_faults import FaultProxy, faulty
from tests.support.s3_process import S3Server, open_store
from tests.support.store_conformance import MIB, kv_key, noise, ref_key, space

PREFIX = "team a/\u00fc+%41&=~'()*;:@$,!/"


@pytest.fixture
def proxy(radosgw: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A client asks for its way out when it is made, so the tests' own one is made before."""
    radosgw.client()
    with faulty(radosgw.url) as running:
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        for name in ("HTTP_PROXY", "http_proxy"):
            monkeypatch.setenv(name, running.url)
        yield running


@pytest.fixture
def store(radosgw: S3Server, proxy: FaultProxy, tmp_path: Path) -> Iterator[S3Store]:
    options = radosgw.options(tmp_path / "credentials", radosgw.bucket(), PREFIX)
    opened = open_store(replace(options, endpoint_url=f"http://{HOST_NAME}", force_path_style=False))
    yield opened
    opened.close()


def test_every_request_names_the_bucket_as_its_host(store: S3Store, proxy: FaultProxy) -> None:
    folder, large = space(), noise(20 * MIB)
    keys = [kv_key(folder, number) for number in range(2)]
    store.probe()
    assert store.supports_conditional_writes
    store.put(keys[0], [b"small"], if_absent=True)
    with pytest.raises(Conflict):
        store.put(keys[0], [b"again"], if_absent=True)
    store.put(keys[1], [large])
    assert store.get(keys[1]) == large
    assert store.get(keys[1], 9 * MIB, 100) == large[9 * MIB : 9 * MIB + 100]
    store.touch(keys[0])
    assert [info.key for info in store.list(folder)] == keys
    tag = store.compare_and_swap(ref_key(folder), b"head", None)
    assert store.compare_and_swap(ref_key(folder), b"next", tag) != tag
    for key in keys:
        store.delete(key)
        with pytest.raises(NotFound):
            store.get(key)
    hosts = {seen.headers["Host"] for seen in proxy.seen}
    assert hosts == {f"{store.options.bucket}.{HOST_NAME}"}
    assert {seen.method for seen in proxy.seen} >= {"GET", "PUT", "POST", "DELETE"}
    # In paths only the key, below its prefix; requests about the bucket have none.
    assert all(seen.path.startswith((f"/{PREFIX}", "/?")) for seen in proxy.seen)
