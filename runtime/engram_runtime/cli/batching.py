"""The heavy half of `engram batch`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from tqdm import tqdm

from engram_runtime.cli.lazy import CommandError
from engram_runtime.cli.serving import engine_config
from engram_runtime.engine.async_engine import AsyncLLMEngine
from engram_runtime.engine.outputs import RequestOutput
from engram_runtime.engine.sampling_params import SamplingParams
from engram_runtime.server.chat import Chat, ChatRenderer, canonical
from engram_runtime.server.errors import ApiError, from_validation
from engram_runtime.server.protocol.chat import ChatRequest
from engram_runtime.server.protocol.completions import CompletionRequest

# Enough to keep the batch full while the next prompts are rendered, without rendering a whole large file first.
AHEAD = 2


@dataclass(frozen=True, slots=True)
class Item:
    """One line of the prompts file."""

    number: int
    request: ChatRequest | CompletionRequest


def read_items(options: argparse.Namespace) -> list[Item]:
    """CommandError names the line."""
    stdin = str(options.prompts_file) == "-"
    try:
        text = sys.stdin.read() if stdin else options.prompts_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CommandError(f"--prompts-file {options.prompts_file} cannot be read: {reason}") from error
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    structured = options.prompts_file.suffix == ".jsonl" or (stdin and bool(lines) and lines[0][1].startswith("{"))
    defaults = {"max_tokens": options.max_tokens, "temperature": options.temperature, "top_p": options.top_p}
    items = []
    for number, line in lines:
        body: Any = {}
        if structured:
            try:
                body = json.loads(line)
            except ValueError as error:
                raise CommandError(f"line {number}: not JSON: {error}") from error
            if not isinstance(body, dict):
                raise CommandError(f"line {number}: expected an object with `prompt` or `messages`")
        elif options.no_chat_template:
            body = {"prompt": line}
        else:
            body = {"messages": [{"role": "user", "content": line}]}
        body = {**defaults, **body, "model": "batch"}
        try:
            kind = CompletionRequest if "prompt" in body else ChatRequest
            items.append(Item(number, kind.model_validate(body)))
        except (ValidationError, RequestValidationError) as error:
            raise CommandError(f"line {number}: {from_validation(error.errors(), body).message}") from error
        if items[-1].request.n != 1 or items[-1].request.stream:
            raise CommandError(f"line {number}: n and stream are not available in a batch")
    if not items:
        raise CommandError(f"--prompts-file {options.prompts_file} holds no prompts")
    return items


def run(options: argparse.Namespace) -> int:
    items = read_items(options)
    with _output(options.output) as out:  # what cannot be written is known before the model is loaded
        return asyncio.run(_main(options, items, out))


async def _main(options: argparse.Namespace, items: list[Item], out: TextIO) -> int:
    engine = await asyncio.to_thread(AsyncLLMEngine.from_config, engine_config(options), None)
    renderer = ChatRenderer(engine.tokenizer, max_model_len=engine.max_model_len, timeout_seconds=300.0)
    failed = 0
    started = time.perf_counter()
    totals = {"prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0}
    limit = asyncio.Semaphore(AHEAD * options.max_num_seqs)

    async def one(item: Item) -> dict[str, Any]:
        async with limit:
            try:
                ids, params = await _prepare(item.request, renderer)
                last: RequestOutput | None = None
                async for output in engine.generate(None, params, prompt_token_ids=ids):
                    last = output
            except (ApiError, ValueError) as error:
                return {"index": item.number, "error": str(error)}
        assert last is not None
        totals["prompt_tokens"] += last.prompt_tokens
        totals["cached_tokens"] += last.cached_tokens
        totals["completion_tokens"] += len(last.token_ids)
        return {
            "index": item.number,
            "text": last.text,
            "finish_reason": last.finish_reason,
            "prompt_tokens": last.prompt_tokens,
            "completion_tokens": len(last.token_ids),
        }

    try:
        with tqdm(total=len(items), unit="prompt", file=sys.stderr) as bar:
            tasks = [asyncio.create_task(one(item)) for item in items]
            for task in tasks:
                task.add_done_callback(lambda _: bar.update())
            for task in tasks:  # in the order of the file, each as soon as all before it are out
                result = await task
                failed += "error" in result
                _write(out, result, options.text)
    finally:
        renderer.close()
        await engine.aclose()
    if options.show_stats:
        _stats(totals, len(items), failed, time.perf_counter() - started)
    return 1 if failed else 0


async def _prepare(
    request: ChatRequest | CompletionRequest, renderer: ChatRenderer
) -> tuple[list[int], SamplingParams]:
    if isinstance(request, CompletionRequest):
        (prompt,) = request.prompt
        ids = await renderer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return ids, request.sampling(max_tokens=max(request.max_tokens, 1), logprobs=None)
    chat = Chat(
        [canonical(message) for message in request.messages],
        tools=request.shown_tools,
        template_kwargs=request.chat_template_kwargs,
        generation_prompt=request.generation_prompt,
        continue_final=request.continue_final_message,
    )
    return (await renderer.prompt(chat)).ids, request.sampling(max_tokens=request.limit, logprobs=None)


@contextmanager
def _output(path: Path | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
        return
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--output {path} cannot be written: {error.strerror}") from error
    with file:
        yield file


def _write(out: TextIO, result: dict[str, Any], text: bool) -> None:
    if text:
        if "error" in result:
            print(f"engram: line {result['index']}: {result['error']}", file=sys.stderr)
        out.write(result.get("text", "") + "\n")
    else:
        out.write(json.dumps(result, ensure_ascii=False) + "\n")
    out.flush()


def _stats(totals: dict[str, int], prompts: int, failed: int, seconds: float) -> None:
    rate = totals["completion_tokens"] / seconds
    print(
        f"{prompts} prompts ({failed} failed) in {seconds:.2f} s: {totals['prompt_tokens']} prompt tokens "
        f"({totals['cached_tokens']} of them shared), {totals['completion_tokens']} generated, {rate:.1f} tokens/s",
        file=sys.stderr,
    )
