"""Compiles candidates in other processes, into Triton's cache, before they are searched one by one.

Compiling is most of a search, and it uses one core. Each process takes a share of a subject's candidates and runs each
of them once; the same candidate at several sizes goes to the same process. Nothing is compared or timed there, and what
fails there fails again, and is counted, in the search.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType

import torch

from engram_kernels.autotune.driver import Card, Subject


def share(subject: Subject, sizes: Sequence[int], card: Card, device: str, part: int, parts: int, until: float) -> int:
    """Run each of this part's candidates once, until `until` (seconds of time.time()); how many worked."""
    worked = 0
    with torch.inference_mode():
        operands = subject.operands(torch.device(device), False)
        for size in sizes:
            problem = subject.problem(size, operands, card)
            for candidate in problem.candidates:
                if zlib.crc32(repr(candidate).encode()) % parts != part:
                    continue
                if time.time() > until:
                    return worked
                with contextlib.suppress(Exception):
                    problem.cases[0].run(candidate, 0)
                    worked += 1
            del problem  # before the next one is made
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    return worked


class Workers:
    """An `Ahead` by so many processes, which live as long as this context."""

    def __init__(
        self, count: int, device: torch.device, say: Callable[[str], None], pool: Executor | None = None
    ) -> None:
        self._count, self._device, self._say = count, str(device), say
        self._pool: Executor | None = pool or ProcessPoolExecutor(count, multiprocessing.get_context("spawn"))

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def __call__(self, subject: Subject, sizes: Sequence[int], card: Card, seconds: float) -> None:
        if self._pool is None:
            return
        began = time.monotonic()
        until = time.time() + seconds
        jobs = [
            self._pool.submit(share, subject, sizes, card, self._device, part, self._count, until)
            for part in range(self._count)
        ]
        worked = 0
        for job in jobs:
            try:
                worked += job.result()
            except BrokenProcessPool as failure:
                self._say(f"compiling ahead is given up: {failure}")
                self._pool = None
                return
            except Exception as failure:
                self._say(f"compiling ahead, a share is left to the search: {type(failure).__name__}: {failure}")
        self._say(f"{subject.op}: {worked} candidates compiled ahead in {time.monotonic() - began:.0f} s")
