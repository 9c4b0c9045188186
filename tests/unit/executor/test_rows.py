"""Sampler inputs: a stage that no row uses costs nothing, a row that uses one gets exactly what it asked for."""

from __future__ import annotations

import torch

from engram_kernels.metadata import SampleOutput
from engram_runtime.executor.batch import step_metadata
from engram_runtime.executor.plan import RowOpen, RowSampling, SequencePlan
from engram_runtime.executor.rows import Row, sampled_tokens, sampling_tensors

CPU = torch.device("cpu")


def row(prompt: tuple[int, ...] = (1, 2, 2), output: tuple[int, ...] = (), **sampling: object) -> Row:
    options = {"temperature": 0.0, **sampling}
    return Row(RowOpen(0, RowSampling(**options), prompt, output))  # type: ignore[arg-type]


def test_greedy_rows_ask_for_nothing() -> None:
    tensors = sampling_tensors([row(), row()], [3, 3], CPU)
    assert all(
        getattr(tensors, name) is None
        for name in ("temperature", "seeds", "positions", "top_k", "top_p", "min_p", "seen", "logit_bias", "suppress")
    )
    assert tensors.num_logprobs == 0


def test_one_row_that_samples_brings_its_neutral_neighbours_along() -> None:
    tensors = sampling_tensors([row(), row(temperature=0.5, seed=9, top_k=4)], [3, 8], CPU)
    assert tensors.temperature is not None
    assert tensors.temperature.tolist() == [0.0, 0.5]
    assert tensors.seeds is not None
    assert tensors.seeds.tolist() == [0, 9]
    assert tensors.positions is not None
    assert tensors.positions.tolist() == [3, 8]
    assert tensors.top_k is not None
    assert tensors.top_k.tolist() == [0, 4]
    assert tensors.top_p is None


def test_penalties_see_prompt_and_output_and_go_on_counting() -> None:
    one = row(output=(2, 7), repetition_penalty=1.2)
    one.append(7)
    tensors = sampling_tensors([row(), one], [3, 6], CPU)
    assert tensors.seen is not None
    rows, ids, counts = (t.tolist() for t in tensors.seen)
    assert rows == [1, 1, 1]
    assert dict(zip(ids, counts, strict=True)) == {1: 0, 2: 1, 7: 2}


def test_suppression_ends_with_min_tokens() -> None:
    one = row(min_tokens=2, suppress_until_min=(5, 6))
    seen = []
    for _ in range(3):
        suppress = sampling_tensors([one], [3], CPU).suppress
        seen.append(None if suppress is None else suppress[1].tolist())
        one.append(1)
    assert seen == [[5, 6], [5, 6], None]


def test_bias_is_per_row() -> None:
    tensors = sampling_tensors([row(), row(logit_bias=((4, 2.5), (9, -1.0)))], [3, 3], CPU)
    assert tensors.logit_bias is not None
    assert [t.tolist() for t in tensors.logit_bias] == [[1, 1], [4, 9], [2.5, -1.0]]


def test_rows_get_only_the_logprobs_they_asked_for() -> None:
    rows = [row(), row(logprobs=0), row(logprobs=2)]
    assert sampling_tensors(rows, [1, 1, 1], CPU).num_logprobs == 2
    output = SampleOutput(
        torch.tensor([1, 2, 3]),
        torch.tensor([-0.5, -0.25, -0.125]),
        torch.tensor([[-0.1, -0.2]] * 3),
        torch.tensor([[8, 9]] * 3),
    )
    none, chosen, top = sampled_tokens(rows, output)
    assert (none.logprob, none.top) == (None, ())
    assert (chosen.logprob, chosen.top) == (-0.25, ())
    assert [token for token, _ in top.top] == [8, 9]


def test_metadata_of_a_mixed_step() -> None:
    meta = step_metadata(
        [
            SequencePlan(0, 17, None, (5, 3), 2, True),
            SequencePlan(1, 3, (9,), (8,), 1, True),
            SequencePlan(2, 0, (1, 2, 3), (4,), 0, False),
        ],
        CPU,
    )
    assert meta.num_decodes == 2
    assert meta.positions.tolist() == [17, 3, 0, 1, 2]
    assert meta.slots.tolist() == [3 * 16 + 1, 8 * 16 + 3, 64, 65, 66]
    assert meta.query_start.tolist() == [0, 1, 2, 5]
    assert meta.seq_lens.tolist() == [18, 4, 3]
    assert meta.block_tables.tolist() == [[5, 3], [8, 0], [4, 0]]
    assert meta.has_state.tolist() == [True, True, False]
    assert meta.state_slots.tolist() == [2, 1, 0]
    assert (meta.max_query_len, meta.max_seq_len) == (3, 18)
