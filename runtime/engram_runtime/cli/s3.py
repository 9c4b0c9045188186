"""The flags that say how a bucket is reached; `serve` and `snapshots` share them.

A flag that has no store to apply to would silently do nothing, so it is an error.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from engram_runtime.snapshots.io.s3.options import ENCRYPTIONS, SCHEME, S3Options

# Of S3Options.parse, and what it is here.
FLAGS = {
    "endpoint_url": "--s3-endpoint-url",
    "region": "--s3-region",
    "force_path_style": "--s3-path-style",
    "credentials_dir": "--s3-credentials-dir",
    "ca_bundle": "--s3-ca-file",
    "sse": "--s3-encryption",
    "kms_key_id": "--s3-kms-key-id",
}


def add_s3_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--s3-endpoint-url", metavar="URL", help="http(s)://HOST[:PORT] of an S3 server (default: Amazon's)"
    )
    group.add_argument("--s3-region", metavar="NAME", help="of the bucket (default: us-east-1)")
    group.add_argument(
        "--s3-path-style", action="store_true", help="the bucket in the path of a URL, not in its host name"
    )
    group.add_argument(
        "--s3-credentials-dir",
        type=Path,
        metavar="DIR",
        help="files access-key-id, secret-access-key and, if temporary, session-token; read again when they are "
        "refused (default: environment, profile or workload identity, as the AWS SDK finds them)",
    )
    group.add_argument(
        "--s3-ca-file", type=Path, metavar="FILE", help="certificates of the authority that the endpoint's is from"
    )
    group.add_argument(
        "--s3-encryption", choices=ENCRYPTIONS, help="asked for with every object (default: the bucket's own)"
    )
    group.add_argument("--s3-kms-key-id", metavar="ID", help="key of --s3-encryption aws:kms (default: the account's)")


def s3_options(options: argparse.Namespace, uri: str | None, store_flag: str) -> S3Options | None:
    """None when `uri`, the value of `store_flag`, is no bucket. ValueError names the flag first."""
    given = {field: getattr(options, flag.removeprefix("--").replace("-", "_")) for field, flag in FLAGS.items()}
    if uri is None or not uri.startswith(SCHEME):
        for field, value in given.items():
            if value:
                raise ValueError(f"{FLAGS[field]} needs {store_flag} {SCHEME}BUCKET[/PREFIX], got {uri or 'none'}")
        return None
    for field, value in given.items():
        if value == "":
            raise ValueError(f"{FLAGS[field]} must not be empty")
    if given["kms_key_id"] and given["sse"] != "aws:kms":
        raise ValueError(f"{FLAGS['kms_key_id']} needs {FLAGS['sse']} aws:kms")
    try:
        return S3Options.parse(uri, **given)
    except ValueError as error:
        field, _, problem = str(error).partition(" ")
        flag = FLAGS.get(field) or f"{store_flag}: {field}"
        raise ValueError(f"{flag} {problem}") from error
