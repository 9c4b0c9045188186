"""Who may find what: every name a snapshot has is derived here.

A name is a hash over (what the model's state means, whose it is, the exact tokens). Without the tenant secret nobody
can compute or probe a name; with another checkpoint, dtype or layer map nothing matches. Never Python's `hash()`: names
outlive the process.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engram_runtime.cache.runs import common, tokens_view

FORMAT_VERSION = 1
MAX_DERIVED = 1024  # names and keys of tenants that are remembered
SEGMENT_TOKENS = 256  # the grid on which the chain is kept; part of state_abi, not a flag

_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def canonical_json(value: object) -> bytes:
    """The one byte form of a JSON value: sorted keys, no spaces, ASCII. ValueError for NaN and infinities."""
    return _CANONICAL.encode(value).encode()


def state_abi(fields: Mapping[str, object]) -> str:
    """SHA-256 (hex) over everything that decides what stored bytes mean.

    `fields` come from the model and the engine: architecture, weights digest, quantisation, adapters, RoPE, layer map,
    dtypes of KV and states. Engine version and tensor-parallel size are not among them: a roll must not lose memory.
    """
    document = {"format": FORMAT_VERSION, "segment_tokens": SEGMENT_TOKENS, "fields": dict(fields)}
    return hashlib.sha256(canonical_json(document)).hexdigest()


def pack_tokens(token_ids: Sequence[int]) -> array[int]:
    """Token ids as unsigned 32-bit numbers. ValueError when one does not fit."""
    if isinstance(token_ids, array) and token_ids.typecode == "I":
        return token_ids
    try:
        return array("I", token_ids)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token_ids must be integers in [0, 2**32): {error}") from None


def token_bytes(tokens: array[int]) -> bytes:
    """Little-endian bytes, whatever the machine."""
    if sys.byteorder == "big":
        tokens = tokens[:]
        tokens.byteswap()
    return tokens.tobytes()


def tokens_from_bytes(data: bytes) -> array[int]:
    """The inverse of token_bytes; len(data) must be a multiple of 4."""
    tokens = array("I", data)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def common_prefix(left: array[int], right: array[int]) -> int:
    """Length of the longest common prefix (token loops are slow at 100k tokens)."""
    return common(tokens_view(left), tokens_view(right))


@dataclass(frozen=True, slots=True)
class Keyring:
    """Derives a tenant's namespace, chain root and signing key from the one tenant secret."""

    secret: bytes
    _derived: dict[tuple[bytes, bytes], bytes] = field(default_factory=dict, init=False, compare=False)

    def __repr__(self) -> str:  # never let the secret reach a log
        return "Keyring(...)"

    def namespace(self, tenant: str) -> str:
        """32 hex digits; the only form in which a tenant appears in a store."""
        return self._derive(b"engram-namespace", tenant.encode()).hex()[:32]

    def root(self, abi: str, tenant: str) -> bytes:
        """h0 of the tenant's token chains: H(state_abi, HMAC(secret, tenant))."""
        return hashlib.sha256(
            b"engram-chain-1\0" + bytes.fromhex(abi) + self._derive(b"engram-root", tenant.encode())
        ).digest()

    def signer(self, namespace: str) -> Signer:
        """From the namespace, not the tenant's name: garbage collection and fsck verify tenants they cannot name."""
        return Signer(self._derive(b"engram-sign", namespace.encode()))

    def _derive(self, purpose: bytes, text: bytes) -> bytes:
        found = self._derived.get((purpose, text))
        if found is None:
            found = hmac.new(self.secret, purpose + b"\0" + text, hashlib.sha256).digest()
            if len(self._derived) < MAX_DERIVED:
                self._derived[purpose, text] = found
        return found


@dataclass(frozen=True, slots=True)
class Signer:
    """Signs what a namespace's writers publish, and hides the names its users gave."""

    key: bytes

    def __repr__(self) -> str:
        return "Signer(...)"

    def sign(self, purpose: str, data: bytes) -> str:
        """HMAC-SHA-256 (hex) of `data`; `purpose` keeps one kind of document from passing as another."""
        return hmac.new(self.key, purpose.encode() + b"\0" + data, hashlib.sha256).hexdigest()

    def verify(self, purpose: str, data: bytes, signature: str) -> bool:
        return hmac.compare_digest(self.sign(purpose, data).encode(), signature.encode("utf-8", "replace"))

    def hide(self, purpose: str, text: str) -> str:
        """32 hex digits that stand for a conversation id or branch name in a key."""
        return self.sign(f"name-{purpose}", text.encode())[:32]


class TokenChain:
    """h_i = H(h_{i-1}, tokens of segment i), and a name for any position: `key(n)` covers exactly tokens [0, n).

    On the grid it is h_{n/256}; elsewhere H(last h, the unaligned tail). Lazy; nothing is hashed twice.
    """

    def __init__(self, root: bytes, token_ids: Sequence[int]) -> None:
        self.tokens = pack_tokens(token_ids)
        self._segments = [root]
        self._tails: dict[int, str] = {}

    @property
    def segments(self) -> tuple[bytes, ...]:
        """What is hashed so far."""
        return tuple(self._segments)

    def begin_like(self, tokens: array[int], segments: Sequence[bytes]) -> None:
        """Take over from another chain of the same root, of `tokens`, what the two have in common."""
        whole = min(common_prefix(tokens, self.tokens) // SEGMENT_TOKENS, len(segments) - 1)
        if whole >= len(self._segments) and segments[0] == self._segments[0]:
            self._segments = list(segments[: whole + 1])

    def __len__(self) -> int:
        return len(self.tokens)

    def key(self, position: int) -> str:
        """64 hex digits. ValueError when position is outside [0, len]."""
        if not 0 <= position <= len(self.tokens):
            raise ValueError(f"position must be in [0, {len(self.tokens)}], got {position}")
        whole, tail = divmod(position, SEGMENT_TOKENS)
        if len(self._segments) <= whole:
            self._extend(whole)
        if not tail:
            return self._segments[whole].hex()
        found = self._tails.get(position)
        if found is None:
            data = self._segments[whole] + b"T" + token_bytes(self.tokens[whole * SEGMENT_TOKENS : position])
            found = self._tails[position] = hashlib.sha256(data).hexdigest()
        return found

    def _extend(self, whole: int) -> None:
        """Hash the segments up to the `whole`th."""
        first = len(self._segments) - 1
        data = memoryview(token_bytes(self.tokens[first * SEGMENT_TOKENS : whole * SEGMENT_TOKENS]))
        last, sha256 = self._segments[-1], hashlib.sha256
        for start in range(0, len(data), 4 * SEGMENT_TOKENS):
            link = sha256(last + b"S")
            link.update(data[start : start + 4 * SEGMENT_TOKENS])
            last = link.digest()
            self._segments.append(last)

    def anchor(self, position: int) -> str:
        """Name (64 hex digits) of the anchor object at `position`."""
        return anchor_name(self.key(position))


def anchor_name(chain_key: str) -> str:
    """The anchor at the position whose chain key this is; another hash, so that an anchor's name gives no chain key."""
    return hashlib.sha256(b"engram-anchor\0" + bytes.fromhex(chain_key)).hexdigest()
