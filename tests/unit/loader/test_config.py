"""Configs in old and new spelling load alike; what cannot be honoured is refused by the field's name."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.configuration_utils import PreTrainedConfig

from engram_runtime.errors import CheckpointError
from engram_runtime.loader.config import load_config, resolve_dtype
from engram_runtime.loader.model import load_model
from engram_runtime.models.config_rules import INERT_FIELDS
from engram_runtime.models.registry import MODELS, model_class
from tests.support.steps import Stepper
from tests.support.tiny import make_tiny


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: make_tiny(family, tmp_path_factory.mktemp(family)) for family in ("llama", "qwen2", "granite")}


def edited(source: Path, target: Path, **changes: Any) -> Path:
    """A copy whose config.json has other fields; None removes one."""
    path = Path(shutil.copytree(source, target))
    config = json.loads((path / "config.json").read_text())
    config.update({name: value for name, value in changes.items() if value is not None})
    for name, value in changes.items():
        if value is None:
            config.pop(name, None)
    (path / "config.json").write_text(json.dumps(config))
    return path


def logits(path: Path) -> torch.Tensor:
    stepper = Stepper(load_model(path))
    row = stepper.row(list(range(4, 44)))
    stepper.step([(row, 40)])
    return stepper.logits(row)


@pytest.mark.parametrize("model_type", MODELS)
def test_every_field_of_a_config_class_is_honoured_or_cannot_matter(model_type: str) -> None:
    """A field that a new transformers release adds fails here and not in front of a user."""
    config = transformers.CONFIG_MAPPING[model_type]
    common = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    own = {field.name for field in dataclasses.fields(config)} - common
    family = model_class(model_type)
    assert own - family.honoured - INERT_FIELDS == set()
    assert family.honoured & INERT_FIELDS == set()


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config must be unset"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved must be unset"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping must be unset"),
        ("llama", {"vocab_size": 0}, "vocab_size must be a positive integer"),
        ("llama", {"num_key_value_heads": 3}, "num_attention_heads 4 must be a multiple of 3"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type 'dynamic' is not supported",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor must be 1",
        ),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "layer_types": None},
            "sliding_window is in use",
        ),
        ("granite", {"position_embedding_type": "alibi"}, "position_embedding_type must be None or 'nope' or 'rope'"),
        ("granite", {"normalization_function": "layernorm"}, "normalization_function must be"),
        ("granite", {"mamba_n_groups": 3}, "mamba_n_heads 8 must be a multiple of mamba_n_groups 3"),
        ("granite", {"layer_types": ["mamba", "attention", "mamba", "moe"]}, "layer_types"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architectures must name"),
        (
            "llama",
            {"model_type": "mistral"},
            "model_type 'mistral' is not supported; supported: granitemoehybrid, llama",
        ),
        ("llama", {"model_type": "no-such"}, "model_type 'no-such' is unknown"),
        ("llama", {"model_type": None}, "model_type is missing"),
        ("llama", {"hidden_size": "big"}, "hidden_size"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    made: dict[str, Path], tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    path = edited(made[family], tmp_path / "edited", **changes)
    with pytest.raises(CheckpointError) as caught:
        load_model(path)
    assert "config.json" in str(caught.value)
    assert message in str(caught.value)


def test_the_old_spelling_of_rope_loads_alike(made: dict[str, Path], tmp_path: Path) -> None:
    old = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    path = edited(made["llama"], tmp_path / "old", rope_parameters=None, rope_theta=5e5, rope_scaling=old)
    assert torch.equal(logits(path), logits(made["llama"]))


def test_the_old_spelling_of_layer_types_loads_alike(made: dict[str, Path], tmp_path: Path) -> None:
    path = edited(made["granite"], tmp_path / "old", layer_types=["mamba", "attention", "mamba", "mamba"])
    assert torch.equal(logits(path), logits(made["granite"]))


def test_the_old_spelling_of_dtype_is_understood(made: dict[str, Path], tmp_path: Path) -> None:
    path = edited(made["llama"], tmp_path / "old", dtype=None, torch_dtype="bfloat16")
    assert resolve_dtype(load_config(path), "cuda") == torch.bfloat16


def test_dtype_auto_follows_the_device(made: dict[str, Path]) -> None:
    config = load_config(made["llama"])
    config.dtype = torch.bfloat16
    assert resolve_dtype(config, "cpu") == torch.float32
    assert resolve_dtype(config, "cuda:0") == torch.bfloat16
    assert resolve_dtype(config, "cpu", "float16") == torch.float16
    with pytest.raises(ValueError, match="dtype must be auto or one of"):
        resolve_dtype(config, "cpu", "int8")


def test_no_code_of_a_checkpoint_runs(made: dict[str, Path], tmp_path: Path) -> None:
    path = edited(made["llama"], tmp_path / "remote", auto_map={"AutoConfig": "evil.Config"})
    (path / "evil.py").write_text("raise SystemExit('code from the checkpoint ran')\nclass Config: ...\n")
    assert type(load_config(path)) is transformers.LlamaConfig


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000])
def test_a_config_that_is_no_json_object_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_config(tmp_path)


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        load_config(tmp_path)
    with pytest.raises(CheckpointError, match="is not a directory"):
        load_config(tmp_path / "nowhere")


def test_the_spec_describes_dense_and_hybrid_models(made: dict[str, Path]) -> None:
    dense = load_model(made["llama"], dtype="bfloat16").spec
    assert (dense.architecture, dense.dtype, dense.num_layers, dense.num_attention_layers) == (
        "llama",
        "bfloat16",
        2,
        2,
    )
    assert dense.state is None
    assert dense.state_bytes() == 0
    assert dense.kv_bytes_per_token() == 2 * 2 * 2 * 16 * 2
    assert dense.kv_bytes_per_token("float32") == 2 * dense.kv_bytes_per_token(torch.bfloat16)
    hybrid = load_model(made["granite"]).spec
    assert hybrid.layer_types == ("mamba", "attention", "mamba", "mamba")
    assert hybrid.rope is None
    assert hybrid.state is not None
    assert hybrid.state.ssm_shape == (8, 16, 16)
    assert hybrid.state.conv_shape == (160, 3)
    assert hybrid.state_bytes() == 3 * (8 * 16 * 16 * 4 + 160 * 3 * 4)
    assert hybrid.kv_bytes_per_token() == 2 * 1 * 2 * 16 * 4


def test_a_state_may_be_kept_in_bf16_where_there_is_one(made: dict[str, Path]) -> None:
    spec = load_model(made["granite"], state_dtype="bfloat16").spec
    assert spec.state_bytes() == 3 * (8 * 16 * 16 * 2 + 160 * 3 * 4)
    assert spec.dtype == "float32"
    assert load_model(made["llama"], state_dtype="float32").spec.state is None
    with pytest.raises(ValueError, match=r"^state_dtype bfloat16 cannot be honoured: this model \(llama\) has no"):
        load_model(made["llama"], state_dtype="bfloat16")
    with pytest.raises(ValueError, match=r"^state_dtype must be one of float32, bfloat16, got 'float16'"):
        load_model(made["granite"], state_dtype="float16")


def test_abi_fields_are_json_and_change_with_what_the_state_depends_on(made: dict[str, Path], tmp_path: Path) -> None:
    fields = load_model(made["granite"]).spec.abi_fields()
    assert json.loads(json.dumps(fields, allow_nan=False)) == fields
    seen = [
        fields,
        load_model(made["granite"], dtype="bfloat16").spec.abi_fields(),
        load_model(made["granite"], state_dtype="bfloat16").spec.abi_fields(),
    ]
    for name, value in (("rms_norm_eps", 1e-3), ("attention_multiplier", 0.5), ("time_step_limit", [0.01, 0.1])):
        seen.append(load_model(edited(made["granite"], tmp_path / name, **{name: value})).spec.abi_fields())
    assert len({json.dumps(entry, sort_keys=True) for entry in seen}) == len(seen)
    assert math.isinf(float(fields["config"]["time_step_limit"][1]))
