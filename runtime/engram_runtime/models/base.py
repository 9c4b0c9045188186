"""The decoder-only language model that all families share.

A family overrides what differs: which config fields it honours, how a layer is built, where its tensors are in a
checkpoint. Everything else (embedding, residual stream, head, description of the caches) is here once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from engram_kernels import StepMetadata
from engram_runtime.errors import CheckpointError
from engram_runtime.layers.attention import Attention
from engram_runtime.layers.embedding import OutputHead, TokenEmbedding
from engram_runtime.layers.last_tokens import LastTokens
from engram_runtime.layers.mamba2 import StateStep
from engram_runtime.layers.mlp import GatedMLP
from engram_runtime.layers.moe import SparseExperts
from engram_runtime.layers.norm import RMSNorm
from engram_runtime.layers.rope import RopeSpec, canonical_rope, rotary_table
from engram_runtime.layers.weights import Build, Targets
from engram_runtime.models.caches import Caches
from engram_runtime.models.config_rules import Rule, check_config, json_values
from engram_runtime.models.decoder import DecoderLayer
from engram_runtime.models.spec import ModelSpec, StateSpec

DECODER_FIELDS = frozenset(
    {
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "hidden_act",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
        "rope_parameters",
    }
)


class CausalLM(nn.Module):
    """Weights are uninitialised until a loader has filled every one of `targets()`.

    config: a Hugging Face config. max_positions: rows of the rotary table, default `max_position_embeddings`.
    state_dtype: what ssm states are kept in, one of STATE_DTYPES.
    Raises CheckpointError naming the config field that cannot be honoured, ValueError for a state_dtype that cannot be.
    """

    honoured: ClassVar[frozenset[str]] = DECODER_FIELDS
    """Config fields of this family that the forward pass depends on."""
    rules: ClassVar[Mapping[str, Rule]] = {}
    """Values this family demands of single fields."""
    ignorable: ClassVar[tuple[str, ...]] = ("*.rotary_emb.inv_freq",)
    """Checkpoint keys (fnmatch patterns) that need not be consumed: they hold what is computed here."""

    def __init__(
        self, config: Any, build: Build, *, max_positions: int | None = None, state_dtype: str = "float32"
    ) -> None:
        super().__init__()
        check_config(config, self.rules)
        self.spec = self.describe(config, build.dtype).with_state_dtype(state_dtype)
        positions = max_positions or self.spec.max_position_embeddings
        rope = None if self.spec.rope is None else rotary_table(dict(self.spec.rope), positions, build.device)
        self.tied = bool(config.tie_word_embeddings)
        self.embed_tokens = TokenEmbedding(
            build, config.vocab_size, config.hidden_size, scale=getattr(config, "embedding_multiplier", None) or 1.0
        )
        self.layers = nn.ModuleList(
            self.build_layer(config, build, index, rope) for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(build, config.hidden_size, config.rms_norm_eps)
        self.lm_head = OutputHead(
            build, self.embed_tokens, tied=self.tied, divisor=getattr(config, "logits_scaling", None) or 1.0
        )

    def forward(self, ids: Tensor, meta: StepMetadata, caches: Caches, rows: Tensor | None = None) -> Tensor:
        """One step: ids[T] int64 -> final-normed hidden states [T, M]; caches are updated in place.

        rows [S] int64, where each sequence's last token is: only those hidden states are returned, [S, M], and where
        it pays nothing else is computed in the last layer.
        """
        step = StateStep.of(meta)
        last = None if rows is None else LastTokens.of(meta, rows, len(ids))
        x = self.embed_tokens(ids)
        residual: Tensor | None = None
        *before, final = self.layers
        for layer in before:
            x, residual = layer(x, residual, step, caches)
        x, residual = final(x, residual, step, caches, last)
        assert residual is not None
        assert isinstance(final, DecoderLayer)
        hidden, _ = self.norm.add(x, residual, final.residual_scale)
        return hidden if rows is None or last is not None else hidden[rows]

    def weights_per_token(self) -> int:
        """Weights of the layers that one token is multiplied with: of experts, those of the chosen ones."""
        count = 0
        for module in self.layers.modules():
            own = sum(weight.numel() for weight in module.parameters(recurse=False))
            if isinstance(module, SparseExperts):
                own = own * module.top_k // module.w_in.shape[0]
            count += own
        return count

    def logits(self, hidden: Tensor) -> Tensor:
        """Final-normed hidden states [R, M] -> [R, V] fp32."""
        logits: Tensor = self.lm_head(hidden)
        return logits

    def targets(self) -> Targets:
        """Checkpoint key -> the view it fills, for every tensor of the checkpoint that is used."""
        found = {
            **self.embed_tokens.targets("model.embed_tokens"),
            **self.norm.targets("model.norm"),
            **self.lm_head.targets("lm_head"),
        }
        for index, layer in enumerate(self.layers):
            found |= self.layer_targets(layer, f"model.layers.{index}")
        return found

    def ignored_keys(self) -> tuple[str, ...]:
        """Patterns of checkpoint keys that may be left over; a tied head's copy of the embedding is one of them."""
        return (*self.ignorable, "lm_head.weight") if self.tied else self.ignorable

    # What families override.

    def build_layer(self, config: Any, build: Build, index: int, rope: Tensor | None) -> DecoderLayer:
        """Layer `index`; the default is attention and a gated MLP."""
        inner = config.intermediate_size
        mlp = GatedMLP(
            build,
            config.hidden_size,
            {"gate_proj": inner, "up_proj": inner},
            "down_proj",
            bias=getattr(config, "mlp_bias", False),
        )
        return DecoderLayer(
            self.build_attention(config, build, rope),
            mlp,
            RMSNorm(build, config.hidden_size, config.rms_norm_eps),
            RMSNorm(build, config.hidden_size, config.rms_norm_eps),
            cache_index=index,
        )

    def build_attention(self, config: Any, build: Build, rope: Tensor | None) -> Attention:
        """The attention of one layer."""
        bias = bool(getattr(config, "attention_bias", False))
        return Attention(build, config.hidden_size, **self.attention_shape(config, rope), qkv_bias=bias, out_bias=bias)

    def attention_shape(self, config: Any, rope: Tensor | None) -> dict[str, Any]:
        """Keyword arguments of `Attention` that every family sets the same way."""
        return {
            "heads": self.spec.num_q_heads,
            "kv_heads": self.spec.num_kv_heads,
            "head_dim": self.spec.head_dim,
            "scale": self.spec.head_dim**-0.5,
            "rope": rope,
        }

    def layer_targets(self, layer: nn.Module, key: str) -> Targets:
        """Targets of one layer whose checkpoint keys start with `key`."""
        assert isinstance(layer, DecoderLayer)
        assert isinstance(layer.feed_forward, GatedMLP)
        return {
            **layer.input_norm.targets(f"{key}.input_layernorm"),
            **layer.post_norm.targets(f"{key}.post_attention_layernorm"),
            **layer.mixer.targets(f"{key}.self_attn"),
            **layer.feed_forward.targets(f"{key}.mlp"),
        }

    def layer_types(self, config: Any) -> tuple[str, ...]:
        """ "attention" or "mamba" per layer."""
        return ("attention",) * int(config.num_hidden_layers)

    def rope_spec(self, config: Any, head_dim: int) -> RopeSpec | None:
        """Canonical position embedding, None when the model has none."""
        try:
            return canonical_rope(config.rope_parameters, head_dim)
        except ValueError as error:
            raise CheckpointError(f"config.json: {error}") from error

    def state_spec(self, config: Any, dtype: torch.dtype) -> StateSpec | None:
        """Recurrent state of one sequence, None when the model has none."""
        return None

    def describe(self, config: Any, dtype: torch.dtype) -> ModelSpec:
        """The `ModelSpec` of a config."""
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return ModelSpec(
            architecture=config.model_type,
            dtype=str(dtype).removeprefix("torch."),
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            layer_types=self.layer_types(config),
            num_q_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            max_position_embeddings=config.max_position_embeddings,
            state=self.state_spec(config, dtype),
            rope=self.rope_spec(config, head_dim),
            config=json_values(config, self.honoured),
        )
