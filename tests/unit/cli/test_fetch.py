"""A checkpoint that lacks a file is found before a server starts."""

from __future__ import annotations

import json

import pytest

from engram_runtime.cli.fetch import missing_files
from engram_runtime.cli.main import main

FILES = ("config.json", "tokenizer_config.json", "model.safetensors")


@pytest.fixture
def folder(tmp_path):
    for name in FILES:
        (tmp_path / name).write_text("{}")
    return tmp_path


def test_complete(folder, capsys):
    assert missing_files(folder) == []
    assert main(["fetch", f"file://{folder}", "--path", str(folder)]) == 0
    assert "complete" in capsys.readouterr().out


@pytest.mark.parametrize("name", FILES)
def test_each_part_is_missed(folder, name):
    (folder / name).unlink()
    (problem,) = missing_files(folder)
    assert name.split(".")[-1] in problem


def test_every_shard_of_an_index_is_needed(folder):
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    shards = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(shards))
    assert missing_files(folder) == ["model-2.safetensors is missing"]
    (folder / "model.safetensors.index.json").write_text("{")
    assert "cannot be read" in missing_files(folder)[0]
