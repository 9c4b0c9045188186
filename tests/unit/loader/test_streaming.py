"""Weights streamed in pieces fill what mapped files would have filled, and a short file is an error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engram_runtime.errors import CheckpointError
from engram_runtime.loader import prefetch as prefetching
from engram_runtime.loader import streaming
from engram_runtime.loader.checkpoint import Checkpoint
from engram_runtime.loader.streaming import stream_weights
from tests.support import patience


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = {f"layer.{i}": torch.randn(31 + i, 17).to(torch.bfloat16) for i in range(9)}
    save_file({**tensors, "scale": torch.randn(3)}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("piece", [64, 1000, 16 << 20])
def test_every_tensor_is_filled(folder: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(streaming, "PIECE_BYTES", piece)
    checkpoint = Checkpoint.open(folder)
    mapped = {
        info.key: tensor.clone()
        for info, tensor in checkpoint.stream(folder / "model.safetensors", list(checkpoint.tensors))
    }
    whole = torch.full((10, 80, 17), float("nan"), dtype=torch.bfloat16)
    weights, told = [], list[int]()
    for number, (key, info) in enumerate(checkpoint.tensors.items()):
        target = torch.empty(info.shape) if key == "scale" else whole[number, : info.shape[0]]
        weights.append((info, target))
    stream_weights(weights, told.append)
    for info, target in weights:
        assert torch.equal(target, mapped[info.key])
    assert sum(told) == checkpoint.bytes
    stream_weights([], told.append)


def test_a_file_that_ends_early_is_named(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    info = checkpoint.tensors["layer.8"]
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(CheckpointError, match="ends before byte"):
        stream_weights([(i, torch.empty(i.shape, dtype=torch.bfloat16)) for i in (info,)] * 9, lambda n: None)
    file.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        stream_weights([(info, torch.empty(info.shape, dtype=torch.bfloat16))], lambda n: None)


def test_weights_are_read_ahead_only_where_there_is_room(folder: Path, tmp_path: Path) -> None:
    thread = prefetching.prefetch(folder, available=1 << 30)
    assert thread is not None
    thread.join(patience.SECONDS)
    assert not thread.is_alive()
    assert prefetching.prefetch(folder, available=1000) is None
    assert prefetching.prefetch(tmp_path / "nothing", available=1 << 30) is None
    (folder / "model.safetensors").unlink()
    (folder / "gone.safetensors").symlink_to(folder / "nowhere")
    assert prefetching.prefetch(folder, available=1 << 30) is None
