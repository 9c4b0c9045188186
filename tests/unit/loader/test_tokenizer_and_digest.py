"""Every id that ends a sequence is found, and digests follow content, not names or times."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from engram_runtime.errors import CheckpointError
from engram_runtime.loader.config import load_config
from engram_runtime.loader.digest import template_digest, tokenizer_digest, weights_digest
from engram_runtime.loader.tokenizer import eos_ids, load_tokenizer
from tests.support.tiny import make_tiny


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_tiny("llama", tmp_path / "model")


def test_eos_ids_are_the_union_of_three_sources(path: Path) -> None:
    tokenizer = load_tokenizer(path)
    config = load_config(path)
    assert eos_ids(path, config, tokenizer) == {0, 2}
    config.eos_token_id = [5, 7]
    assert eos_ids(path, config, tokenizer) == {0, 2, 5, 7}
    tokenizer.eos_token = "<|pad|>"
    assert eos_ids(path, config, tokenizer) == {0, 2, 3, 5, 7}
    (path / "generation_config.json").unlink()
    assert eos_ids(path, config, tokenizer) == {3, 5, 7}
    config.eos_token_id = None
    tokenizer.eos_token = None
    assert eos_ids(path, config, tokenizer) == frozenset()


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_an_unreadable_generation_config_is_named(path: Path, text: str) -> None:
    (path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        eos_ids(path, load_config(path), load_tokenizer(path))


def test_a_directory_without_tokenizer_is_named(path: Path) -> None:
    for file in path.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(CheckpointError, match="no readable tokenizer"):
        load_tokenizer(path)


def test_the_weights_digest_follows_content(path: Path, tmp_path: Path) -> None:
    digest = weights_digest(path)
    assert len(digest) == 64
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    assert weights_digest(copy) == digest
    assert weights_digest(make_tiny("llama", tmp_path / "other", seed=1)) != digest
    shard = copy / "model.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert weights_digest(copy) != digest


def test_the_weights_digest_is_remembered_until_the_file_changes(path: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    digest = weights_digest(path, cache)
    (entry,) = cache.iterdir()
    entry.write_text("0" * 64)
    assert weights_digest(path, cache) != digest  # taken from the cache
    entry.write_text("damaged")
    assert weights_digest(path, cache) == digest
    shard = path / "model.safetensors"
    shard.touch()
    entry.write_text("0" * 64)
    assert weights_digest(path, cache) == digest


def test_a_cache_that_cannot_be_written_costs_only_time(path: Path, tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    assert weights_digest(path, blocker / "cache") == weights_digest(path)


def test_a_damaged_shard_has_no_digest(path: Path) -> None:
    shard = path / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="truncated"):
        weights_digest(path)


def test_the_tokenizer_digest_follows_its_files(path: Path) -> None:
    digest = tokenizer_digest(path)
    (path / "README.md").write_text("unrelated")
    assert tokenizer_digest(path) == digest
    raw = json.loads((path / "tokenizer.json").read_text())
    raw["model"]["merges"].pop()
    (path / "tokenizer.json").write_text(json.dumps(raw))
    assert tokenizer_digest(path) != digest


def test_template_digests_differ_with_the_text() -> None:
    assert template_digest("a") != template_digest("b")
    assert template_digest(None) == template_digest("")
