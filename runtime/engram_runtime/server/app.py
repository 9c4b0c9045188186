"""The two ASGI applications of a server: the public port and the admin port."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.middleware import Middleware

from engram_runtime.server import (
    admin,
    admin_snapshots,
    chat_completions,
    completions,
    errors,
    health,
    legacy,
    metrics,
    models,
    snapshots,
)
from engram_runtime.server.middleware import OPEN_PATHS, Authenticate, BodyAndDisconnect, Identify, RequestContext
from engram_runtime.server.state import ServerState, state_of

# Calls of the OpenAI and Anthropic APIs that come with a later version: said so, instead of a bare 404.
LATER = ("/v1/responses", "/v1/conversations", "/v1/messages", "/v1/embeddings")

public = APIRouter()


@public.get("/metrics", response_class=PlainTextResponse)
async def scrape(request: Request) -> PlainTextResponse:
    """Prometheus text format."""
    return PlainTextResponse(state_of(request).metrics.render(), media_type=metrics.CONTENT_TYPE)


async def _later(request: Request) -> JSONResponse:
    raise errors.ApiError(404, f"{request.url.path} is not available on this server yet", code="not_supported")


class Api(FastAPI):
    """Errors of validation are 400 in the one shape of all errors, not FastAPI's own 422: its document says so too."""

    def openapi(self) -> dict[str, Any]:
        document = super().openapi()
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for unused in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(unused, None)
        return document


def public_app(state: ServerState) -> FastAPI:
    """Port `http`: OpenAI and snapshot calls."""
    app = _app("Engram", state, state.tenants.identify, OPEN_PATHS)
    for router in (
        chat_completions.router,
        completions.router,
        models.router,
        snapshots.router,
        legacy.router,
        health.router,
        public,
    ):
        app.include_router(router)
    for path in LATER:
        for route in (path, path + "/{rest:path}"):
            app.add_api_route(route, _later, methods=["GET", "POST", "DELETE"], include_in_schema=False)
    return app


def admin_app(state: ServerState) -> FastAPI:
    """Port `admin`: metrics, drain, all snapshots by hashes, and the snapshot calls for any tenant."""
    app = _app("Engram admin", state, state.admin.identify, OPEN_PATHS | {"/metrics"})
    for router in (health.router, public, snapshots.router, admin.router, admin_snapshots.router):
        app.include_router(router)
    return app


def _app(title: str, state: ServerState, identify: Identify, open_paths: frozenset[str]) -> FastAPI:
    config = state.config
    app = Api(
        title=title,
        version="1",
        description="Stateful inference: OpenAI-compatible calls whose turns are remembered as snapshots.",
        docs_url=None,
        redoc_url=None,
        middleware=[
            Middleware(RequestContext, observe=state.metrics.observe_http),
            Middleware(Authenticate, identify=identify, open_paths=open_paths),
            Middleware(BodyAndDisconnect, max_bytes=config.max_body_bytes, timeout=config.body_timeout),
        ],
    )
    app.state.server = state
    errors.install(app)
    return app
