"""What the prefix index finds: any common prefix for dense models, exact states for recurrent ones, never too much."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_runtime.cache.manager import CacheManager, Chain
from engram_runtime.cache.prefix_index import Match

BLOCK = 4


def remember(
    cache: CacheManager, tokens: list[int], *, tenant: str = "a", state_at: int | None = None, mark: object = None
) -> array[int]:
    """Register a finished sequence and give its blocks back; returns the blocks it used."""
    blocks = cache.blocks.allocate(cache.blocks_for(len(tokens)))
    assert blocks is not None
    chain = Chain(tenant)
    node = cache.register(chain, tokens, blocks, len(tokens), partial=True)
    if state_at is not None:
        slots = cache.states.allocate(1)
        assert slots is not None
        inner = cache.register(Chain(tenant), tokens, blocks, state_at, partial=True)
        assert inner is not None
        cache.record(inner, state_at, slots[0], mark)
        cache.states.release(slots)
    elif mark is not None:
        assert node is not None
        cache.record(node, len(tokens), None, mark)
    cache.release_blocks(blocks)
    return blocks


def test_dense_models_may_use_part_of_a_block() -> None:
    cache = CacheManager(8, BLOCK)
    blocks = remember(cache, [1, 2, 3, 4, 5, 6, 7])
    match = cache.match("a", [1, 2, 3, 4, 5, 6, 9, 9], 7)
    assert match.position == 6
    assert match.blocks == blocks[:2]
    assert match.whole == blocks[:1]


def test_a_full_block_can_be_used_in_part_too() -> None:
    cache = CacheManager(8, BLOCK)
    blocks = remember(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    assert cache.match("a", [1, 2, 3, 4, 5, 6, 0, 0, 0], 8) == Match(6, blocks, whole=blocks[:1])


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_a_known_prompt_never_matches_beyond_the_limit(length: int) -> None:
    # A prompt found completely would leave a query of length zero, also when it ends at a block's edge.
    cache = CacheManager(8, BLOCK)
    tokens = list(range(length))
    remember(cache, tokens)
    assert cache.match("a", tokens, length - 1).position == length - 1


def test_recurrent_models_go_on_only_where_a_state_was_kept() -> None:
    cache = CacheManager(8, BLOCK, num_states=2)
    remember(cache, list(range(10)), state_at=6)
    assert cache.match("a", list(range(10)), 9).position == 6
    assert cache.match("a", list(range(10)), 5).position == 0
    diverging = cache.match("a", [0, 1, 2, 3, 4, 99, 6, 7, 8, 9], 9)
    assert diverging.position == 0
    assert diverging.state is None
    assert len(diverging.whole) == 1  # its KV is there, for a restore that brings a state


def test_the_deepest_state_on_the_common_prefix_wins() -> None:
    cache = CacheManager(16, BLOCK, num_states=4)
    for position in (3, 6, 9):
        remember(cache, list(range(12)), state_at=position)
    assert cache.match("a", list(range(12)), 11).position == 9
    assert cache.match("a", list(range(8)) + [99] * 4, 11).position == 6


def test_tenants_cannot_find_each_other() -> None:
    cache = CacheManager(8, BLOCK)
    remember(cache, [1, 2, 3, 4, 5], tenant="a")
    assert cache.match("b", [1, 2, 3, 4, 5], 4) == Match()


def test_marks_are_found_on_the_common_prefix_deepest_first() -> None:
    cache = CacheManager(16, BLOCK)
    remember(cache, [1, 2, 3], mark="early")
    remember(cache, [1, 2, 3, 4, 5, 6], mark="late")
    assert cache.match("a", [1, 2, 3, 4, 5, 6, 7], 6).marks == ((6, "late"), (3, "early"))
    assert cache.match("a", [1, 2, 3, 9], 3).marks == ((3, "early"),)


def test_a_partial_block_is_extended_by_its_owner() -> None:
    cache = CacheManager(8, BLOCK, num_states=2)
    blocks = cache.blocks.allocate(2)
    slot = (cache.states.allocate(1) or [0])[0]
    assert blocks is not None
    chain = Chain("a")
    node = cache.register(chain, [1, 2, 3, 4, 5], blocks, 5, partial=True)
    assert node is not None
    cache.record(node, 5, slot)
    cache.states.release([slot])
    cache.register(chain, [1, 2, 3, 4, 5, 6, 7, 8], blocks, 8)
    assert len(cache.index) == 2
    assert cache.match("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], 8).position == 5
    cache.check_integrity(Counter(blocks), Counter())


def test_a_copy_that_grew_takes_the_place_of_the_partial_block_it_was_copied_from() -> None:
    cache = CacheManager(8, BLOCK, num_states=2)
    remember(cache, [1, 2], state_at=2, mark="turn")
    remember(cache, [1, 2, 3, 4, 5])
    match = cache.match("a", [1, 2, 3, 4, 5], 4)
    assert match.position == 2
    assert match.state is not None
    assert match.marks == ((2, "turn"),)
    assert len(cache.index) == 2
    cache.check_integrity(Counter(), Counter())


def test_evicting_a_block_forgets_what_hangs_below_it() -> None:
    cache = CacheManager(4, BLOCK, num_states=1)
    remember(cache, list(range(12)), state_at=11)
    taken = cache.blocks.allocate(2)  # one free, so the tail of the chain goes
    assert taken is not None
    assert cache.match("a", list(range(12)), 11).position == 0
    assert len(cache.match("a", list(range(12)), 11).whole) == 2
    cache.check_integrity(Counter(taken), Counter())


def test_states_below_a_newer_one_are_evicted_first() -> None:
    cache = CacheManager(16, BLOCK, num_states=3)
    remember(cache, [9] * 8, state_at=8)  # another conversation, the least recently used
    remember(cache, list(range(12)), state_at=4)
    remember(cache, list(range(12)), state_at=10)
    node = cache.register(Chain("a"), list(range(12)), [], 0)
    assert node is None
    blocks = cache.match("a", list(range(12)), 12).blocks
    tip = cache.register(Chain("a"), list(range(12)), blocks, 12)
    assert tip is not None
    cache.thin_states(tip, 10)
    cache.states.release(cache.states.allocate(1) or [])
    assert cache.match("a", [9] * 9, 8).position == 8
    assert cache.match("a", list(range(10)), 9).position == 0
    assert cache.match("a", list(range(12)), 11).position == 10


def test_two_owners_of_the_same_tokens_share_one_node() -> None:
    cache = CacheManager(8, BLOCK)
    first = remember(cache, [1, 2, 3, 4])
    second = remember(cache, [1, 2, 3, 4, 5])
    assert cache.match("a", [1, 2, 3, 4, 5, 6], 5).blocks[0] == first[0]
    assert second[0] not in cache.match("a", [1, 2, 3, 4, 5, 6], 5).blocks
    cache.check_integrity(Counter(), Counter())


@dataclass
class Model:
    """Brute force: every remembered chain with its states, as lists."""

    chains: list[tuple[str, list[int], int | None]] = field(default_factory=list)

    def longest(self, tenant: str, tokens: list[int], limit: int, needs_state: bool) -> int:
        best = 0
        for owner, chain, state in self.chains:
            if owner != tenant:
                continue
            common = 0
            while common < min(limit, len(chain)) and chain[common] == tokens[common]:
                common += 1
            if not needs_state:
                best = max(best, common)
            elif state is not None and state <= common:
                best = max(best, state)
        return best


words = st.lists(st.integers(0, 2), min_size=1, max_size=13)


def stretched(tokens: list[int], times: int) -> list[int]:
    """Each token `times` times: chains of many blocks, which are handled as whole arrays."""
    return [token for token in tokens for _ in range(times)]


@pytest.mark.parametrize("times", [1, 11])
@given(
    st.booleans(),
    st.lists(st.tuples(st.sampled_from("ab"), words, st.integers(1, 13)), max_size=12),
    st.lists(st.tuples(st.sampled_from("ab"), words), max_size=6),
)
def test_the_index_finds_what_brute_force_finds(
    times: int, recurrent: bool, chains: list[tuple[str, list[int], int]], lookups: list[tuple[str, list[int]]]
) -> None:
    cache = CacheManager(64 * times, BLOCK, num_states=16 if recurrent else 0)
    model = Model()
    for tenant, word, position in chains:
        tokens = stretched(word, times)
        state = position * times - 1 if recurrent and position <= len(word) and position * times > 1 else None
        remember(cache, tokens, tenant=tenant, state_at=state)
        model.chains.append((tenant, tokens, state))
        cache.check_integrity(Counter(), Counter())
    for tenant, word in lookups:
        tokens = stretched(word, times)
        match = cache.match(tenant, tokens, len(tokens) - 1)
        assert match.position == model.longest(tenant, tokens, len(tokens) - 1, recurrent)
        assert len(match.blocks) == cache.blocks_for(match.position)
        assert (match.state is not None) == (recurrent and match.position > 0)


@pytest.mark.parametrize("times", [1, 11])
@given(st.booleans(), st.lists(st.tuples(words, st.integers(1, 13)), max_size=40))
def test_a_small_cache_forgets_without_leaking(
    times: int, recurrent: bool, chains: list[tuple[list[int], int]]
) -> None:
    cache = CacheManager(6 * times, BLOCK, num_states=2 if recurrent else 0)
    for word, position in chains:
        tokens = stretched(word, times)
        remember(cache, tokens, state_at=position * times if recurrent and position <= len(word) else None)
        cache.check_integrity(Counter(), Counter())
        assert cache.blocks.held == 0


@given(
    st.booleans(),
    st.lists(
        st.tuples(words, st.integers(1, 13), st.sampled_from(["remember", "mark", "evict", "evict states", "thin"])),
        max_size=25,
    ),
    st.lists(words, min_size=1, max_size=4),
)
def test_a_lookup_that_is_remembered_is_what_the_index_says_now(
    recurrent: bool, changes: list[tuple[list[int], int, str]], prompts: list[list[int]]
) -> None:
    cache = CacheManager(12, BLOCK, num_states=3 if recurrent else 0)
    asked = [array("I", stretched(word, 2)) for word in prompts]
    for word, position, change in changes:
        tokens = stretched(word, 2)
        if change in ("remember", "mark"):
            at = min(2 * position, len(tokens))
            remember(
                cache, tokens, state_at=at if recurrent else None, mark=(position, change) if change == "mark" else None
            )
        elif change == "thin":
            spot = cache.register(Chain("a"), tokens, cache.match("a", tokens, len(tokens)).blocks, 0)
            if spot is not None:
                cache.thin_states(spot, position)
        else:
            pool = cache.blocks if change == "evict" else cache.states
            pool.release(pool.allocate(min(position, pool.available)) or [])
        for tokens_asked in asked:
            for limit in (len(tokens_asked) - 1, len(tokens_asked)):
                found = [cache.match("a", tokens_asked, limit) for _ in range(2)]
                fresh = cache.index.match("a", tokens_asked, limit, recurrent)
                assert found[0] is found[1]
                assert found[0] == fresh
                assert found[0].spot == fresh.spot
        assert cache.match("b", asked[0], 1) == Match()


def test_equal_tokens_of_another_request_are_looked_up_by_themselves() -> None:
    cache = CacheManager(8, BLOCK)
    remember(cache, [1, 2, 3, 4, 5, 6])
    first, second = array("I", [1, 2, 3, 4, 9]), array("I", [1, 2, 3, 4, 5])
    assert [cache.match("a", tokens, 5).position for tokens in (first, second, first)] == [4, 5, 4]
    for _ in range(200):  # ids of arrays that are gone come again
        assert cache.match("a", array("I", [1, 2, 9]), 3).position == 2
        assert cache.match("a", array("I", [1, 9]), 2).position == 1


def test_a_conversation_is_one_run_however_long_and_parts_where_another_leaves_it() -> None:
    cache = CacheManager(600, BLOCK)
    history = list(range(1000))
    remember(cache, history)
    for turn in range(1, 8):
        remember(cache, history + [7] * (turn * 3))
    assert len(cache.index.root("a").children) == 1
    assert len(cache.index._runs) == 1
    remember(cache, [*history[:500], 1, 2, 3])
    assert len(cache.index._runs) == 3
    assert cache.match("a", [*history, 7, 7], 1001).position == 1001
    assert cache.match("a", [*history[:500], 1, 2, 3, 4], 503).position == 503
    cache.check_integrity(Counter(), Counter())
    cache.blocks.release(cache.blocks.allocate(cache.blocks.size) or [])
    assert not cache.index._runs
    cache.check_integrity(Counter(), Counter())


def test_a_chain_whose_blocks_were_evicted_is_registered_from_the_root_again() -> None:
    cache = CacheManager(8, BLOCK)
    blocks = cache.blocks.allocate(4)
    assert blocks is not None
    chain, tokens = Chain("a"), list(range(16))
    cache.register(chain, tokens, blocks, 8)
    cache.release_blocks(blocks[:2])
    other = cache.blocks.allocate(6)  # takes both
    assert other is not None
    cache.blocks.release(other[4:])
    assert chain.spot is not None
    assert cache.index.find(chain.spot) is None
    again = cache.blocks.allocate(2)
    assert again is not None
    cache.register(chain, tokens, again + blocks[2:], 16)
    assert cache.match("a", tokens, 15).position == 15
