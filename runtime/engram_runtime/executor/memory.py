"""How much the caches may take: sizes are settled once, from the model and the machine, and what was asked is held.

A size that was asked for and does not fit is a ValueError that says what would fit, never a smaller cache in silence.
Sizes left open are derived, and reported by the engine's statistics.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from engram_kernels.metadata import PAGE
from engram_runtime.executor.plan import CacheGeometry
from engram_runtime.models.caches import Caches
from engram_runtime.models.spec import ModelSpec

CACHE_SHARE = 0.25
"""Share of the memory that is free now which the KV blocks may take when nothing else is asked for."""
CHECKPOINT_SHARE = 0.05
MAX_DEFAULT_CHECKPOINTS = 256
AHEAD_SHARE = 0.2
"""Share of the memory that the second slots of running sequences may take: with them steps run ahead of the host."""


@dataclass(frozen=True, slots=True)
class CacheRequest:
    """Sizes asked for; None leaves one open. `max_num_seqs` sequences may run at once."""

    max_num_seqs: int
    max_model_len: int | None = None
    kv_cache_tokens: int | None = None
    state_slots: int | None = None
    checkpoint_slots: int | None = None
    fill: bool = False
    """Blocks take all the memory there is, also what running sequences cannot use: it is the first tier of turns."""


def plan_caches(spec: ModelSpec, request: CacheRequest, free_bytes: int) -> CacheGeometry:
    """Sizes for a model on a device with `free_bytes` left. ValueError names the field that cannot be honoured."""
    limit = spec.max_position_embeddings
    window = request.max_model_len or limit
    if window > limit:
        raise ValueError(f"max_model_len must be <= {limit} (the model's window), got {window}")
    per_token = spec.kv_bytes_per_token()
    state_bytes = spec.state_bytes()
    slots = _slots(request, state_bytes, free_bytes) if spec.state is not None else 0
    usable = free_bytes - slots * state_bytes if request.fill else int(free_bytes * CACHE_SHARE)
    num_blocks = _blocks(request, window, per_token, usable)
    if num_blocks * PAGE < window:
        if request.max_model_len is not None and request.kv_cache_tokens is not None:
            raise ValueError(
                f"kv_cache_tokens must hold one sequence of max_model_len ({window}), got {request.kv_cache_tokens}"
            )
        if request.max_model_len is not None:
            raise ValueError(
                f"max_model_len must be <= {num_blocks * PAGE}: a cache for {window} tokens needs "
                f"{window * per_token} bytes, {usable} may be used"
            )
        window = num_blocks * PAGE
    geometry = CacheGeometry(num_blocks, PAGE, slots, per_token, state_bytes, window)
    wanted = num_blocks * PAGE * per_token + slots * state_bytes
    if wanted > free_bytes:
        fields = "kv_cache_tokens, state_slots and checkpoint_slots" if slots else "kv_cache_tokens"
        raise ValueError(f"{fields} ask for {wanted} bytes of cache, {free_bytes} are free")
    return geometry


def _slots(request: CacheRequest, state_bytes: int, free_bytes: int) -> int:
    running = request.state_slots or request.max_num_seqs
    if request.fill and request.state_slots is None and running * state_bytes <= AHEAD_SHARE * free_bytes:
        running *= 2
    kept = request.checkpoint_slots
    if kept is None:
        kept = min(int(free_bytes * CHECKPOINT_SHARE) // state_bytes, MAX_DEFAULT_CHECKPOINTS)
        kept = max(kept, request.max_num_seqs, 4)
    return running + kept


def _blocks(request: CacheRequest, window: int, per_token: int, usable: int) -> int:
    if request.kv_cache_tokens is not None:
        return request.kv_cache_tokens // PAGE
    useful = request.max_num_seqs * -(-window // PAGE)
    if per_token == 0:
        return useful
    blocks = usable // (per_token * PAGE) if request.fill else min(usable // (per_token * PAGE), useful)
    if blocks < 1:
        raise ValueError(f"kv_cache_tokens cannot be derived: one block needs {per_token * PAGE} bytes")
    return blocks


def allocate_caches(spec: ModelSpec, geometry: CacheGeometry, device: torch.device) -> Caches:
    """Zeroed caches. On the CPU the pages are committed when they are first written."""
    dtype = getattr(torch, spec.dtype)
    shape = (2, geometry.num_blocks, spec.num_kv_heads, geometry.block_size, spec.head_dim)
    kv = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(spec.num_attention_layers)]
    state = spec.state
    if state is None:
        return Caches(kv)
    slots, layers = geometry.num_state_slots, state.num_layers
    ssm = torch.zeros((slots, layers, *state.ssm_shape), dtype=getattr(torch, state.ssm_dtype), device=device)
    conv = torch.zeros((slots, layers, *state.conv_shape), dtype=getattr(torch, state.conv_dtype), device=device)
    return Caches(kv, ssm, conv)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated: the card's, or the machine's within the limit of its control group."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = _available_host_bytes()
    limit, used = (_read_int(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
    return free if limit is None or used is None else max(0, min(free, limit - used))


def _available_host_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: half of what is installed is a fair guess
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text("ascii"))
    except (OSError, ValueError):  # no such control group, or "max"
        return None
