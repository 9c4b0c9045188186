"""Slices of a mixed step describe exactly the rows they claim."""

from __future__ import annotations

import torch

from tests.unit.kernels.steps import make_step


def test_decodes_and_prefills_partition_the_step():
    meta = make_step([1, 1, 5, 20], [33, 2, 5, 50], state_slots=[3, 1, 4, 2])
    decodes, prefills = meta.decodes(), meta.prefills()

    assert meta.num_decodes == meta.decode_tokens == 2
    assert (decodes.num_sequences, decodes.num_tokens, decodes.num_decodes) == (2, 2, 2)
    assert (prefills.num_sequences, prefills.num_tokens, prefills.num_decodes) == (2, 25, 0)
    assert torch.equal(torch.cat((decodes.positions, prefills.positions)), meta.positions)
    assert torch.equal(torch.cat((decodes.slots, prefills.slots)), meta.slots)
    assert prefills.query_start.tolist() == [0, 5, 25]
    assert prefills.state_slots.tolist() == [4, 2]
    assert prefills.has_state.tolist() == [False, True]
    assert (prefills.max_query_len, prefills.max_seq_len) == (20, 50)
    assert (decodes.max_query_len, decodes.max_seq_len) == (1, 33)
    assert prefills.seq_lens_host == (5, 50)
    assert torch.equal(prefills.block_tables, meta.block_tables[2:])


def test_a_pure_step_is_its_own_slice():
    decode_only = make_step([1, 1], [4, 9])
    assert decode_only.decodes() is decode_only
    assert decode_only.prefills().num_sequences == 0
    assert decode_only.prefills().max_query_len == 0

    prefill_only = make_step([4, 9], [4, 9])
    assert prefill_only.prefills() is prefill_only
    assert prefill_only.decodes().num_tokens == 0
    assert prefill_only.decodes().query_start.tolist() == [0]
