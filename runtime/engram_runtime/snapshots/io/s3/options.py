"""How to reach a bucket: a URI and flags, checked at start so that a typing error is not a retry at night.

Importing this module imports no SDK: command lines and configurations can hold options without paying for boto3.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

SCHEME = "s3://"
LONGEST_KEY = 192  # of what the snapshot code makes below the prefix
MAX_KEY_BYTES = 1024
MIN_PART_BYTES = 5 << 20  # S3 refuses smaller parts, except the last
MAX_PART_BYTES = 5 << 30
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_REGION = re.compile(r"[A-Za-z0-9-]{1,64}")
# C0 and C1 controls cannot be in the XML of a listing; nor can the two non-characters.
_UNLISTABLE = re.compile("[\x00-\x1f\x7f-\x9f\ufffe\uffff\ud800-\udfff]")
ENCRYPTIONS = ("AES256", "aws:kms")


@dataclass(frozen=True, slots=True)
class S3Options:
    """Validated (ValueError names the field first). Sizes in bytes, times in seconds.

    `prefix` is literal (no percent decoding) and empty or ends with a slash. `credentials_dir` holds the files
    access-key-id, secret-access-key and, for temporary credentials, session-token; without it the SDK's own chain is
    asked (environment, workload identity). `deadline_seconds` bounds one request with all its retries; a large object
    is many requests.
    """

    bucket: str
    prefix: str = ""
    endpoint_url: str | None = None  # None: Amazon's endpoint of the region
    region: str = "us-east-1"
    force_path_style: bool = False
    ca_bundle: Path | None = None
    sse: str | None = None  # None: what the bucket does by default
    kms_key_id: str | None = None
    credentials_dir: Path | None = None
    connect_timeout_seconds: float = 3.0
    read_timeout_seconds: float = 5.0  # without a byte, or to send a block
    deadline_seconds: float = 20.0
    read_parallel: int = 16
    write_parallel: int = 4
    range_bytes: int = 8 << 20
    part_bytes: int = 8 << 20
    multipart_from_bytes: int = 16 << 20
    copy_limit_bytes: int = 512 << 20  # larger objects are copied in parts: servers take at most 5 GiB, and their time
    copy_part_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        if _BUCKET.fullmatch(self.bucket) is None or ".." in self.bucket:
            raise ValueError(
                f"bucket must be 3 to 63 lower-case letters, digits, dots and hyphens, got {self.bucket[:80]!r}"
            )
        _check_prefix(self.prefix)
        if self.endpoint_url is not None:
            _check_endpoint(self.endpoint_url)
        if _REGION.fullmatch(self.region) is None:
            raise ValueError(f"region must be letters, digits and hyphens, got {self.region[:80]!r}")
        if self.ca_bundle is not None and not self.ca_bundle.is_file():
            raise ValueError(f"ca_bundle must be a file of certificates, got {str(self.ca_bundle)!r}")
        if self.credentials_dir is not None and not self.credentials_dir.is_dir():
            raise ValueError(f"credentials_dir must be a folder, got {str(self.credentials_dir)!r}")
        if self.sse is not None and self.sse not in ENCRYPTIONS:
            raise ValueError(f"sse must be one of {', '.join(ENCRYPTIONS)}, got {self.sse!r}")
        if self.kms_key_id is not None and (self.sse != "aws:kms" or not self.kms_key_id):
            raise ValueError("kms_key_id must not be empty and needs sse aws:kms")
        for name in ("connect_timeout_seconds", "read_timeout_seconds", "deadline_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")
        for name in ("read_parallel", "write_parallel", "range_bytes", "copy_limit_bytes", "copy_part_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if not MIN_PART_BYTES <= self.part_bytes <= MAX_PART_BYTES:
            raise ValueError(f"part_bytes must be {MIN_PART_BYTES} to {MAX_PART_BYTES}, got {self.part_bytes}")
        if not self.part_bytes <= self.multipart_from_bytes <= MAX_PART_BYTES:
            raise ValueError(
                f"multipart_from_bytes must be part_bytes to {MAX_PART_BYTES}, got {self.multipart_from_bytes}"
            )

    @classmethod
    def parse(
        cls,
        uri: str,
        *,
        endpoint_url: str | None = None,
        region: str | None = None,
        force_path_style: bool = False,
        ca_bundle: Path | None = None,
        sse: str | None = None,
        kms_key_id: str | None = None,
        credentials_dir: Path | None = None,
    ) -> S3Options:
        """From `s3://BUCKET[/PREFIX]` and flags. ValueError names the field."""
        if not uri.startswith(SCHEME):
            raise ValueError(f"store_uri must be s3://BUCKET[/PREFIX], got {uri[:200]!r}")
        bucket, _, rest = uri[len(SCHEME) :].partition("/")
        prefix = rest.strip("/")
        return cls(
            bucket,
            f"{prefix}/" if prefix else "",
            endpoint_url=endpoint_url.rstrip("/") if endpoint_url else None,
            region=region or "us-east-1",
            force_path_style=force_path_style,
            ca_bundle=ca_bundle,
            sse=sse,
            kms_key_id=kms_key_id,
            credentials_dir=credentials_dir,
        )

    @property
    def uri(self) -> str:
        return f"{SCHEME}{self.bucket}/{self.prefix}"

    @property
    def amazon(self) -> bool:
        """Amazon's own service, where the SDK's newest checksums are understood."""
        if self.endpoint_url is None:
            return True
        host = urlsplit(self.endpoint_url).hostname or ""
        return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))

    @property
    def encryption(self) -> dict[str, str]:
        """Arguments of every request that makes an object."""
        if self.sse is None:
            return {}
        found = {"ServerSideEncryption": self.sse}
        if self.kms_key_id is not None:
            found["SSEKMSKeyId"] = self.kms_key_id
        return found


def _check_prefix(prefix: str) -> None:
    if prefix and (prefix.startswith("/") or not prefix.endswith("/")):
        raise ValueError(f"prefix must be empty, or end and not start with a slash, got {prefix[:80]!r}")
    if _UNLISTABLE.search(prefix):
        raise ValueError(f"prefix must not hold control characters, got {prefix[:80]!r}")
    if {".", "..", ""} & set(prefix.split("/")[:-1]):
        # Legal in S3, but proxies and clients on the way normalise paths.
        raise ValueError(f"prefix must not hold empty, '.' or '..' steps, got {prefix[:80]!r}")
    if len(prefix.encode()) > MAX_KEY_BYTES - LONGEST_KEY:
        raise ValueError(f"prefix must be at most {MAX_KEY_BYTES - LONGEST_KEY} bytes, got {len(prefix.encode())}")


def _check_endpoint(url: str) -> None:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        parts = None
    if (
        parts is None
        or parts.scheme not in ("http", "https")
        or not parts.hostname
        or parts.path.strip("/")
        or parts.query
        or parts.fragment
        or parts.username is not None
    ):
        shown = url[:200] if "@" not in url else "a URL with a user in it"
        raise ValueError(f"endpoint_url must be http(s)://HOST[:PORT], got {shown!r}")
