"""s3:// downloads, from a server that checks signatures."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import boto3
import pytest
from botocore.config import Config

from engram_runtime.fetching.bucket import Bucket
from engram_runtime.fetching.errors import FetchError
from engram_runtime.fetching.folder import fetch, is_complete
from engram_runtime.fetching.report import Report
from engram_runtime.fetching.transfer import TransferOptions
from tests.support.moto_server import running_moto

URI = "s3://models/team/tiny"
FILES = {
    "config.json": b"{}",
    "tokenizer_config.json": b"{}",
    "model.safetensors": os.urandom(300_000),
    "pytorch_model.bin": b"pickle",
    "deep/er/model.safetensors": b"x",
}
QUICK = TransferOptions(workers=4, part_bytes=64 << 10, attempts=2, first_pause=0.01, longest_pause=0.02)


@pytest.fixture(scope="module")
def server():
    with running_moto() as found:
        client(found).create_bucket(Bucket="models")
        yield found


def client(server):
    return boto3.session.Session().client(
        "s3",
        endpoint_url=server.url,
        region_name="us-east-1",
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        config=Config(s3={"addressing_style": "path"}),
    )


@pytest.fixture
def bucket(server):
    s3 = client(server)
    for item in s3.list_objects_v2(Bucket="models").get("Contents", []):
        s3.delete_object(Bucket="models", Key=item["Key"])
    for name, data in FILES.items():
        s3.put_object(Bucket="models", Key=f"team/tiny/{name}", Body=data)
    s3.put_object(Bucket="models", Key="team/tiny-other/config.json", Body=b"no")
    return s3


def credentials(server, **changes):
    found = {
        "AWS_ACCESS_KEY_ID": server.access_key,
        "AWS_SECRET_ACCESS_KEY": server.secret_key,
        "AWS_ENDPOINT_URL": server.url,
        "AWS_REGION": "us-east-1",
        **changes,
    }
    return found


def bring(server, folder, uri=URI, **changes):
    source = Bucket(uri, credentials=credentials(server, **changes))
    try:
        fetch(source, folder, Report(lambda line: None), QUICK)
    finally:
        source.close()


def test_a_checkpoint_comes_whole(server, bucket, tmp_path):
    bring(server, tmp_path)
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        assert (tmp_path / name).read_bytes() == FILES[name]
    assert not (tmp_path / "pytorch_model.bin").exists()
    mark = json.loads((tmp_path / ".complete").read_text())
    digests = {entry["path"]: entry["digest"].partition(":")[0] for entry in mark["files"]}
    assert digests["model.safetensors"] in ("md5", "sha256")


def test_an_object_uploaded_in_parts_is_checked_too(server, bucket, tmp_path):
    data = os.urandom((5 << 20) + 1000)
    upload = bucket.create_multipart_upload(Bucket="models", Key="team/tiny/model.safetensors")["UploadId"]
    place = {"Bucket": "models", "Key": "team/tiny/model.safetensors", "UploadId": upload}
    parts = []
    for number, piece in enumerate((data[: 5 << 20], data[5 << 20 :]), 1):
        tag = bucket.upload_part(**place, PartNumber=number, Body=piece)["ETag"]
        parts.append({"PartNumber": number, "ETag": tag})
    bucket.complete_multipart_upload(**place, MultipartUpload={"Parts": parts})
    bring(server, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == data


def test_a_changed_object_is_not_mixed_with_the_old_one(server, bucket, tmp_path):
    bring(server, tmp_path)
    (tmp_path / ".complete").unlink()
    newer = os.urandom(len(FILES["model.safetensors"]))
    bucket.put_object(Bucket="models", Key="team/tiny/model.safetensors", Body=newer)
    bring(server, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == newer


def test_an_object_that_changes_under_a_download(server, bucket, tmp_path):
    source = Bucket(URI, credentials=credentials(server))
    listing = source.resolve(None)
    (file,) = [file for file in listing.files if file.path == "model.safetensors"]
    bucket.put_object(Bucket="models", Key="team/tiny/model.safetensors", Body=b"other")
    with pytest.raises(FetchError) as caught, source.read(listing, file, 0, 10) as chunks:
        list(chunks)
    assert (caught.value.reason, caught.value.passing) == ("Changed", False)


@pytest.mark.parametrize(
    ("uri", "changes", "reason"),
    [
        ("s3://no-such-bucket/x", {}, "BucketMissing"),
        ("s3://models/nothing/here", {}, "NotFound"),
        ("s3://models/team/tiny-other", {}, "NoSafetensors"),
        (URI, {"AWS_SECRET_ACCESS_KEY": "wrong"}, "AccessDenied"),
        (URI, {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "Unreachable"),
    ],
)
def test_what_goes_wrong_is_named(server, bucket, tmp_path, uri, changes, reason):
    with pytest.raises(FetchError) as caught:
        bring(server, tmp_path, uri, **changes)
    assert caught.value.reason == reason
    assert server.secret_key not in str(caught.value)
    assert not is_complete(tmp_path, uri, None)


def test_the_command_with_a_mounted_secret(server, bucket, tmp_path):
    folder = tmp_path / "secret"
    folder.mkdir()
    for name, value in credentials(server).items():
        (folder / name).write_text(value + "\n")
    command = [sys.executable, "-m", "engram_runtime.cli", "fetch", URI, "--path", str(tmp_path / "m")]
    done = subprocess.run([*command, "--credentials-dir", str(folder)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert is_complete(tmp_path / "m", URI, None)
    done = subprocess.run([*command, "--revision", "x"], capture_output=True, text=True, timeout=240)
    assert (done.returncode, "--revision is for hf://" in done.stderr) == (1, True)


@pytest.mark.parametrize("uri", ["s3://", "hf://x", "s3:///x"])
def test_a_uri_that_is_none(uri):
    with pytest.raises(ValueError, match="uri must be"):
        Bucket(uri)
