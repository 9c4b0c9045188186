"""GET /v1/models, POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from engram_runtime.server.chat import Chat, canonical
from engram_runtime.server.errors import ApiError, invalid
from engram_runtime.server.protocol.completions import DetokenizeRequest, TokenizeRequest
from engram_runtime.server.protocol.responses import ErrorBody, Model, ModelList, Text, Tokens
from engram_runtime.server.state import ServerState, state_of
from engram_runtime.server.turns import check_model

router = APIRouter(responses={status: {"model": ErrorBody} for status in (400, 401, 404, 503)})


def _model(state: ServerState) -> dict[str, Any]:
    return {
        "id": state.config.served_model_name,
        "object": "model",
        "created": state.created,
        "owned_by": "engram",
        "max_model_len": state.serving().engine.max_model_len,
    }


@router.get("/v1/models", response_model=ModelList)
async def list_models(request: Request) -> dict[str, Any]:
    return {"object": "list", "data": [_model(state_of(request))]}


@router.get("/v1/models/{model_id:path}", response_model=Model)
async def get_model(request: Request, model_id: str) -> dict[str, Any]:
    state = state_of(request)
    check_model(state, model_id)
    return _model(state)


@router.post("/tokenize", response_model=Tokens)
async def tokenize(request: Request, body: TokenizeRequest) -> dict[str, Any]:
    """Token ids of a text, or of messages as the chat template renders them."""
    state = state_of(request)
    loaded = state.serving()
    check_model(state, body.model)
    if body.messages is not None:
        chat = Chat(
            [canonical(message) for message in body.messages],
            tools=[tool.shown() for tool in body.tools],
            generation_prompt=body.add_generation_prompt,
        )
        ids = (await loaded.renderer.prompt(chat)).ids
    elif body.tools:
        raise invalid("tools", "tools can only be shown together with messages")
    else:
        ids = await loaded.renderer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens)
    return {
        "count": len(ids),
        "max_model_len": loaded.engine.max_model_len,
        "tokens": ids,
        "token_strs": [loaded.tokens.text(token) for token in ids] if body.return_token_strs else None,
    }


@router.post("/detokenize", response_model=Text)
async def detokenize(request: Request, body: DetokenizeRequest) -> dict[str, Any]:
    state = state_of(request)
    loaded = state.serving()
    check_model(state, body.model)
    size = loaded.engine.vocab_size
    unknown = next((token for token in body.tokens if token >= size), None)
    if unknown is not None:
        raise ApiError(400, f"tokens holds id {unknown}, the vocabulary has {size}", param="tokens")
    return {"prompt": await loaded.renderer.decode(body.tokens)}
