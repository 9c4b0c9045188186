"""hf://: a model repository on Hugging Face, or on a mirror of it.

Not by way of huggingface_hub: it reads its endpoint and its offline switch from the environment when it is imported
(pods are offline on purpose), checks sizes but no digests, and does not fsync. Two of its HTTP calls are all that is
needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from engram_runtime.fetching.errors import FetchError
from engram_runtime.fetching.remote import CHUNK, Digest, Listing, RemoteFile, check_size

SCHEME = "hf://"
PUBLIC = "https://huggingface.co"
MAX_LISTING = 64 << 20
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(?:/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PASSING = (408, 409, 425, 429)


class Hub:
    """Implements Source. ValueError for a URI or an endpoint that is none."""

    def __init__(
        self, uri: str, *, revision: str | None = None, endpoint: str | None = None, token: str | None = None
    ) -> None:
        self._uri = uri
        self._repository = uri.removeprefix(SCHEME).strip("/")
        if not uri.startswith(SCHEME) or _REPOSITORY.fullmatch(self._repository) is None:
            raise ValueError(f"uri must be hf://ORG/REPOSITORY, got {uri[:200]!r}")
        self._requested = revision or None
        self._endpoint = (endpoint or PUBLIC).rstrip("/")
        parts = urlsplit(self._endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise ValueError("HF_ENDPOINT must be http(s)://HOST[:PORT][/PATH] without a user")
        self._token = token or None
        headers = {"user-agent": "engram", "accept-encoding": "identity"}
        if self._token is not None:  # httpx leaves it out where a redirect goes to another host
            headers["authorization"] = f"Bearer {self._token}"
        self._client = httpx.Client(
            headers=headers,
            follow_redirects=True,
            timeout=httpx.Timeout(30.0, connect=10.0, pool=None),
            limits=httpx.Limits(max_connections=64),
        )

    @property
    def uri(self) -> str:
        return self._uri

    @property
    def requested(self) -> str | None:
        return self._requested

    def resolve(self, revision: str | None) -> Listing:
        wanted = revision or self._requested
        path = f"/api/models/{self._repository}" + (f"/revision/{quote(wanted, safe='')}" if wanted else "")
        with self._get(path + "?blobs=true", wanted) as response:
            data = b""
            for chunk in response.iter_bytes(CHUNK):
                data += chunk
                if len(data) > MAX_LISTING:
                    raise FetchError("BadListing", f"{self._uri}: the listing is larger than {MAX_LISTING} bytes")
        try:
            document = httpx.Response(200, content=data).json()
            commit = document["sha"]
            files = tuple(_file(entry) for entry in document["siblings"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FetchError("BadListing", f"{self._endpoint} does not answer like a model hub: {error!r}") from error
        if not isinstance(commit, str) or _COMMIT.fullmatch(commit) is None:
            raise FetchError("BadListing", f"{self._uri}: the hub names no commit")
        return Listing(commit, files)

    @contextmanager
    def read(self, listing: Listing, file: RemoteFile, start: int, length: int) -> Iterator[Iterator[bytes]]:
        path = f"/{self._repository}/resolve/{listing.revision}/{quote(file.path)}"
        last = start + length - 1
        with self._get(path, listing.revision, {"range": f"bytes={start}-{last}"}) as response:
            if response.status_code == 206:
                if not response.headers.get("content-range", "").startswith(f"bytes {start}-"):
                    raise FetchError("BadAnswer", f"{file.path}: another range came than was asked for", passing=True)
            elif start > 0 or length < file.size:
                raise FetchError("NoRanges", f"{self._endpoint} sends whole files only: a download cannot be resumed")
            yield response.iter_raw()  # as it comes: a broken connection must not take along what it brought

    def close(self) -> None:
        self._client.close()

    @contextmanager
    def _get(self, path: str, revision: str | None, headers: dict[str, str] | None = None) -> Iterator[httpx.Response]:
        try:
            with self._client.stream("GET", self._endpoint + path, headers=headers) as response:
                if response.status_code not in (200, 206):
                    raise self._failure(response, revision)
                yield response
        except httpx.InvalidURL as error:
            raise FetchError("BadAnswer", f"{self._endpoint} redirects to what is no address") from error
        except httpx.HTTPError as error:
            # Not the URL: a redirect's may be signed.
            reason = "Timeout" if isinstance(error, httpx.TimeoutException) else "Unreachable"
            said = str(error) or type(error).__name__
            raise FetchError(reason, f"{self._endpoint}: {said}", passing=True) from error

    def _failure(self, response: httpx.Response, revision: str | None) -> FetchError:
        status, code = response.status_code, response.headers.get("x-error-code", "")
        if status in _PASSING or status >= 500:
            wait = response.headers.get("retry-after", "")
            seconds = float(wait) if wait.isdigit() and len(wait) < 5 else 0.0
            return FetchError("HubError", f"{self._endpoint} answers {status}", passing=True, retry_after=seconds)
        if code == "GatedRepo" or status == 403:
            return FetchError(
                "AccessDenied",
                f"{self._uri} is gated or private ({status}): accept its terms on the hub, and give a token that may "
                f"read it{'' if self._token else ' (no token was sent)'}",
            )
        if code == "RevisionNotFound" or (status == 404 and code != "RepoNotFound" and revision):
            return FetchError("RevisionNotFound", f"{self._uri} has no revision or file {revision!r}")
        if status in (401, 404):
            hint = "the token is not one that it takes" if self._token else "if it is private, a token is needed"
            return FetchError("NotFound", f"{self._uri} does not exist on {self._endpoint} ({status}); {hint}")
        return FetchError("HubError", f"{self._endpoint} answers {status}")


def _file(entry: Any) -> RemoteFile:
    path = str(entry["rfilename"])
    lfs = entry.get("lfs")
    if isinstance(lfs, dict):
        sha256 = str(lfs.get("sha256") or lfs.get("oid") or "").removeprefix("sha256:")
        size = check_size(path, lfs.get("size", entry.get("size")))
        return RemoteFile(path, size, Digest("sha256", sha256) if _SHA256.fullmatch(sha256) else None)
    blob = str(entry.get("blobId") or "")
    digest = Digest("git", blob) if _COMMIT.fullmatch(blob) else None
    return RemoteFile(path, check_size(path, entry.get("size")), digest)
