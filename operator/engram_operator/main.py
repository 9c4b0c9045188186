"""`engram-operator`: reads the environment, puts the controllers together, and runs until it is told to stop.

Exit codes: 0 after a signal, 1 when it cannot go on (Kubernetes starts it again), 2 for a mistake in its settings.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial

from engram_operator.errors import MissingExtraError
from engram_operator.settings import OperatorSettings
from engram_operator.status.redact import redact

try:  # all of it comes with the `operator` extra; without it the command should say so
    from engram_operator.app import App
    from engram_operator.controllers import ActivatorController, Held, ModelController
    from engram_operator.controllers.snapshots import snapshot_controllers
    from engram_operator.engines import Engines
    from engram_operator.kube import logs
    from engram_operator.kube.client import Kube
    from engram_operator.kube.lease import LeaseLost
    from engram_operator.kube.transport import ApiTransport
    from engram_operator.resources import Schemas
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] == "engram_operator":
        raise
    raise SystemExit(str(MissingExtraError(error.name or "kopf"))) from error

log = logging.getLogger("engram_operator")

LOG_TEXT = 4000  # characters of one field


def assemble(settings: OperatorSettings, transport: ApiTransport, engines: Engines) -> App:
    """The operator with all its controllers, not yet running."""
    kube = Kube(transport, instance=settings.identity)
    app = App(kube, settings, transport.watch_session)
    schemas, held = Schemas.load(), Held()
    app.add(
        (
            ModelController(kube, app.cache, settings, _now, engines, held, app.enqueue, schemas),
            ActivatorController(kube, app.cache, settings, engines, held, app.enqueue),
            *snapshot_controllers(kube, app.cache, settings, _now, engines, app.enqueue, schemas),
        )
    )
    return app


async def serve(settings: OperatorSettings) -> None:
    """Until SIGTERM or SIGINT. LeaseLost never returns: the process ends."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def take_signals() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)

    take_signals()
    transport = ApiTransport()
    engines = Engines(settings.admin_token_file)
    app = assemble(settings, transport, engines)
    app.on_signals = take_signals
    app.on_lost = end_now
    try:
        await app.run(stop)
    finally:
        await engines.close()
        await transport.close()


def end_now() -> None:
    """Another may lead: nothing that is still running may write, so nothing may run."""
    logging.shutdown()
    os._exit(1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="engram-operator", description=__doc__, allow_abbrev=False)
    parser.parse_args(arguments)
    try:
        settings = OperatorSettings.from_environment()
    except ValueError as error:
        print(f"engram-operator: {error}", file=sys.stderr)
        return 2
    logs.configure(settings.log_level, partial(redact, limit=LOG_TEXT))
    log.info(
        "starting", extra={"identity": settings.identity, "namespaces": ",".join(settings.watch_namespaces) or "*"}
    )
    try:
        asyncio.run(serve(settings))
    except LeaseLost as error:
        log.error(str(error))
        return 1
    except Exception:
        log.exception("cannot go on")
        return 1
    log.info("stopped")
    return 0


def _now() -> datetime:
    return datetime.now(UTC)


if __name__ == "__main__":
    sys.exit(main())
