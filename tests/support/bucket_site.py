"""The engine of the proofs with a bucket as its store."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engram_runtime.snapshots.io.s3.options import S3Options
from tests.support.proofs import Site
from tests.support.s3_process import S3Server


@dataclass(frozen=True)
class Bucket:
    server: S3Server
    options: S3Options

    @property
    def fields(self) -> dict[str, Any]:
        """Of SnapshotConfig."""
        return {"store_uri": self.options.uri, "s3": self.options}


@dataclass
class BucketSite(Site):
    """Its stored files are copies: whatever is written into them is put into the bucket before anything is read."""

    bucket: Bucket = field(kw_only=True)

    def __post_init__(self) -> None:
        self._client = self.bucket.server.client()
        self._copies: dict[Path, bytes] = {}
        super().__post_init__()

    def durable(self) -> dict[str, Any]:
        return self.bucket.fields

    def start(self) -> None:
        self._put_back()
        super().start()

    def ask_all(self, requests: Any) -> Any:
        self._put_back()
        return super().ask_all(requests)

    def stored_files(self) -> list[Path]:
        self._put_back()
        options = self.bucket.options
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=options.bucket, Prefix=f"{options.prefix}v1/"
        )
        for page in pages:
            for item in page.get("Contents", []):
                path = self.folder / self.tier / item["Key"].removeprefix(options.prefix)
                path.parent.mkdir(parents=True, exist_ok=True)
                found = self._client.get_object(Bucket=options.bucket, Key=item["Key"])["Body"].read()
                path.write_bytes(found)
                self._copies[path] = found
        return super().stored_files()

    def _put_back(self) -> None:
        options = self.bucket.options
        for path, before in list(self._copies.items()):
            after = path.read_bytes()
            if after != before:
                key = f"{options.prefix}{path.relative_to(self.folder / self.tier)}"
                self._client.put_object(Bucket=options.bucket, Key=key, Body=after)
                self._copies[path] = after
