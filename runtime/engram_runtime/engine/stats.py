"""Numbers about the engine for the metrics endpoint: counters grow, gauges are of now, observations are drained."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class EngineStats:
    """One reading. Tokens, blocks and slots are counts; times are seconds."""

    running: int = 0
    waiting: int = 0
    restoring: int = 0
    swapped: int = 0
    background: int = 0
    blocks_used: int = 0
    """Held by requests, leases or saves; evictable prefix blocks are not counted."""
    blocks_cached: int = 0
    blocks_total: int = 0
    block_size: int = 16
    states_used: int = 0
    states_total: int = 0
    max_model_len: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    rewarmed_tokens: int = 0
    recomputed_tokens: int = 0
    prefix_hit_tokens: int = 0
    restored_tokens: dict[str, int] = field(default_factory=dict)
    """By tier."""
    restored_bytes: dict[str, int] = field(default_factory=dict)
    restore_failures: int = 0
    preemptions_swapped: int = 0
    preemptions_recomputed: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    """By finish reason."""
    saves_requested: int = 0
    saves_superseded: int = 0
    start_seconds: dict[str, float] = field(default_factory=dict)
    """Since the process began, by what was over then: weights, executor, engine, first_token."""
    ttft_seconds: list[float] = field(default_factory=list)
    itl_seconds: list[float] = field(default_factory=list)
    e2e_seconds: list[float] = field(default_factory=list)
    queue_seconds: list[float] = field(default_factory=list)
    restore_seconds: list[float] = field(default_factory=list)
