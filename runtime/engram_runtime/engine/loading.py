"""From a configuration to an engine that runs: device, ops, weights, caches, tokenizer, snapshots; in this order.

What cannot be honoured fails here, before the first request.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from engram_kernels import Ops, Registry
from engram_kernels.tuning import use_folder
from engram_runtime.engine.config import EngineConfig
from engram_runtime.engine.core import LLMEngine
from engram_runtime.engine.facts import ModelFacts
from engram_runtime.engine.startup import StartUp
from engram_runtime.executor.device.build import build_executor
from engram_runtime.executor.device.executor import DeviceExecutor
from engram_runtime.executor.device.graphs import why_not_recorded
from engram_runtime.executor.executor import Executor
from engram_runtime.executor.memory import CacheRequest, free_memory, plan_caches
from engram_runtime.executor.plan import MOST_STEPS_TOGETHER
from engram_runtime.executor.transfer import state_layout
from engram_runtime.layers.weights import Build
from engram_runtime.loader.config import load_config, resolve_dtype
from engram_runtime.loader.digest import weights_digest
from engram_runtime.loader.model import load_model
from engram_runtime.loader.tokenizer import eos_ids, load_tokenizer
from engram_runtime.models.registry import model_class
from engram_runtime.models.spec import ModelSpec
from engram_runtime.settings import Settings
from engram_runtime.snapshots.policy.identity import state_abi
from engram_runtime.snapshots.service import SnapshotService
from engram_runtime.snapshots.types import SnapshotConfig, StateLayout

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its caches, ready for an engine."""

    executor: Executor | DeviceExecutor
    spec: ModelSpec
    tokenizer: Any
    eos_ids: frozenset[int]
    start: StartUp


def resolve_device(name: str) -> torch.device:
    """ "auto" is the GPU if there is one. ValueError when CUDA is asked for and missing."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda cannot be used: torch finds no CUDA device")
    return torch.device(name)


def has_state(model_config: Any, ops: Ops, dtype: torch.dtype) -> bool:
    """Whether the model of a config has recurrent state; nothing is allocated or read for it."""
    build = Build(ops, torch.device("meta"), dtype)
    return model_class(model_config.model_type)(model_config, build, max_positions=1).spec.state is not None


def load(config: EngineConfig, *, registry: Registry | None = None) -> LoadedModel:
    """Load a checkpoint folder. Raises CheckpointError, ValueError, BackendUnavailable."""
    start = StartUp()
    start.mark("imports")
    use_folder(Settings.from_environment().cache_dir / "tuning")  # what `engram autotune` found here
    device = resolve_device(config.device)
    path = Path(config.model)
    model_config = load_config(path)
    dtype = resolve_dtype(model_config, device, config.dtype)
    if device.type == "cpu" and config.gpu_memory_utilization is not None:
        raise ValueError(f"gpu_memory_utilization is for GPUs, this is a CPU; got {config.gpu_memory_utilization}")
    ops = Ops.bind(device, dtype, config.op_overrides, registry)
    unrecorded = why_not_recorded(device, dtype, config.op_overrides, registry)
    if config.use_cuda_graph and unrecorded is not None:
        raise ValueError(f"use_cuda_graph=True cannot be honoured: {unrecorded}")
    record = unrecorded is None and config.use_cuda_graph is not False
    if config.decode_steps_per_launch > 1:
        may = record and not has_state(model_config, ops, dtype)
        config.check_steps_together(MOST_STEPS_TOGETHER if may else 1)
    tokenizer = load_tokenizer(config.tokenizer or path)
    with tqdm(desc="loading weights", unit="B", unit_scale=True, disable=not config.progress) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        model = load_model(
            path,
            device=device,
            dtype=dtype,
            ops=ops,
            progress=progress,
            max_positions=config.max_model_len,
            state_dtype=config.state_dtype,
        )
    start.mark("weights")
    request = CacheRequest(
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        kv_cache_tokens=config.kv_cache_tokens,
        state_slots=config.state_slots,
        checkpoint_slots=config.checkpoint_slots,
    )
    executor: Executor | DeviceExecutor
    if device.type == "cuda":
        executor = build_executor(
            model,
            ops,
            request,
            device,
            max_num_batched_tokens=config.max_num_batched_tokens,
            utilization=config.gpu_memory_utilization,
            record=record,
        )
    else:
        executor = Executor(model, ops, plan_caches(model.spec, request, free_memory(device)), device)
    start.mark("executor")
    return LoadedModel(executor, model.spec, tokenizer, eos_ids(path, model_config, tokenizer), start)


def snapshot_service(
    config: SnapshotConfig, abi: str, layout: StateLayout, executor: Executor | DeviceExecutor
) -> SnapshotService:
    """The service over an executor's caches; on a GPU its host tier is memory that the card copies at link speed."""
    if not isinstance(executor, DeviceExecutor):
        return SnapshotService(config, state_abi=abi, layout=layout, transfer=executor.transfer)
    arena = executor.transfer.reserve(config.host_bytes, verify=config.verify)
    service = SnapshotService(config, state_abi=abi, layout=layout, transfer=executor.transfer, memory=arena)
    arena.reclaim = service.make_room
    return service


def load_engine(
    config: EngineConfig, snapshots: SnapshotConfig | None = None, *, registry: Registry | None = None
) -> LLMEngine:
    """An engine, which owns its snapshot service if there is one. Raises what `load` raises, and SnapshotError."""
    loaded = load(config, registry=registry)
    layout = state_layout(loaded.spec)
    facts = ModelFacts(
        architecture=loaded.spec.architecture,
        dtype=loaded.spec.dtype,
        weight_bytes=sum(file.stat().st_size for file in Path(config.model).glob("*.safetensors")),
        state_bytes=layout.state_bytes,
        kv_bytes_per_token=layout.kv_bytes_per_token,
        start=loaded.start,
    )
    service = None
    if snapshots is not None and snapshots.enabled:
        # Stored state means something only beside these very weights.
        digest = weights_digest(config.model, Settings.from_environment().cache_dir / "digests")
        abi = state_abi({**loaded.spec.abi_fields(), "weights": digest})
        facts = replace(facts, weights_digest=digest, state_abi=abi)
        service = snapshot_service(snapshots, abi, layout, loaded.executor)
    loaded.start.mark("engine")
    logger.info("loaded: %s", loaded.start)
    return LLMEngine(
        config,
        loaded.executor,
        vocab_size=loaded.spec.vocab_size,
        tokenizer=loaded.tokenizer,
        eos_ids=loaded.eos_ids,
        snapshots=service,
        transfer=loaded.executor.transfer,
        facts=facts,
    )
