"""Files by parallel ranges into `.partial` files; a part that is on the volume is never asked for again.

Beside each partial file lies a journal: what the file is, and which parts are whole. The digest of the whole file is
checked before it gets its name, so a journal that lies (a node that lost power) costs a second download and no more.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from engram_runtime.fetching.errors import FetchError
from engram_runtime.fetching.remote import Listing, RemoteFile, Source
from engram_runtime.fetching.report import Report

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """Sizes in bytes, times in seconds. `attempts` in a row that bring no byte end a download."""

    workers: int = 8
    part_bytes: int = 16 << 20
    attempts: int = 8
    first_pause: float = 0.5
    longest_pause: float = 30.0


@dataclass(slots=True)
class _Job:
    """One file on its way. `left` counts parts; guarded by `lock`."""

    file: RemoteFile
    partial: Path
    journal: Path
    target: Path
    part_bytes: int
    whole: set[int] = field(default_factory=set)
    left: int = 0
    tries: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def parts(self) -> list[int]:
        return [number for number in range(-(-self.file.size // self.part_bytes)) if number not in self.whole]

    def length(self, number: int) -> int:
        return min(self.part_bytes, self.file.size - number * self.part_bytes)

    @property
    def done_bytes(self) -> int:
        return sum(self.length(number) for number in self.whole)


def prepare(folder: Path, scratch: Path, files: Sequence[RemoteFile], options: TransferOptions) -> list[_Job]:
    """Jobs for `files`, each with what an earlier try left in `scratch`."""
    jobs = []
    for file in files:
        name = file.path.replace("/", "__")
        job = _Job(
            file, scratch / f"{name}.partial", scratch / f"{name}.journal", folder / file.path, options.part_bytes
        )
        _recall(job)
        jobs.append(job)
    return jobs


def done_bytes(jobs: Sequence[_Job]) -> int:
    return sum(job.done_bytes for job in jobs)


def transfer(source: Source, listing: Listing, jobs: Sequence[_Job], options: TransferOptions, report: Report) -> None:
    """Bring the files to their places. FetchError; what is whole by then stays for the next try."""
    _Transfer(source, listing, options, report).run(jobs)


class _Transfer:
    def __init__(self, source: Source, listing: Listing, options: TransferOptions, report: Report) -> None:
        self._source = source
        self._listing = listing
        self._options = options
        self._report = report
        self._stop = threading.Event()

    def run(self, jobs: Sequence[_Job]) -> None:
        with ThreadPoolExecutor(self._options.workers, thread_name_prefix="engram-fetch") as pool:
            pending: set[Future[_Job | None]] = set()
            for job in jobs:
                pending |= self._submit(pool, job)
            try:
                while pending:
                    done, pending = wait(pending, return_when=FIRST_EXCEPTION, timeout=0.2)
                    for future in done:
                        again = future.result()
                        if again is not None:
                            pending |= self._submit(pool, again)
            except BaseException:
                self._stop.set()
                for future in pending:
                    future.cancel()
                raise

    def _submit(self, pool: ThreadPoolExecutor, job: _Job) -> set[Future[_Job | None]]:
        try:
            job.target.parent.mkdir(parents=True, exist_ok=True)
            if not job.whole:
                _begin(job)
        except OSError as error:
            raise _of_disk(error, job.partial) from error
        numbers = job.parts()
        job.left = len(numbers)
        if not numbers:
            return {pool.submit(self._finish, job)}
        return {pool.submit(self._part, job, number) for number in numbers}

    def _part(self, job: _Job, number: int) -> _Job | None:
        """One part; whoever brings the last one checks the file. The job, when all of it must come again."""
        try:
            self._bring(job, number)
            with job.lock:
                job.whole.add(number)
                with job.journal.open("a", encoding="ascii") as journal:
                    journal.write(f"{number}\n")
                job.left -= 1
                last = job.left == 0
        except OSError as error:
            raise _of_disk(error, job.partial) from error
        return self._finish(job) if last else None

    def _bring(self, job: _Job, number: int) -> None:
        """Goes on where a connection broke; only attempts that bring nothing are counted."""
        start, length = number * job.part_bytes, job.length(number)
        got, failures = 0, 0
        with job.partial.open("r+b", buffering=0) as target:
            while got < length:
                before = got
                trouble = FetchError("Truncated", f"{job.file.path}: the connection ended early", passing=True)
                try:
                    with self._source.read(self._listing, job.file, start + got, length - got) as chunks:
                        for chunk in chunks:
                            if self._stop.is_set():
                                raise FetchError("Stopped", "another part failed")
                            if got + len(chunk) > length:
                                raise FetchError("BadAnswer", f"{job.file.path}: more bytes came than were asked for")
                            _write_at(target.fileno(), chunk, start + got)
                            got += len(chunk)
                            self._report.moved(len(chunk))
                except FetchError as error:
                    if not error.passing:
                        raise
                    trouble = error
                if got >= length:
                    return
                failures = 0 if got > before else failures + 1
                if failures >= self._options.attempts:
                    raise FetchError(trouble.reason, f"{trouble} (tried {failures} times)")
                self._pause(failures, trouble)

    def _pause(self, failures: int, trouble: FetchError) -> None:
        ceiling = min(self._options.longest_pause, self._options.first_pause * 2**failures)
        pause = max(trouble.retry_after, random.uniform(0, ceiling))
        log.debug("%s; again in %.1f s", trouble, pause)
        if self._stop.wait(min(pause, 10 * self._options.longest_pause)):
            raise FetchError("Stopped", "another part failed")

    def _finish(self, job: _Job) -> _Job | None:
        digest = job.file.digest
        try:
            found = None if digest is None else digest.of(job.partial)
            if digest is not None and found != digest.value:
                job.tries += 1
                self._report.moved(-job.file.size)
                job.whole.clear()
                job.journal.unlink(missing_ok=True)
                job.partial.unlink(missing_ok=True)
                message = f"{job.file.path}: its {digest.kind} is {found}, expected {digest.value}"
                if job.tries > 1:
                    raise FetchError("ChecksumMismatch", f"{message}; downloaded twice")
                self._report.say(f"{message}: downloading it again")
                return job
            with job.partial.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(job.partial, job.target)
            sync_folder(job.target.parent)
            job.journal.unlink(missing_ok=True)
        except OSError as error:
            raise _of_disk(error, job.target) from error
        return None


def _write_at(descriptor: int, data: bytes, position: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, position)
        view, position = view[written:], position + written


def sync_folder(folder: Path) -> None:
    """Names that were given in it survive a loss of power. OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _begin(job: _Job) -> None:
    job.journal.unlink(missing_ok=True)
    with job.partial.open("wb") as file:
        file.truncate(job.file.size)
    head = {"identity": job.file.identity, "part_bytes": job.part_bytes}
    job.journal.write_text(json.dumps(head) + "\n", encoding="ascii")


def _recall(job: _Job) -> None:
    """Which parts an earlier try brought; a line that a kill cut off does not count."""
    try:
        head, *lines = job.journal.read_text(encoding="ascii").split("\n")[:-1]
        document = json.loads(head)
        if document["identity"] != job.file.identity or job.partial.stat().st_size != job.file.size:
            return
        part_bytes = int(document["part_bytes"])
        count = -(-job.file.size // part_bytes)
        job.whole = {int(line) for line in lines if line.isdigit() and int(line) < count}
        job.part_bytes = part_bytes
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
        job.whole = set()


def _of_disk(error: OSError, path: Path) -> FetchError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FetchError("NoSpace", f"no space is left where {path.parent} lies: give the volume more room")
    return FetchError("WriteFailed", f"{path} cannot be written: {error.strerror or error}")
