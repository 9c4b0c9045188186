"""Options are refused at start, by the name of the field; requests go where the options say."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from botocore.awsrequest import AWSResponse

from engram_runtime.snapshots.io.s3.client import build_client
from engram_runtime.snapshots.io.s3.options import LONGEST_KEY, S3Options
from engram_runtime.snapshots.policy.keys import Space
from tests.support import patience

GOOD = S3Options("bucket")


@pytest.mark.parametrize(
    ("uri", "bucket", "prefix"),
    [
        ("s3://bucket", "bucket", ""),
        ("s3://bucket/", "bucket", ""),
        ("s3://my-bucket.example/prod", "my-bucket.example", "prod/"),
        ("s3://bucket/a/b/", "bucket", "a/b/"),
        ("s3://bucket/a%20b+c&=~/ü", "bucket", "a%20b+c&=~/ü/"),
    ],
)
def test_uris(uri: str, bucket: str, prefix: str) -> None:
    options = S3Options.parse(uri)
    assert (options.bucket, options.prefix) == (bucket, prefix)
    assert S3Options.parse(options.uri) == options


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"bucket": "B"}, "bucket"),
        ({"bucket": "ab"}, "bucket"),
        ({"bucket": "a..b"}, "bucket"),
        ({"bucket": "a/b"}, "bucket"),
        ({"bucket": "-ab"}, "bucket"),
        ({"bucket": "a" * 64}, "bucket"),
        ({"prefix": "no-slash"}, "prefix"),
        ({"prefix": "/"}, "prefix"),
        ({"prefix": "a/../b/"}, "prefix"),
        ({"prefix": "./"}, "prefix"),
        ({"prefix": "a//b/"}, "prefix"),
        ({"prefix": "a\n/"}, "prefix"),
        ({"prefix": "a\ud800/"}, "prefix"),
        ({"prefix": "é" * 500 + "/"}, "prefix"),
        ({"endpoint_url": "s3.example.com"}, "endpoint_url"),
        ({"endpoint_url": "ftp://host"}, "endpoint_url"),
        ({"endpoint_url": "http://host/path"}, "endpoint_url"),
        ({"endpoint_url": "http://user:word@host"}, "endpoint_url"),
        ({"endpoint_url": "http://host:port"}, "endpoint_url"),
        ({"endpoint_url": "http://"}, "endpoint_url"),
        ({"region": ""}, "region"),
        ({"region": "eu west"}, "region"),
        ({"ca_bundle": Path("/no/such/file")}, "ca_bundle"),
        ({"credentials_dir": Path("/no/such/folder")}, "credentials_dir"),
        ({"sse": "aes"}, "sse"),
        ({"kms_key_id": "key"}, "kms_key_id"),
        ({"kms_key_id": "key", "sse": "AES256"}, "kms_key_id"),
        ({"kms_key_id": "", "sse": "aws:kms"}, "kms_key_id"),
        ({"connect_timeout_seconds": 0}, "connect_timeout_seconds"),
        ({"read_timeout_seconds": -1}, "read_timeout_seconds"),
        ({"deadline_seconds": float("nan")}, "deadline_seconds"),
        ({"read_parallel": 0}, "read_parallel"),
        ({"part_bytes": 1 << 20}, "part_bytes"),
        ({"multipart_from_bytes": 1 << 20}, "multipart_from_bytes"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} must"):
        replace(GOOD, **change)


@pytest.mark.parametrize("uri", ["file:///a", "s3:/b", "bucket", "S3://bucket"])
def test_other_uris_are_refused(uri: str) -> None:
    with pytest.raises(ValueError, match=r"^store_uri must"):
        S3Options.parse(uri)


def test_the_longest_prefix_leaves_room_for_the_longest_key() -> None:
    space = Space("0" * 32, "0" * 16)
    keys = [space.kv("0" * 64), space.snapshot("0" * 32), space.anchor("0" * 64), space.ref("0" * 32, "0" * 32)]
    entry = "/" + "0" * 16 + "0" * 32  # of a head that is a log
    assert max(len(key) for key in keys) + len(entry) <= LONGEST_KEY


def test_options_cost_no_sdk() -> None:
    code = "import sys, engram_runtime.snapshots.io.s3.options; print('boto3' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=patience.SECONDS, check=False
    )
    assert done.stdout.split() == ["False", "False"], done.stderr


@pytest.mark.parametrize(
    ("options", "url"),
    [
        (GOOD, "https://bucket.s3.amazonaws.com/v1/a"),
        (replace(GOOD, region="eu-west-1"), "https://bucket.s3.eu-west-1.amazonaws.com/v1/a"),
        (replace(GOOD, force_path_style=True, region="eu-west-1"), "https://s3.eu-west-1.amazonaws.com/bucket/v1/a"),
        (replace(GOOD, endpoint_url="https://s3.example.com"), "https://bucket.s3.example.com/v1/a"),
        (replace(GOOD, endpoint_url="https://s3.example.com:8443"), "https://bucket.s3.example.com:8443/v1/a"),
        (
            replace(GOOD, endpoint_url="https://s3.example.com", force_path_style=True),
            "https://s3.example.com/bucket/v1/a",
        ),
        (replace(GOOD, endpoint_url="http://192.0.2.1:9000"), "http://192.0.2.1:9000/bucket/v1/a"),
        (replace(GOOD, bucket="a.b", endpoint_url="https://s3.example.com"), "https://s3.example.com/a.b/v1/a"),
    ],
)
def test_where_requests_go(options: S3Options, url: str, tmp_path: Path) -> None:
    """Virtual hosts by default, as Amazon wants; paths where they are asked for or a host name is impossible."""
    assert sent(options, tmp_path, "get_object").url.partition("?")[0] == url


def test_checksums_are_amazons_own_business(tmp_path: Path) -> None:
    amazon = sent(GOOD, tmp_path, "put_object", Body=b"x").headers
    assert [name for name in amazon if name.lower() in ("x-amz-trailer", "x-amz-sdk-checksum-algorithm")]
    other = sent(replace(GOOD, endpoint_url="https://s3.example.com"), tmp_path, "put_object", Body=b"x").headers
    assert [name for name in other if "checksum" in name.lower() or "trailer" in name.lower()] == []


def test_nothing_waits_for_100_continue(tmp_path: Path) -> None:
    assert "Expect" not in sent(GOOD, tmp_path, "put_object", Body=io.BytesIO(b"x")).headers


def sent(options: S3Options, folder: Path, operation: str, **arguments: Any) -> Any:
    """The request that would go out."""
    (folder / "access-key-id").write_text("key")
    (folder / "secret-access-key").write_text("secret")
    client = build_client(replace(options, credentials_dir=folder))
    requests = []

    def answer(request: Any, **_: Any) -> AWSResponse:
        requests.append(request)
        raw = type("Raw", (), {"stream": lambda self: iter([b""]), "read": lambda self, *a: b""})()
        return AWSResponse(request.url, 200, {}, raw)

    client.meta.events.register("before-send.s3", answer)
    getattr(client, operation)(Bucket=options.bucket, Key="v1/a", **arguments)
    return requests[0]
