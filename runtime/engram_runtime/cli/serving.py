"""The heavy half of `engram serve`: flags to configurations, then the server's life."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from engram_runtime.cli.admin import admin_accounts
from engram_runtime.cli.s3 import s3_options
from engram_runtime.engine.config import EngineConfig
from engram_runtime.server.config import ServerConfig
from engram_runtime.server.lifecycle import serve
from engram_runtime.server.tenant_key import local_tenant_key, read_tenant_key
from engram_runtime.settings import Settings
from engram_runtime.snapshots.types import SnapshotConfig

if TYPE_CHECKING:
    from engram_runtime.engine.async_engine import AsyncLLMEngine


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """ValueError names the field."""
    return EngineConfig(
        model=options.model,
        dtype=options.dtype,
        state_dtype=options.state_dtype,
        device=options.device,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        kv_cache_tokens=options.kv_cache_tokens,
        gpu_memory_utilization=options.gpu_memory_utilization,
        decode_steps_per_launch=options.decode_steps_per_launch,
        tensor_parallel_size=options.tensor_parallel_size,
        op_overrides=dict(options.op),
        seed=options.seed,
    )


def server_config(options: argparse.Namespace) -> ServerConfig:
    return ServerConfig(
        served_model_name=options.served_model_name or Path(options.model).resolve().name,
        host=options.host,
        port=options.port,
        admin_port=options.admin_port,
        api_keys_dir=options.api_keys_dir,
        admin_accounts=admin_accounts(options),
        max_num_seqs=options.max_num_seqs,
        max_queue=options.max_queue,
        max_body_bytes=options.max_body_size,
        drain_timeout=options.drain_timeout,
        save_turn_end=options.snapshot_trigger_turn_end,
        save_idle_seconds=options.snapshot_idle_seconds,
        save_min_interval_seconds=options.snapshot_min_interval_seconds,
        save_on_drain=options.snapshot_drain,
    )


def snapshot_config(options: argparse.Namespace, settings: Settings) -> SnapshotConfig | None:
    """None when snapshots are off."""
    s3 = s3_options(options, options.snapshot_store, "--snapshot-store")
    if options.snapshots_disabled:
        return None
    return SnapshotConfig(
        tenant_key=read_tenant_key(options.tenant_key_file or local_tenant_key(settings.state_dir)),
        host_bytes=options.snapshot_host_memory,
        disk_path=options.snapshot_disk_path,
        disk_bytes=options.snapshot_disk,
        store_uri=options.snapshot_store,
        s3=s3,
        verify=not options.unsafe_skip_snapshot_checks,
        keep_last=options.retention_keep_last,
        max_age_seconds=options.retention_max_age or None,
        max_conversations=options.retention_max_conversations,
        max_total_bytes=options.retention_max_total_size,
        gc_interval_seconds=options.gc_interval_seconds,
        gc_grace_seconds=options.gc_grace_seconds,
        suspend_gc=options.gc_interval_seconds == 0,
    )


def run(options: argparse.Namespace) -> int:
    # Other libraries write their own life into INFO.
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for ours in ("engram", "engram_runtime"):
        logging.getLogger(ours).setLevel(logging.INFO)
    engine, snapshots = engine_config(options), snapshot_config(options, Settings.from_environment())

    def load() -> AsyncLLMEngine:
        # torch takes seconds to import: not before the ports are open.
        module = importlib.import_module("engram_runtime.engine.async_engine")
        loaded: AsyncLLMEngine = module.AsyncLLMEngine.from_config(engine, snapshots)
        importlib.import_module("engram_runtime.engine.process").settle()
        return loaded

    return serve(server_config(options), load)
