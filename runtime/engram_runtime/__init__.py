"""Stateful inference runtime: engine, snapshots, HTTP server and the `engram` command line.

The public names are loaded when they are first used: `import engram_runtime` imports no torch, so that the command
line can print its help at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engram_runtime.engine.async_engine import AsyncLLMEngine
    from engram_runtime.engine.config import EngineConfig
    from engram_runtime.engine.continuous import ContinuousBatchingEngine
    from engram_runtime.engine.llm import LLM, TextGenerator
    from engram_runtime.engine.outputs import RequestOutput
    from engram_runtime.engine.sampling_params import SamplingParams

_PUBLIC = {
    "LLM": "engram_runtime.engine.llm",
    "AsyncLLMEngine": "engram_runtime.engine.async_engine",
    "ContinuousBatchingEngine": "engram_runtime.engine.continuous",
    "EngineConfig": "engram_runtime.engine.config",
    "RequestOutput": "engram_runtime.engine.outputs",
    "SamplingParams": "engram_runtime.engine.sampling_params",
    "TextGenerator": "engram_runtime.engine.llm",
}

__all__ = [
    "LLM",
    "AsyncLLMEngine",
    "ContinuousBatchingEngine",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "TextGenerator",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_PUBLIC[name]), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("engram_"):
            raise
        problem = f"engram_runtime.{name} needs the package {error.name!r}: pip install 'engram-platform[runtime]'"
        raise ModuleNotFoundError(problem, name=error.name) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
