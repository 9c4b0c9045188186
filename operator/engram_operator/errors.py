"""Errors of this package: all of them are something a person must change, so each message names where."""

from __future__ import annotations

from collections.abc import Sequence


class MissingExtraError(RuntimeError):
    """A library of the `operator` extra is not installed."""

    def __init__(self, library: str) -> None:
        super().__init__(f'{library} is not installed: pip install "engram-platform[operator]"')


class ResourceError(ValueError):
    """One or more problems in a resource; each names the field, and the document once it is known."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))

    def within(self, where: str) -> ResourceError:
        """The same problems, each prefixed by the document they are in."""
        return ResourceError([f"{where}: {problem}" for problem in self.problems])
