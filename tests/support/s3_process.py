"""An S3 server that a test started: where it is and how to sign in, whichever server it is."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config

from engram_runtime.snapshots.clock import Clock
from engram_runtime.snapshots.io.s3.options import S3Options
from engram_runtime.snapshots.io.s3.store import S3Store
from engram_runtime.snapshots.policy.keys import is_ref
from tests.support import patience


@dataclass(frozen=True)
class S3Server:
    url: str
    access_key: str
    secret_key: str
    name: str
    _made: list[Any] = field(default_factory=list, init=False, compare=False, repr=False)

    def client(self) -> Any:
        """A plain boto3 client, for looking behind the store's back: always the same, because making one takes long."""
        if not self._made:
            self._made.append(self._make_client())
        return self._made[0]

    def _make_client(self) -> Any:
        return boto3.session.Session().client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                max_pool_connections=32,
            ),
        )

    def bucket(self, *, versioned: bool = False) -> str:
        """A new one."""
        name = f"engram-{secrets.token_hex(6)}"
        client = self.client()
        client.create_bucket(Bucket=name)
        if versioned:
            client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
        return name

    def credentials(self, folder: Path) -> Path:
        """As an operator mounts them."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "access-key-id").write_text(self.access_key + "\n")
        (folder / "secret-access-key").write_text(self.secret_key + "\n")
        return folder

    def options(self, folder: Path, bucket: str, prefix: str = "", **changes: Any) -> S3Options:
        base = S3Options(
            bucket,
            prefix,
            endpoint_url=self.url,
            force_path_style=True,
            credentials_dir=self.credentials(folder),
            **patience.S3,
        )
        return replace(base, **changes)


def open_store(options: S3Options, clock: Clock | None = None) -> S3Store:
    return S3Store(options, is_ref, clock)
