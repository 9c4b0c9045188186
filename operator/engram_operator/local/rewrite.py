"""Container paths, ports and variables to this machine's: the text part of running a container as a process."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engram_operator.builders.settings import SCRATCH_PATH

_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][-A-Za-z0-9_.]*)\)")
_EVERY_ADDRESS = ("0.0.0.0", "::")


def expand(text: str, variables: Mapping[str, str]) -> str:
    """$(NAME) and $$ as the kubelet expands them: an unknown name stays as it is written."""

    def replace(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return variables.get(match[1], match[0])

    return _REFERENCE.sub(replace, text)


@dataclass(frozen=True, slots=True)
class Rewriter:
    """`mounts` maps paths in the container to folders here; `ports` maps flags to (port in the container, port here).

    A path in an argument that is under no mount is a path of the image, and the image is this machine: it stays. So an
    argument under the scratch mount stays too (a model may lie in /tmp here), while variables such as TMPDIR, which
    only the builders set to it, move to the pod's own folder.
    """

    mounts: Mapping[str, Path]
    ports: Mapping[str, tuple[int, int]]

    def path(self, text: str, *, scratch: bool = False) -> str:
        """A path, or a file:// URI, moved to where its volume is."""
        prefix = "file://" if text.startswith("file:///") else ""
        inside = text.removeprefix(prefix)
        for mount in sorted(self.mounts, key=len, reverse=True):
            if mount == SCRATCH_PATH and not scratch:
                continue
            if inside == mount or inside.startswith(mount + "/"):
                return f"{prefix}{self.mounts[mount]}{inside[len(mount) :]}"
        return text

    def arguments(self, args: Sequence[str]) -> list[str]:
        """A command line for this machine: volumes, ports, and loopback instead of every address."""
        rewritten = []
        flag = ""
        for arg in args:
            name, equals, value = arg.partition("=")
            if equals and name.startswith("--"):
                rewritten.append(f"{name}={self._value(name, value)}")
            else:
                rewritten.append(self._value(flag, arg))
            flag = arg if arg.startswith("--") else ""
        return rewritten

    def _value(self, flag: str, value: str) -> str:
        if flag in self.ports and value == str(self.ports[flag][0]):
            return str(self.ports[flag][1])
        if flag == "--host" and value in _EVERY_ADDRESS:
            return "127.0.0.1"
        return self.path(value)
