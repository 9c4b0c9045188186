"""Checkpoints of any number of shards load completely, one tensor at a time, or not at all."""

from __future__ import annotations

import json
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engram_runtime.errors import CheckpointError
from engram_runtime.loader.checkpoint import INDEX, SINGLE, Checkpoint
from engram_runtime.loader.model import load_model
from engram_runtime.loader.weights import load_weights
from tests.support.steps import Stepper
from tests.support.tiny import make_tiny


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("sharded"), max_shard_size=100_000)


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "copy"))


def rewrite(path: Path, **changes: Tensor | None) -> None:
    """Replace (or with None remove) tensors of a single-file checkpoint; dots are written as two underscores."""
    tensors = load_file(path / SINGLE)
    for name, value in changes.items():
        key = name.replace("__", ".")
        if value is None:
            del tensors[key]
        else:
            tensors[key] = value
    save_file(tensors, path / SINGLE)


def logits(path: Path, **options: str) -> Tensor:
    stepper = Stepper(load_model(path, **options))
    row = stepper.row(list(range(4, 44)))
    stepper.step([(row, 40)])
    return stepper.logits(row)


def test_shards_give_the_same_model(llama: Path, sharded: Path) -> None:
    assert len(Checkpoint.open(sharded).files) > 3
    assert torch.equal(logits(llama), logits(sharded))


def test_progress_counts_every_byte(sharded: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_model(sharded, progress=lambda loaded, total: seen.append((loaded, total)))
    checkpoint = Checkpoint.open(sharded)
    assert len(seen) == len(checkpoint.tensors)
    assert [loaded for loaded, _ in seen] == sorted(loaded for loaded, _ in seen)
    assert seen[-1] == (checkpoint.bytes, checkpoint.bytes)


def test_every_parameter_is_filled_exactly_once(llama: Path) -> None:
    model = load_model(llama)
    filled = sum(target.tensor.numel() for target in model.targets().values())
    assert filled == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("workers", [1, 3])
def test_no_tensor_outlives_its_copy(sharded: Path, workers: int) -> None:
    """Streaming holds at most one source tensor per worker, so a load needs the model's memory once."""
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    class Recorder:
        def __init__(self, shape: tuple[int, ...]) -> None:
            self.tensor = torch.empty(shape)

        def fill(self, source: Tensor) -> None:
            nonlocal most
            alive.append(weakref.ref(source))
            most = max(most, sum(reference() is not None for reference in alive))

    checkpoint = Checkpoint.open(sharded)
    targets = {key: Recorder(info.shape) for key, info in checkpoint.tensors.items()}
    load_weights(checkpoint, targets, workers=workers)
    assert len(alive) == len(checkpoint.tensors)
    assert most <= workers


def test_a_missing_key_is_named(copy: Path) -> None:
    rewrite(copy, model__layers__1__mlp__up_proj__weight=None)
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(copy)


def test_an_unexpected_key_is_named(copy: Path) -> None:
    rewrite(copy, model__layers__0__self_attn__q_norm__weight=torch.ones(16))
    with pytest.raises(CheckpointError, match=r"no use for model\.layers\.0\.self_attn\.q_norm\.weight"):
        load_model(copy)


def test_many_unexpected_keys_are_counted(copy: Path) -> None:
    rewrite(copy, **{f"extra__{index}": torch.ones(1) for index in range(9)})
    with pytest.raises(CheckpointError, match=r"extra\.0, .* and 4 more"):
        load_model(copy)


def test_a_wrong_shape_is_named_with_both_shapes(copy: Path) -> None:
    rewrite(copy, model__norm__weight=torch.ones(65))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \[65\], config\.json implies \[64\]"):
        load_model(copy)


def test_integer_weights_are_refused(copy: Path) -> None:
    rewrite(copy, model__norm__weight=torch.ones(64, dtype=torch.int8))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has dtype I8"):
        load_model(copy)


def test_what_old_checkpoints_carry_besides_weights_is_ignored(copy: Path, llama: Path) -> None:
    rewrite(copy, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    assert torch.equal(logits(copy), logits(llama))


def test_a_tied_head_may_be_stored_too_but_an_untied_one_must_be(tmp_path: Path) -> None:
    tied = make_tiny("qwen2", tmp_path / "tied", tie_word_embeddings=True)
    before = logits(tied)
    rewrite(tied, lm_head__weight=torch.zeros(512, 64))
    assert torch.equal(logits(tied), before)
    untied = make_tiny("qwen2", tmp_path / "untied")
    rewrite(untied, lm_head__weight=None)
    with pytest.raises(CheckpointError, match=r"lacks lm_head\.weight"):
        load_model(untied)


@pytest.mark.parametrize("source", ["llama", "sharded"])
def test_a_truncated_shard_is_named(request: pytest.FixtureRequest, tmp_path: Path, source: str) -> None:
    path = Path(shutil.copytree(request.getfixturevalue(source), tmp_path / "cut"))
    shard = Checkpoint.open(path).files[-1]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"{shard.name}: the file is truncated"):
        load_model(path)


def test_a_missing_shard_is_named(sharded: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(sharded, tmp_path / "gap"))
    name = Checkpoint.open(path).files[1].name
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name}: the shard is missing"):
        load_model(path)


def test_a_key_in_two_shards_is_named(sharded: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(sharded, tmp_path / "twice"))
    first, second = Checkpoint.open(path).files[:2]
    key = next(iter(load_file(first)))
    save_file({**load_file(second), key: load_file(first)[key]}, second)
    with pytest.raises(CheckpointError, match=f"{key} is in {first.name} and again in {second.name}"):
        Checkpoint.open(path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"x": "../outside.safetensors"}}, "is no shard's file name"),
        ({"weight_map": {"x": "/etc/passwd"}}, "is no shard's file name"),
        ({"weight_map": {"x": 3}}, "is no shard's file name"),
        ({"weight_map": {"x": "absent.safetensors"}}, "the shard is missing"),
        ({"weight_map": {}}, "no readable weight_map"),
        ({"weight_map": [1]}, "no readable weight_map"),
        ({}, "no readable weight_map"),
        ([], "no readable weight_map"),
    ],
)
def test_a_bad_index_is_refused(tmp_path: Path, index: object, message: str) -> None:
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path)


def test_an_index_that_promises_what_a_shard_lacks_is_refused(sharded: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(sharded, tmp_path / "promise"))
    index = json.loads((path / INDEX).read_text())
    shard = next(iter(index["weight_map"].values()))
    index["weight_map"]["model.ghost.weight"] = shard
    (path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rf"model\.ghost\.weight is not in {shard}"):
        Checkpoint.open(path)


def test_directories_without_safetensors_say_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor"):
        Checkpoint.open(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="only safetensors checkpoints are read"):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="is not a directory"):
        Checkpoint.open(tmp_path / "nowhere")


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_half_precision_checkpoints_load_in_any_dtype(tmp_path: Path, stored: torch.dtype) -> None:
    path = make_tiny("granite", tmp_path, dtype=stored)
    exact = load_model(path)
    assert {parameter.dtype for parameter in exact.parameters()} == {torch.float32}
    assert exact.spec.dtype == "float32"
    weights = load_file(path / SINGLE)
    assert torch.equal(exact.embed_tokens.weight, weights["model.embed_tokens.weight"].float())
    half = load_model(path, dtype=stored)
    assert half.embed_tokens.weight.dtype == stored
    assert half.layers[0].mixer.A.dtype == torch.float32
    error = (logits(path, dtype=str(stored).removeprefix("torch.")) - logits(path)).norm() / logits(path).norm()
    assert error < 0.3


def test_a_value_that_float16_cannot_hold_is_named(copy: Path) -> None:
    weight = torch.ones(64)
    weight[3] = 1e5
    rewrite(copy, model__norm__weight=weight)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has values that float16 cannot hold"):
        load_model(copy, dtype="float16")
    assert load_model(copy, dtype="bfloat16").norm.weight[3] > 9e4
