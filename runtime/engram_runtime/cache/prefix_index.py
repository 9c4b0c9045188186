"""Which tokens are already in the cache: a tree of blocks per tenant, states and boundary marks at exact positions.

A node is one block: its parent, 1 to `block_size` tokens, the block id. Children are found by comparing tokens, not by
a hash of them, so two prefixes can never be taken for one another; tenants have separate roots, so one can never find
the other's blocks. A node with fewer tokens than a block is a leaf until its owner fills the block and extends it.

Dense models may use any common prefix, down to a single token of a block (the block is copied before it is written).
Recurrent states cannot be cut: a model that has them can only go on from a position where a state was kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from engram_runtime.cache.pool import Pool

Tokens = tuple[int, ...]


class Node:
    """One block of a chain. `states` and `marks` are keyed by the number of this block's tokens they cover (>= 1)."""

    __slots__ = ("block", "by_first", "children", "depth", "marks", "parent", "states", "tokens")

    def __init__(self, parent: Node | None, tokens: Tokens, block: int, depth: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.block = block
        self.depth = depth
        """Blocks above this one: the first token's position is depth * block_size."""
        self.children: dict[Tokens, Node] = {}
        self.by_first: dict[int, list[Node]] = {}
        self.states: dict[int, int] = {}
        self.marks: dict[int, Any] = {}


@dataclass(frozen=True, slots=True)
class Match:
    """The longest usable prefix.

    `position` tokens need not be computed: `blocks` hold them, all but the last in full; if `position` is not a
    multiple of the block size the last of `blocks` has to be copied before it is written. `state` is the checkpoint
    slot exact at `position`. The longest common prefix may be longer than what is usable: `whole` are its complete
    blocks, `marks` the boundaries on it, deepest first, as (position, mark).
    """

    position: int = 0
    blocks: tuple[int, ...] = ()
    state: int | None = None
    whole: tuple[int, ...] = ()
    marks: tuple[tuple[int, Any], ...] = ()
    node: Node | None = field(default=None, compare=False)
    """Of the last complete block within `position`: where registering goes on."""


class PrefixIndex:
    """The tree, kept in step with the two pools. Not thread-safe: the engine thread owns it."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._roots: dict[str, Node] = {}
        self._nodes: dict[int, Node] = {}
        self._state_places: dict[int, tuple[Node, int]] = {}
        self.blocks: Pool | None = None
        self.states: Pool | None = None

    def attach(self, blocks: Pool, states: Pool) -> None:
        """The pools whose slots this index refers to; they call `evict_block` and `evict_state`."""
        self.blocks, self.states = blocks, states

    def root(self, tenant: str) -> Node:
        node = self._roots.get(tenant)
        if node is None:
            node = self._roots[tenant] = Node(None, (), -1, -1)
        return node

    def is_attached(self, node: Node) -> bool:
        """False once the node was evicted; a chain that remembered it starts again at the root."""
        return node.parent is None or self._nodes.get(node.block) is node

    def __len__(self) -> int:
        return len(self._nodes)

    # Looking up

    def match(self, tenant: str, tokens: Sequence[int], limit: int, needs_state: bool) -> Match:
        """The longest usable prefix of at most `limit` tokens."""
        limit = min(limit, len(tokens))
        tokens = tokens if isinstance(tokens, tuple) else tuple(tokens)
        path, common = self._walk(self.root(tenant), tokens, limit)
        if not path:
            return Match()
        marks = tuple(self._marks(path, tokens, limit))
        position, state = common, None
        if needs_state:
            position, state = self._deepest_state(path, tokens, limit)
        blocks = [node.block for node in path]
        used, complete = -(-position // self.block_size), position // self.block_size
        last = path[complete - 1] if complete else None
        whole = tuple(blocks[: common // self.block_size])
        return Match(position, tuple(blocks[:used]), state, whole, marks, last)

    def _walk(self, node: Node, tokens: Tokens, limit: int) -> tuple[list[Node], int]:
        """Nodes along `tokens`, the last one possibly in part, and the number of common tokens."""
        size = self.block_size
        path: list[Node] = []
        position = 0
        # Thousands of rounds for a long history, before its first token: nothing here but what is needed.
        for position in range(0, limit - size + 1, size):
            child = node.children.get(tokens[position : position + size])
            if child is None:
                break
            path.append(child)
            node = child
        position = len(path) * size
        rest = tokens[position : min(position + size, limit)]
        best, length = None, 0
        for child in node.by_first.get(rest[0], ()) if rest else ():
            shared = common_prefix(child.tokens, rest)
            if shared > length:
                best, length = child, shared
        if best is not None:
            path.append(best)
        return path, position + length

    def _alike(self, node: Node, tokens: Sequence[int], limit: int) -> Iterator[tuple[Node, int]]:
        """`node` and the blocks beside it that begin like it, with the number of tokens they share with `tokens`.

        Where two chains part inside a block, what was recorded before that point may be filed under either.
        """
        first = node.depth * self.block_size
        wanted = tuple(tokens[first : min(first + self.block_size, limit)])
        if node.parent is not None:
            for sibling in node.parent.by_first[node.tokens[0]]:
                yield sibling, common_prefix(sibling.tokens, wanted)

    def _deepest_state(self, path: list[Node], tokens: Sequence[int], limit: int) -> tuple[int, int | None]:
        for node in reversed(path):
            best, slot = 0, None
            for place, shared in self._alike(node, tokens, limit):
                for offset, state in place.states.items():
                    if best < offset <= shared:
                        best, slot = offset, state
            if slot is not None:
                return node.depth * self.block_size + best, slot
        return 0, None

    def _marks(self, path: list[Node], tokens: Sequence[int], limit: int) -> Iterator[tuple[int, Any]]:
        last = path[-1]
        found = {
            offset: mark
            for place, shared in self._alike(last, tokens, limit)
            for offset, mark in place.marks.items()
            if offset <= shared
        }
        for node in reversed(path):
            marks = found if node is last else node.marks
            if not marks:
                continue
            for offset in sorted(marks, reverse=True):
                yield node.depth * self.block_size + offset, marks[offset]

    # Recording

    def insert(self, parent: Node, tokens: Tokens, block: int) -> Node:
        """The node for `tokens` below `parent`, whose contents `block` now holds.

        Where another block already covers these tokens its node is returned and `block` stays private to its owner.
        """
        exact = parent.children.get(tokens)
        if exact is not None:
            return exact
        if len(tokens) < self.block_size:
            for child in parent.by_first.get(tokens[0], ()):
                if common_prefix(child.tokens, tokens) == len(tokens):
                    return child
        own = self._nodes.get(block)
        if own is not None and own.parent is parent and own.tokens == tokens[: len(own.tokens)]:
            self._unlink(own)
            own.tokens = tokens
            node = own
        else:
            if own is not None:  # the block was reused without being evicted first: cannot be found by its old tokens
                self._detach(own)
            node = Node(parent, tokens, block, parent.depth + 1)
            self._nodes[block] = node
            self._pool(self.blocks).cache(block)
        parent.children[tokens] = node
        siblings = parent.by_first.setdefault(tokens[0], [])
        siblings.append(node)
        for sibling in [s for s in siblings if s is not node and node.tokens[: len(s.tokens)] == s.tokens]:
            self._absorb(sibling, node)
        return node

    def _absorb(self, shorter: Node, longer: Node) -> None:
        """`longer` covers everything of `shorter` (a partial leaf): one node is enough."""
        for offset, slot in list(shorter.states.items()):
            if offset in longer.states:
                self.drop_state(slot)
            else:
                del shorter.states[offset]
                longer.states[offset] = slot
                self._state_places[slot] = (longer, offset)
        for offset, mark in shorter.marks.items():
            longer.marks.setdefault(offset, mark)
        self._detach(shorter)

    def put_state(self, node: Node, offset: int, slot: int) -> bool:
        """Keep `slot` as the state after `offset` tokens of `node`; False when one is already kept there."""
        if offset in node.states:
            return False
        node.states[offset] = slot
        self._state_places[slot] = (node, offset)
        self._pool(self.states).cache(slot)
        return True

    def demote_states(self, node: Node | None, before: int) -> None:
        """Let the states of this chain at positions below `before` go first when slots are needed."""
        pool = self._pool(self.states)
        while node is not None:
            first = node.depth * self.block_size
            for offset, slot in node.states.items():
                if first + offset < before:
                    pool.demote(slot)
            node = node.parent

    def drop_state(self, slot: int) -> None:
        node, offset = self._state_places.pop(slot)
        del node.states[offset]
        self._pool(self.states).uncache(slot)

    # Forgetting

    def evict_block(self, block: int) -> None:
        """The pool reuses `block`: nothing below it can be reached any more."""
        self._detach(self._nodes[block])

    def evict_state(self, slot: int) -> None:
        node, offset = self._state_places.pop(slot)
        del node.states[offset]

    def _detach(self, node: Node) -> None:
        self._unlink(node)
        stack = [node]
        while stack:
            gone = stack.pop()
            stack.extend(gone.children.values())
            gone.children, gone.by_first = {}, {}
            for slot in list(gone.states.values()):
                self.drop_state(slot)
            if self._nodes.get(gone.block) is gone:
                del self._nodes[gone.block]
            self._pool(self.blocks).uncache(gone.block)

    def _unlink(self, node: Node) -> None:
        parent = node.parent
        if parent is None:
            return
        del parent.children[node.tokens]
        siblings = parent.by_first[node.tokens[0]]
        siblings.remove(node)
        if not siblings:
            del parent.by_first[node.tokens[0]]

    @staticmethod
    def _pool(pool: Pool | None) -> Pool:
        if pool is None:
            raise RuntimeError("attach() gives the index its pools before it is used")
        return pool

    def check(self) -> None:
        """Raise AssertionError unless the tree is consistent."""
        seen: set[int] = set()
        states: set[int] = set()
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            assert sum(len(v) for v in node.by_first.values()) == len(node.children)
            for tokens, child in node.children.items():
                assert child.tokens == tokens, "a child is filed under other tokens"
                assert child.parent is node, "a child has another parent"
                assert child.depth == node.depth + 1, "a child is at the wrong depth"
                assert child in node.by_first[tokens[0]], "a child is missing from the first-token table"
                assert len(tokens) == self.block_size or not child.children, "a partial block has children"
                assert self._nodes.get(child.block) is child, "a node's block belongs to another node"
                assert child.block not in seen, "two nodes share a block"
                seen.add(child.block)
                for offset, slot in child.states.items():
                    assert 1 <= offset <= len(tokens), "a state lies outside its block"
                    assert self._state_places[slot] == (child, offset), "a state is filed elsewhere"
                    assert slot not in states, "two positions share a state slot"
                    states.add(slot)
                stack.append(child)
        assert seen == set(self._nodes), "a node cannot be reached"
        assert states == set(self._state_places), "a state cannot be reached"


def common_prefix(left: Tokens, right: Tokens) -> int:
    """Length of the longest common prefix; doubling and halving, so that long ones are compared as whole slices."""
    limit = min(len(left), len(right))
    if limit == 0 or left[0] != right[0]:
        return 0
    same, step = 1, 1
    while same < limit:
        step = min(step, limit - same)
        if left[same : same + step] == right[same : same + step]:
            same, step = same + step, step * 2
        elif step == 1:
            break
        else:
            step //= 2
    return same
