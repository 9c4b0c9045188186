"""The flags of a bucket: they arrive as options of the store, and none of them is silently without effect."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from engram_runtime.cli.main import main
from engram_runtime.cli.s3 import FLAGS, add_s3_flags, s3_options
from engram_runtime.snapshots.io.s3.options import S3Options


def parsed(*args: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_s3_flags(parser.add_argument_group("s3"))
    return parser.parse_args(args)


def test_every_flag_arrives(tmp_path: Path) -> None:
    authority = tmp_path / "ca.crt"
    authority.write_text("x")
    options = parsed(
        *("--s3-endpoint-url", "https://s3.example.com:9000/", "--s3-region", "eu-central-1", "--s3-path-style"),
        *("--s3-credentials-dir", str(tmp_path), "--s3-ca-file", str(authority)),
        *("--s3-encryption", "aws:kms", "--s3-kms-key-id", "key-1"),
    )
    assert s3_options(options, "s3://bucket/a/b", "--store") == S3Options(
        "bucket",
        "a/b/",
        endpoint_url="https://s3.example.com:9000",
        region="eu-central-1",
        force_path_style=True,
        credentials_dir=tmp_path,
        ca_bundle=authority,
        sse="aws:kms",
        kms_key_id="key-1",
    )


def test_a_bucket_needs_no_flag() -> None:
    assert s3_options(parsed(), "s3://bucket", "--store") == S3Options("bucket")
    assert s3_options(parsed(), "file:///folder", "--store") is None
    assert s3_options(parsed(), None, "--store") is None


VALUES = {"--s3-path-style": (), "--s3-encryption": ("AES256",)}


@pytest.mark.parametrize("flag", FLAGS.values())
@pytest.mark.parametrize(
    ("command", "store"),
    [
        (["serve", "--model", "."], "--snapshot-store"),
        (["serve", "--model", ".", "--snapshot-store", "file:///tmp"], "--snapshot-store"),
        (["serve", "--model", ".", "--snapshots-disabled"], "--snapshot-store"),
        (["snapshots", "ls"], "--store"),
        (["snapshots", "fsck", "--store", "file:///tmp"], "--store"),
    ],
)
def test_a_flag_without_a_bucket_is_an_error(
    command: list[str], store: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, flag, *VALUES.get(flag, ("x",))]) == 1
    assert capsys.readouterr().err.startswith(f"engram: {flag} needs {store} s3://BUCKET[/PREFIX], got ")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--s3-endpoint-url", "s3.example.com"], "--s3-endpoint-url must be http(s)://"),
        (["--s3-endpoint-url", ""], "--s3-endpoint-url must not be empty"),
        (["--s3-region", "eu central"], "--s3-region must be"),
        (["--s3-credentials-dir", "/no/such"], "--s3-credentials-dir must be a folder"),
        (["--s3-ca-file", "/no/such"], "--s3-ca-file must be a file"),
        (["--s3-kms-key-id", "k"], "--s3-kms-key-id needs --s3-encryption aws:kms"),
        (["--s3-kms-key-id", "k", "--s3-encryption", "AES256"], "--s3-kms-key-id needs --s3-encryption aws:kms"),
    ],
)
def test_errors_name_the_flag(args: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        s3_options(parsed(*args), "s3://bucket", "--store")
    assert str(caught.value).startswith("--s3-")


@pytest.mark.parametrize("uri", ["s3://b", "s3://BUCKET", "s3://bucket/a//b", "s3://bucket/../x"])
def test_errors_of_the_uri_name_its_flag(uri: str) -> None:
    with pytest.raises(ValueError, match=r"^--snapshot-store: (bucket|prefix) must"):
        s3_options(parsed(), uri, "--snapshot-store")


def test_an_unknown_encryption_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--s3-encryption", "rot13")
    assert "--s3-encryption" in capsys.readouterr().err
