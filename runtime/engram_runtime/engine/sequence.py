"""One sequence on the host: its tokens, what of it is computed, and what it holds in the cache."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum

from engram_runtime.cache.manager import Chain, Lease
from engram_runtime.cache.prefix_index import Match
from engram_runtime.executor.plan import RowSampling


class Status(Enum):
    RESTORING = "restoring"
    """A snapshot is being fetched; not yet known to the scheduler."""
    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Arriving:
    """A prefix that is still being copied to the device, into blocks that nobody else uses."""

    ticket: int
    """See `StepPlan.after`."""
    match: Match
    """All of `blocks` are the sequence's to go on writing in; `state` is to be kept as it is."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One of the `n` sequences of a request.

    `computed` counts tokens whose KV (and state) the executor has or will have once the steps already planned are
    done; `high_water` is the most it ever was, so that work done twice is counted as recomputed. `splits` are the
    positions at which a prefill chunk must end because something is captured there, ascending.
    """

    key: str
    """Unique in the engine."""
    tenant: str
    prompt_ids: array[int]
    sampling: RowSampling
    max_new_tokens: int
    """0 for a background sequence: nothing is sampled."""
    arrival: float
    priority: int = 0
    background: bool = False
    use_prefix: bool = True
    splits: tuple[int, ...] = ()
    spare_split: int | None = None
    """One of `splits` that is left out when the sequence starts from a state close below it: a step for a token or two
    costs as much as one for forty, and going back that far is as good from the state below."""
    leader: Sequence | None = None
    """The sibling whose prefill this one waits for."""

    status: Status = Status.WAITING
    output_ids: list[int] = field(default_factory=list)
    computed: int = 0
    high_water: int = 0
    in_flight: int = 0
    """Tokens that planned steps will sample, not yet returned."""
    block_ids: array[int] = field(default_factory=lambda: array("i"))
    state_slot: int | None = None
    """Holds the state after everything that is planned."""
    spare_slot: int | None = None
    """The other slot of a sequence whose decodes alternate between two, so that a step may run ahead of the host."""
    spare_is_before: bool = False
    """The spare slot holds the state before the last planned step."""
    row: int | None = None
    chain: Chain = field(init=False)
    lease: Lease | None = None
    """Keeps a restored prefix until admission."""
    arriving: Arriving | None = None
    """It may start from this at once; what it computes counts only when the prefix has turned out to be sound."""
    swap_handle: int | None = None
    admitted: float | None = None
    match: Match | None = None
    """What the first admission found."""
    prefix_tokens: int = 0
    """Prompt tokens taken over from the cache at the first admission."""
    prefilled_tokens: int = 0
    recomputed_tokens: int = 0

    def __post_init__(self) -> None:
        self.chain = Chain(self.tenant)

    @property
    def rank(self) -> tuple[bool, int, float, str]:
        """Order of service: foreground first, lower priority value first, then first come."""
        return (self.background, self.priority, self.arrival, self.key)

    @property
    def known(self) -> int:
        """Tokens whose ids the host knows."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def total(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids) + self.in_flight

    @property
    def done(self) -> int:
        """Tokens that no planned step has still to compute: others find them in the prefix index."""
        return min(self.computed, self.high_water)

    @property
    def remaining(self) -> int:
        """Tokens to forward before the next one can be sampled."""
        return self.total - self.computed

    @property
    def is_decode(self) -> bool:
        """The next step feeds just the token sampled last."""
        prompt, computed = len(self.prompt_ids), self.computed
        return computed >= prompt and prompt + len(self.output_ids) + self.in_flight - computed == 1

    @property
    def may_decode(self) -> bool:
        """The same, and another token may be planned beyond those in flight."""
        prompt, computed = len(self.prompt_ids), self.computed
        outputs = len(self.output_ids) + self.in_flight
        return computed >= prompt and prompt + outputs - computed == 1 and outputs < self.max_new_tokens

    def token_ids(self, first: int, last: int) -> array[int]:
        """Known tokens [first, last), array("I")."""
        length = len(self.prompt_ids)
        if last <= length:
            return self.prompt_ids[first:last]
        outputs = array("I", self.output_ids[max(0, first - length) : last - length])
        return self.prompt_ids[first:length] + outputs if first < length else outputs

    def next_split(self) -> int | None:
        """The next position a chunk has to end at, beyond what is computed."""
        return next((position for position in self.splits if position > self.computed), None)
