"""A folder that holds a whole checkpoint, or none: one writer at a time, resumable, with a mark at the end.

DIR/.complete says what lies there and was checked; without it nothing in DIR is to be trusted. DIR/.fetch holds the
lock, the plan (so that a second try goes on with the commit of the first, wherever a branch has moved) and the parts.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from engram_runtime.fetching import choice
from engram_runtime.fetching.errors import FetchError
from engram_runtime.fetching.local import missing_files
from engram_runtime.fetching.remote import Listing, RemoteFile, Source, safe_path
from engram_runtime.fetching.report import Report, size_text
from engram_runtime.fetching.transfer import TransferOptions, done_bytes, prepare, sync_folder, transfer

COMPLETE = ".complete"
SCRATCH = ".fetch"
PLAN = "plan.json"
LOCK = "lock"
RESERVE = 16 << 20  # journals, and what a filesystem needs for itself
LOCK_SECONDS = 0.5
REMIND_SECONDS = 30.0


def is_complete(folder: Path, uri: str, requested: str | None) -> bool:
    """All of `uri` was brought here and nothing has been taken away since. Needs no network."""
    return completed(folder, uri, requested) is not None


def completed(folder: Path, uri: str, requested: str | None) -> str | None:
    """One line about what is_complete found, or None. The operator reads the revision in it."""
    mark = _read(folder / COMPLETE)
    files = mark.get("files")
    if (
        (mark.get("uri"), mark.get("requested_revision")) != (uri, requested)
        or not isinstance(files, list)
        or not files
    ):
        return None
    if not all(isinstance(entry, dict) and _has(folder, entry.get("path"), entry.get("size")) for entry in files):
        return None
    total = sum(entry["size"] for entry in files)
    return f"{folder}: complete at revision {mark.get('revision')}, {len(files)} files, {size_text(total)}"


def fetch(source: Source, folder: Path, report: Report, options: TransferOptions | None = None) -> None:
    """Make `folder` hold the checkpoint of `source`. FetchError; the next call goes on from there."""
    scratch = folder / SCRATCH
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        with _locked(scratch / LOCK, report):
            line = completed(folder, source.uri, source.requested)
            if line is not None:
                report.say(f"{line}, from before")
                return
            _Fetch(source, folder, scratch, report, options or TransferOptions()).run()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FetchError("NoSpace", f"no space is left where {folder} lies: give the volume more room") from error
        raise FetchError("WriteFailed", f"{folder} cannot be written: {error.strerror or error}") from error


class _Fetch:
    def __init__(self, source: Source, folder: Path, scratch: Path, report: Report, options: TransferOptions) -> None:
        self._source = source
        self._folder = folder
        self._scratch = scratch
        self._report = report
        self._options = options

    def run(self) -> None:
        started = time.monotonic()
        former = _read(self._scratch / PLAN)
        listing = self._resolve(former)
        beside = choice.beside(listing.files)
        self._plan(former, listing, [*beside, *self._candidates(listing)])
        (self._folder / COMPLETE).unlink(missing_ok=True)
        self._report.say(f"{self._source.uri} is revision {listing.revision}")
        self._bring(listing, beside)
        index = self._folder / choice.INDEX
        named = any(file.path == choice.INDEX for file in beside)
        shards = choice.weights(listing.files, index.read_bytes() if named else None, self._source.uri)
        self._bring(listing, shards)
        problems = missing_files(self._folder)
        if problems:
            raise FetchError("Incomplete", f"{self._source.uri} is not a complete checkpoint: {'; '.join(problems)}")
        files = [*beside, *shards]
        self._mark(listing, files)
        seconds = max(time.monotonic() - started, 1e-3)
        moved = self._report.moved_bytes
        line = completed(self._folder, self._source.uri, self._source.requested)
        self._report.say(f"{line}, the weights at {size_text(moved / seconds)}/s")

    def _resolve(self, former: Mapping[str, Any]) -> Listing:
        """Once; the commit of an earlier try while the source still has it."""
        if (former.get("uri"), former.get("requested_revision")) == (self._source.uri, self._source.requested):
            with suppress(FetchError):
                return self._patiently(str(former.get("revision") or "") or None)
        return self._patiently(None)

    def _patiently(self, revision: str | None) -> Listing:
        for failures in range(1, self._options.attempts + 1):
            try:
                return self._source.resolve(revision)
            except FetchError as error:
                if not error.passing or failures == self._options.attempts:
                    raise
                ceiling = min(self._options.longest_pause, self._options.first_pause * 2**failures)
                time.sleep(max(error.retry_after, ceiling * (0.5 + 0.5 * (os.getpid() % 100) / 100)))
        raise AssertionError("the last attempt returns or raises")

    @staticmethod
    def _candidates(listing: Listing) -> list[RemoteFile]:
        return [file for file in listing.files if file.path.endswith(".safetensors") and safe_path(file.path)]

    def _plan(self, former: Mapping[str, Any], listing: Listing, files: Sequence[RemoteFile]) -> None:
        """What is here stays only if it is what the listing says; what nobody vouches for goes."""
        known = former.get("files")
        known = known if isinstance(known, dict) else {}
        mark = _read(self._folder / COMPLETE)
        for entry in mark.get("files", []) if isinstance(mark.get("files"), list) else []:
            if isinstance(entry, dict):
                known.setdefault(str(entry.get("path")), entry.get("identity"))
        wanted = {file.path: file.identity for file in files}
        for path in {*known, *wanted}:
            if safe_path(path) and known.get(path) != wanted.get(path):
                (self._folder / path).unlink(missing_ok=True)
        plan = {
            "uri": self._source.uri,
            "requested_revision": self._source.requested,
            "revision": listing.revision,
            "files": wanted,
        }
        _write(self._scratch / PLAN, plan)

    def _bring(self, listing: Listing, files: Sequence[RemoteFile]) -> None:
        absent = [file for file in files if not _has(self._folder, file.path, file.size)]
        jobs = prepare(self._folder, self._scratch, absent, self._options)
        total, done = sum(file.size for file in absent), done_bytes(jobs)
        self._make_room(total - done)
        self._report.begin(total, done)
        if done:
            self._report.say(f"{size_text(done)} of {size_text(total)} are here from an earlier try")
        transfer(self._source, listing, jobs, self._options, self._report)

    def _make_room(self, needed: int) -> None:
        free = shutil.disk_usage(self._folder).free
        if needed and needed + RESERVE > free:
            raise FetchError(
                "NoSpace",
                f"{self._source.uri} needs {size_text(needed)} more, {size_text(free)} are free where {self._folder} "
                "lies: give the volume more room",
            )

    def _mark(self, listing: Listing, files: Sequence[RemoteFile]) -> None:
        entries = [
            {
                "path": file.path,
                "size": file.size,
                "digest": None if file.digest is None else f"{file.digest.kind}:{file.digest.value}",
                "identity": file.identity,
            }
            for file in files
        ]
        _write(
            self._folder / COMPLETE,
            {
                "uri": self._source.uri,
                "requested_revision": self._source.requested,
                "revision": listing.revision,
                "files": entries,
            },
        )
        for leftover in self._scratch.iterdir():
            if leftover.name != LOCK:
                leftover.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path, report: Report) -> Iterator[None]:
    """Replicas that share a volume take turns: the first one downloads, the others find it done."""
    with path.open("a") as file:
        reminded = -REMIND_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() - reminded > REMIND_SECONDS:
                    reminded = time.monotonic()
                    report.say(f"{path.parent.parent}: another process is at it, waiting")
                time.sleep(LOCK_SECONDS)
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
                report.say(f"{path.parent.parent}: this volume has no locks; replicas may download at the same time")
                break
        yield


def _has(folder: Path, path: object, size: object) -> bool:
    if not isinstance(path, str) or not safe_path(path):
        return False
    try:
        status = (folder / path).stat()
    except OSError:
        return False
    return (folder / path).is_file() and status.st_size == size


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _write(path: Path, document: Mapping[str, Any]) -> None:
    """All of it or nothing, also after a loss of power."""
    scratch = path.with_name(f"{path.name}.new")
    with scratch.open("w", encoding="utf-8") as file:
        json.dump(document, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)
    sync_folder(path.parent)
