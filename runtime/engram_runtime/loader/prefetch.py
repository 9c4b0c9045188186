"""Reads a checkpoint into the page cache while torch is being imported, which takes seconds and needs no disk.

No torch here: the command line starts it before anything heavy is loaded. It is a hint and nothing else: what cannot
be read is left to the loader to complain about.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

CHUNK = 16 << 20
ROOM = 1.5
"""Free memory must be this many times the files' size: pages that push out others help nobody."""


def prefetch(directory: Path | str, available: int | None = None) -> threading.Thread | None:
    """Start reading all weights of a folder; the thread that does, None where it would not help.

    available: bytes of memory that can be used, default as the kernel says.
    """
    files = sorted(Path(directory).glob("*.safetensors"))
    try:
        size = sum(file.stat().st_size for file in files)
    except OSError:
        return None
    room = _available() if available is None else available
    if not size or size * ROOM > room:
        return None
    thread = threading.Thread(target=_read, args=(files,), name="engram-prefetch", daemon=True)
    thread.start()
    return thread


def _read(files: list[Path]) -> None:
    scratch = bytearray(CHUNK)
    for file in files:
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            offset = 0
            while count := os.preadv(descriptor, [scratch], offset):
                offset += count
        except OSError:
            return
        finally:
            os.close(descriptor)


def _available() -> int:
    """Memory that the kernel can give without swapping; 0 where it does not say."""
    try:
        for line in Path("/proc/meminfo").read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0
