"""Counter-based random numbers (Philox-4x32-10; Salmon et al., SC 2011).

A number depends on a seed, the position of the token being sampled and a vocabulary id, and on nothing else: not on
the batch a row shares, the chunking of its prompt, or a preemption. A counter gives four words, and ten rounds are what
noise costs, so four ids share one: runs of RUN ids take the words in turn. The stream is that of Triton's
`tl.rand4x(seed, (position << 32) | counter)`, so kernels draw the same numbers. torch has no unsigned 32-bit
arithmetic, so words are held in int64.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_TO_UNIT = 4.6566127342e-10  # the largest fp32 that maps every 31-bit integer below 1

RUN = 16
"""Ids in a row that take the same word of their counters: short, so that a chunk of ids is whole runs of all four, and
64 bytes of logits, so that reading one word's is not slower."""

LEAST = 2.0**-33
"""Less than any uniform number but 0, and used instead of it, whose noise would be -inf: not even the only token that
survives a cut would be chosen."""

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Ten rounds over int64 tensors (broadcast together) whose values are in [0, 2**32)."""
    # In place on our own copies: on a CPU the cost of this function is memory traffic, not arithmetic.
    shape = torch.broadcast_shapes(*(word.shape for word in (*counter, *key)))
    c0, c1, c2, c3 = (word.expand(shape).clone(memory_format=torch.contiguous_format) for word in counter)
    k0, k1 = key
    for _ in range(_ROUNDS):
        low, high = c0.mul_(_MULTIPLIERS[0]), c2.mul_(_MULTIPLIERS[1])
        # The shift is arithmetic and copies the sign into the upper half: mask it.
        c0 = (high >> 32).bitwise_and_(_MASK).bitwise_xor_(c1).bitwise_xor_(k0)
        c2 = (low >> 32).bitwise_and_(_MASK).bitwise_xor_(c3).bitwise_xor_(k1)
        c1, c3 = high.bitwise_and_(_MASK), low.bitwise_and_(_MASK)
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """fp32 in [0, 1) for int64 seeds, positions and vocabulary ids that broadcast together."""
    words = _words(seeds, positions, ids // (4 * RUN) * RUN + ids % RUN)
    return _to_unit(torch.stack(words).gather(0, (ids // RUN % 4).expand(words[0].shape)[None])[0])


def uniform_row(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """[..., vocab]: `uniform` of every id for seeds and positions [..., 1], each counter computed once."""
    runs = -(-vocab // (4 * RUN))
    words = _words(seeds, positions, torch.arange(runs * RUN, device=seeds.device))
    return _to_unit(torch.stack([word.unflatten(-1, (runs, RUN)) for word in words], -2).flatten(-3)[..., :vocab])


def _words(seeds: Tensor, positions: Tensor, counters: Tensor) -> Words:
    key = (seeds & _MASK, (seeds >> 32) & _MASK)
    zero = counters.new_zeros(())
    return philox4x32((counters & _MASK, positions & _MASK, zero, zero), key)


def _to_unit(word: Tensor) -> Tensor:
    # Triton reads the word as signed and takes -x - 1 of a negative x, which is the complement of the word.
    return torch.where(word < 1 << 31, word, _MASK - word).float().mul_(_TO_UNIT)
