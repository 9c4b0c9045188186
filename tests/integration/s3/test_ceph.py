"""What moto only pretends: a real gateway's clocks, signatures and lifecycle."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engram_runtime.errors import NotFound
from engram_runtime.snapshots.io.s3.store import S3Store
from engram_runtime.snapshots.io.store import StoreUnavailable
from tests.support.s3_process import S3Server, open_store
from tests.support.store_conformance import MIB, kv_key, noise, space


@pytest.fixture
def store(radosgw: S3Server, tmp_path: Path) -> Iterator[S3Store]:
    opened = open_store(radosgw.options(tmp_path / "credentials", radosgw.bucket(), "p/"))
    yield opened
    opened.close()


def test_abandoned_uploads_are_cleaned_by_age(radosgw: S3Server, store: S3Store) -> None:
    client, bucket = radosgw.client(), store.options.bucket
    half = client.create_multipart_upload(Bucket=bucket, Key="p/v1/half")
    client.upload_part(Bucket=bucket, Key="p/v1/half", UploadId=half["UploadId"], PartNumber=1, Body=b"half")
    client.create_multipart_upload(Bucket=bucket, Key="another program's")
    assert store.clean_uploads(time.time() - 3600) == 0
    assert store.clean_uploads(time.time() + 60) == 1
    left = client.list_multipart_uploads(Bucket=bucket)["Uploads"]
    assert [upload["Key"] for upload in left] == ["another program's"]


def test_many_abandoned_uploads_are_found_page_by_page(radosgw: S3Server, store: S3Store) -> None:
    client, bucket = radosgw.client(), store.options.bucket
    for number in range(5):
        for _ in range(2):
            client.create_multipart_upload(Bucket=bucket, Key=f"p/v1/half{number}")
    assert store.clean_uploads(time.time() + 60) == 10
    assert "Uploads" not in client.list_multipart_uploads(Bucket=bucket)


def test_large_objects_are_touched_in_parts(radosgw: S3Server, store: S3Store) -> None:
    small_copies = open_store(replace(store.options, copy_limit_bytes=8 * MIB, copy_part_bytes=6 * MIB))
    key, data = kv_key(space()), noise(20 * MIB)
    store.put(key, [data])
    before = store.head(key).modified
    time.sleep(1.1)  # a HEAD has whole seconds
    small_copies.touch(key)
    assert store.head(key).modified > before
    assert store.get(key) == data
    small_copies.close()


def test_an_object_that_a_lifecycle_took_is_missing_and_can_be_written_again(radosgw: S3Server, store: S3Store) -> None:
    """The gateway counts a day as ten seconds here. Its worker runs in cycles of the same length."""
    folder = space()
    lost, kept = kv_key(folder), kv_key(folder, 1)
    store.put(lost, [b"piece"])
    store.put(kept, [b"piece"])
    rule = {"ID": "x", "Status": "Enabled", "Filter": {"Prefix": f"p/{lost}"}, "Expiration": {"Days": 1}}
    client = radosgw.client()
    client.put_bucket_lifecycle_configuration(Bucket=store.options.bucket, LifecycleConfiguration={"Rules": [rule]})
    until = time.monotonic() + 240
    while time.monotonic() < until and len(store.list(folder)) == 2:
        time.sleep(1)
    assert [info.key for info in store.list(folder)] == [kept]
    for call in (store.head, store.get, store.touch):
        with pytest.raises(NotFound):
            call(lost)
    store.put(lost, [b"piece"], if_absent=True)
    assert store.get(lost) == b"piece"


def test_a_missing_bucket_and_a_wrong_key_have_their_reasons(radosgw: S3Server, store: S3Store, tmp_path: Path) -> None:
    elsewhere = open_store(replace(store.options, bucket="no-such-bucket-here"))
    with pytest.raises(StoreUnavailable) as caught:
        elsewhere.probe()
    assert caught.value.reason == "BucketMissing"
    elsewhere.close()
    stranger = replace(radosgw, secret_key="another-secret")
    refused = open_store(stranger.options(tmp_path / "stranger", store.options.bucket))
    with pytest.raises(StoreUnavailable) as caught:
        refused.probe()
    assert caught.value.reason == "CredentialsRefused"
    refused.close()


def test_two_prefixes_of_a_bucket_do_not_see_each_other(store: S3Store) -> None:
    folder = space()
    other = open_store(replace(store.options, prefix="p/q/"))
    key = kv_key(folder)
    store.put(key, [b"mine"])
    other.put(key, [b"theirs"])
    assert (store.get(key), other.get(key)) == (b"mine", b"theirs")
    assert [info.key for info in other.list("v1/")] == [key]
    other.delete(key)
    assert store.get(key) == b"mine"
    other.close()
