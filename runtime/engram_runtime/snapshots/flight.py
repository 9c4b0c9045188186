"""Single flight: many requests for one object make one read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

Value = TypeVar("Value")


class SingleFlight(Generic[Value]):
    """The first caller for a key does the work; those who come meanwhile get its result, or its error."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flights: dict[Hashable, Future[Value]] = {}

    def run(self, key: Hashable, work: Callable[[], Value], timeout: float | None = None) -> Value:
        """TimeoutError when another caller's work takes longer than `timeout` seconds."""
        with self._lock:
            flight = self._flights.get(key)
            leads = flight is None
            if flight is None:
                flight = self._flights[key] = Future()
        if not leads:
            return flight.result(timeout)
        try:
            value = work()
        except BaseException as error:
            self._land(key)
            flight.set_exception(error)
            raise
        self._land(key)
        flight.set_result(value)
        return value

    def _land(self, key: Hashable) -> None:
        with self._lock:
            del self._flights[key]
