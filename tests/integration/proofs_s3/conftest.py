"""What the proofs ask for, with a bucket where they mean the store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.proofs.conftest import Stored, checkpoint, kind, own_folders
from tests.support.bucket_site import Bucket, BucketSite
from tests.support.proofs import Site
from tests.support.s3_process import S3Server

__all__ = ["checkpoint", "kind", "own_folders"]


@pytest.fixture
def bucket(moto: S3Server, tmp_path: Path) -> Bucket:
    """A new one, shared with others below a prefix."""
    return Bucket(moto, moto.options(tmp_path / "credentials", moto.bucket(), "team/"))


@pytest.fixture
def store(bucket: Bucket) -> dict[str, Any]:
    return bucket.fields


@pytest.fixture
def tier() -> str:
    """Of whatever asks for one."""
    return "store"


@pytest.fixture
def stored(bucket: Bucket, tmp_path: Path) -> Stored:
    @contextmanager
    def files() -> Iterator[list[Path]]:
        copies = bucket.fetch(tmp_path / "copies")
        yield sorted(copies)
        bucket.put_back(tmp_path / "copies", copies)

    return files


@pytest.fixture
def make_site(checkpoint: Callable[..., Path], tmp_path: Path, bucket: Bucket) -> Iterator[Callable[..., Site]]:
    """As the proofs' own; the tier is always the store."""
    with ExitStack() as stack:

        def make(kind: str, tier: str, snapshots: dict[str, Any] | None = None, **config: Any) -> Site:
            assert tier == "store"
            site = BucketSite(checkpoint(kind), tier, tmp_path, config=config, snapshots=snapshots or {}, bucket=bucket)
            return stack.enter_context(site)

        yield make
