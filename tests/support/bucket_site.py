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

    def flags(self, store: str) -> list[str]:
        """Of `engram serve` or `engram snapshots`; `store`: what the command calls the URI."""
        options = self.options
        assert options.endpoint_url is not None
        assert options.credentials_dir is not None
        reach = ["--s3-endpoint-url", options.endpoint_url, "--s3-credentials-dir", str(options.credentials_dir)]
        return [store, options.uri, *reach, "--s3-path-style", "--s3-region", "us-east-1"]

    def keys(self) -> list[str]:
        pages = self.server.client().get_paginator("list_objects_v2")
        found = pages.paginate(Bucket=self.options.bucket, Prefix=f"{self.options.prefix}v1/")
        return [item["Key"] for page in found for item in page.get("Contents", [])]

    def fetch(self, folder: Path) -> dict[Path, bytes]:
        """All objects as files below the folder, named as they are below the prefix."""
        copies = {}
        for key in self.keys():
            path = folder / key.removeprefix(self.options.prefix)
            path.parent.mkdir(parents=True, exist_ok=True)
            copies[path] = self.server.client().get_object(Bucket=self.options.bucket, Key=key)["Body"].read()
            path.write_bytes(copies[path])
        return copies

    def put_back(self, folder: Path, copies: dict[Path, bytes]) -> None:
        """Whatever of `copies` has changed in the folder since."""
        for path, before in copies.items():
            after = path.read_bytes()
            if after != before:
                key = f"{self.options.prefix}{path.relative_to(folder)}"
                self.server.client().put_object(Bucket=self.options.bucket, Key=key, Body=after)
                copies[path] = after


@dataclass
class BucketSite(Site):
    """Its stored files are copies: whatever is written into them is put into the bucket before anything is read."""

    bucket: Bucket = field(kw_only=True)

    def __post_init__(self) -> None:
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
        self._copies.update(self.bucket.fetch(self.folder / self.tier))
        return super().stored_files()

    def _put_back(self) -> None:
        self.bucket.put_back(self.folder / self.tier, self._copies)
