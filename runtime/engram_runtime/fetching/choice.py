"""Which files of a repository make a checkpoint. A pickle is a program: none is ever brought."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from engram_runtime.fetching.errors import FetchError
from engram_runtime.fetching.remote import RemoteFile, safe_path

WEIGHTS = "*.safetensors"
INDEX = "model.safetensors.index.json"
BESIDE = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "additional_chat_templates/*.jinja")
LARGEST_BESIDE = 1 << 30  # a tokenizer of a large vocabulary has tens of megabytes
_PICKLES = re.compile(r".*\.(bin|pt|pth|ckpt|pkl|pickle|msgpack|h5)")


def beside(files: Iterable[RemoteFile]) -> list[RemoteFile]:
    """Configuration, tokenizer, templates: all but the weights."""
    return [
        file
        for file in files
        if safe_path(file.path)
        and file.size <= LARGEST_BESIDE
        and any(fnmatchcase(file.path, pattern) and _as_deep(file.path, pattern) for pattern in BESIDE)
    ]


def weights(files: Iterable[RemoteFile], index: bytes | None, uri: str) -> list[RemoteFile]:
    """The shards that the index names; without one, the top folder's, one copy of them. FetchError without any."""
    listed = list(files)
    found = {file.path: file for file in listed if fnmatchcase(file.path, WEIGHTS) and "/" not in file.path}
    found = {path: file for path, file in found.items() if safe_path(path)}
    if index is not None:
        wanted = _shards(index, uri)
        missing = sorted(wanted - found.keys())
        if missing:
            raise FetchError("Incomplete", f"{uri} lacks {', '.join(missing[:5])}, which its {INDEX} names")
        return [found[path] for path in sorted(wanted)]
    # Some publishers add the same weights in their own layout.
    standard = {path for path in found if path.startswith("model")}
    chosen = [file for path, file in sorted(found.items()) if not standard or path in standard]
    if not chosen:
        pickles = [file.path for file in listed if _PICKLES.fullmatch(file.path)]
        hint = f"; it has {pickles[0]}, and pickles are programs: they are never loaded" if pickles else ""
        raise FetchError("NoSafetensors", f"{uri} holds no .safetensors file{hint}")
    return chosen


def _shards(index: bytes, uri: str) -> set[str]:
    try:
        document = json.loads(index)
        names = set(document["weight_map"].values()) if isinstance(document, Mapping) else set()
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise FetchError("BadIndex", f"{uri}: {INDEX} cannot be read: {error}") from error
    if not names or not all(isinstance(name, str) and fnmatchcase(name, WEIGHTS) for name in names):
        raise FetchError("BadIndex", f"{uri}: {INDEX} names no .safetensors files, or others")
    return names


def _as_deep(path: str, pattern: str) -> bool:
    """`*` would match a slash too."""
    return path.count("/") == pattern.count("/")
