"""Ops that tests register: one counts what the model really computes, one makes it say a given text.

Both go through the public registry, so the rest of the engine is the real one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch

from engram_kernels import Registry
from engram_kernels.metadata import SampleOutput, SamplingTensors


@dataclass
class Counted:
    """`registry` has an embedding op that adds the rows it is given to `rows`: each computed token passes once."""

    rows: int = 0
    script: deque[int] = field(default_factory=deque)
    """Tokens to be "sampled" next, whatever the logits say; one sequence at a time."""
    registry: Registry = field(init=False)

    def __post_init__(self) -> None:
        embed = Registry.default().resolve("embedding", "cpu", "float32")
        draw = Registry.default().resolve("sample", "cpu", "float32")

        def counting(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            self.rows += ids.shape[0]
            embedded: torch.Tensor = embed(ids, weight)
            return embedded

        def scripted(logits: torch.Tensor, how: SamplingTensors) -> SampleOutput:
            output: SampleOutput = draw(logits, how)
            if not self.script:
                return output
            assert logits.shape[0] == 1, "a script is for one sequence at a time"
            ids = torch.tensor([self.script.popleft()])
            return replace(output, token_ids=ids, logprobs=logits.log_softmax(-1)[0, ids])

        registry = Registry.default().with_op("embedding", "counting", counting)
        self.registry = registry.with_op("sample", "scripted", scripted)

    def say(self, ids: Iterable[int]) -> None:
        """The next sampled tokens are these."""
        assert not self.script, "the script before was not finished"
        self.script.extend(ids)
