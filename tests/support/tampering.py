"""Hands of an attacker, or of a bad disk, on what the tiers hold: stored files, host memory, device memory.

`part` says which tensors: "kv" the keys and values, "state" the recurrent states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engram_runtime.errors import SnapshotError
from engram_runtime.snapshots.io import digest, files, format
from engram_runtime.snapshots.io.files import OpenSnapshot
from engram_runtime.snapshots.policy.identity import Keyring, Signer
from engram_runtime.snapshots.policy.keys import parse
from engram_runtime.snapshots.policy.manifest import Manifest
from tests.support.proofs import KEY, Site

Change = Callable[[Tensor], Tensor]
STATE_TENSORS = ("ssm", "conv")


def zeroed(value: Tensor) -> Tensor:
    return torch.zeros_like(value)


def noised(value: Tensor) -> Tensor:
    """Noise as large as the values themselves: finite, of the right scale, and wrong."""
    return value + value.std() * torch.randn(value.shape, generator=torch.Generator().manual_seed(7))


def wanted(name: str, part: str) -> bool:
    return name.startswith("kv.") if part == "kv" else name in STATE_TENSORS


def stored_files(site: Site) -> list[Path]:
    """Everything durable, KV files and snapshot files first to last by name."""
    return site.stored_files()


def stored_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Floating-point tensors of a file; nothing for a file of another kind. Writing to them changes the file."""
    data = np.memmap(path, dtype=np.uint8, mode="r+")
    try:
        header = format.parse(bytes(data[: 1 << 17]), len(data))
    except SnapshotError:
        return
    for entry in header.tensors.values():
        if entry.dtype == "F32":
            raw = torch.from_numpy(data[entry.offset : entry.offset + entry.nbytes])
            yield entry.name, raw.view(torch.float32).view(entry.shape)
    data.flush()


def tamper_files(paths: list[Path], part: str, change: Change) -> int:
    """Change tensors in place, whole files stay as they are otherwise; how many were changed."""
    count = 0
    for path in paths:
        for name, value in stored_tensors(path):
            if wanted(name, part):
                value.copy_(change(value.clone()))
                count += 1
    return count


def swap_files(paths: list[Path], foreign: list[Path], part: str) -> int:
    """Put another conversation's tensors of the same name and shape in; how many were replaced."""
    theirs = {}
    for path in foreign:
        theirs.update({(name, value.shape): value.clone() for name, value in stored_tensors(path)})
    count = 0
    for path in paths:
        for name, value in stored_tensors(path):
            if wanted(name, part):
                value.copy_(theirs[name, value.shape])
                count += 1
    return count


@torch.inference_mode()
def tamper_host(site: Site, part: str, change: Change) -> int:
    """The same in the host tier."""
    count = 0
    host = site.core.snapshots._shared.host  # type: ignore[union-attr]
    for value, _ in host._pools["kv" if part == "kv" else "state"].items.values():
        for tensor in value.values():
            tensor.copy_(change(tensor.clone()))
            count += 1
    return count


def host_values(site: Site, part: str) -> list[dict[str, Tensor]]:
    """Copies of what the host tier holds, in the order it came in."""
    host = site.core.snapshots._shared.host  # type: ignore[union-attr]
    pool = host._pools["kv" if part == "kv" else "state"]
    return [{name: tensor.clone() for name, tensor in value.items()} for value, _ in pool.items.values()]


def tamper_device(site: Site, part: str, change: Change | None) -> int:
    """The same in the device's blocks or state slots, all of them; `change` None: each gets its neighbour's."""
    transfer, geometry = site.core.executor.transfer, site.core.executor.geometry  # type: ignore[attr-defined]
    if part == "kv":
        blocks, tokens = range(geometry.num_blocks), geometry.num_blocks * geometry.block_size
        held = transfer.read_kv(blocks, 0, tokens)
        transfer.write_kv(blocks, 0, held.roll(geometry.block_size, dims=3) if change is None else change(held))
        return 1
    states = [transfer.read_state(slot) for slot in range(geometry.num_state_slots)]
    for slot, state in enumerate(states):
        if change is None:
            transfer.write_state(slot, states[slot - 1])
        else:
            transfer.write_state(slot, {name: change(value) for name, value in state.items()})
    return len(states)


def open_file(path: Path, signer: Signer) -> tuple[OpenSnapshot, bytes]:
    data = path.read_bytes()
    return files.open_snapshot(str(path), data, len(data), signer, verify=True), data


def signer_of(site: Site, path: Path, secret: bytes) -> Signer:
    parsed = parse(str(path.relative_to(site.folder / site.tier)))
    assert parsed is not None
    return Keyring(secret).signer(parsed.space.namespace)


def forge(site: Site, change: Change, secret: bytes, *, signed: bytes = KEY) -> int:
    """A perfect forgery but for the key: tensors changed, every checksum and reference right, signed with `secret`.

    signed: what the files are signed with so far. How many manifests were rewritten.
    """
    by_name = {path.name: path for path in stored_files(site)}
    changed = list(by_name.values())
    for part in ("kv", "state"):
        tamper_files(changed, part, change)
    count = 0
    for path in changed:
        if "/snap/" not in str(path):
            continue
        opened, data = open_file(path, signer_of(site, path, signed))
        manifest = _redigested(opened.manifest, opened, data, by_name)
        parts = tuple(
            format.TensorPart(e.name, e.dtype, e.shape, memoryview(data)[e.offset : e.offset + e.nbytes])
            for e in opened.header.tensors.values()
            if not e.name.startswith("pad.")
        )
        content = files.SnapshotParts(parts, manifest.tensors)
        image = files.build_snapshot_file(manifest, content, signer_of(site, path, secret))
        path.write_bytes(b"".join(image.parts))
        count += 1
    return count


def _redigested(manifest: Manifest, opened: OpenSnapshot, data: bytes, by_name: dict[str, Path]) -> Manifest:
    pieces = []
    for ref in manifest.pieces:
        whole = by_name[ref.file].read_bytes()
        piece = memoryview(whole)[ref.offset : ref.offset + ref.nbytes]
        pieces.append(replace(ref, digest=digest.digest(piece)))
    tensors = []
    for tensor in manifest.tensors:
        entry = opened.header.tensors[tensor.name]
        found = memoryview(data)[entry.offset : entry.offset + entry.nbytes]
        tensors.append(replace(tensor, digest=digest.digest(found)))
    return replace(manifest, pieces=tuple(pieces), tensors=tuple(tensors))
