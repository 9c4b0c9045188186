"""Triton's interpreter without work that comes to nothing: more than half of the time that its tests take.

A kernel function that is called by another one makes it look through all of `triton.language` and wrap what the outer
call has wrapped already. Here an inner call does so only for a module that no outer one could see, and what it wraps is
unwrapped with the rest when the kernel ends. And each sum and product of integers is repeated in 64 bits for an
assertion that the interpreter, which has no debug mode, then drops (Triton 3.6).
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """While it lasts. Like the interpreter itself not for several threads."""
    original: Callable[[Any], Any] = interpreter._patch_lang
    wrapped: list[Any] = []
    running: list[Any] = []

    def patch(function: Any) -> Any:
        seen = [value for value in function.__globals__.values() if inspect.ismodule(value) and value in (tl, tl.core)]
        fresh = [module for module in seen if module not in wrapped]
        if seen and not fresh:
            return interpreter._LangPatchScope()
        scope = original(SimpleNamespace(__globals__=dict(enumerate(fresh))) if fresh else function)
        wrapped.extend(fresh)
        if running:  # the interpreter drops the scope of an inner call
            running[0]._changes += scope._changes
            return interpreter._LangPatchScope()
        running.append(scope)
        plain = scope.restore

        def restore() -> None:
            plain()
            wrapped.clear()
            running.clear()

        scope.restore = restore
        return scope

    builder = interpreter.interpreter_builder
    options = builder.options
    interpreter._patch_lang = patch
    if not options.debug:
        builder.options = dataclasses.replace(options, sanitize_overflow=False)
    try:
        yield
    finally:
        interpreter._patch_lang = original
        builder.options = options
