"""The election, step by step on a clock of the test's: who leads, when it is over, and that one look decides it."""

from __future__ import annotations

import pytest

from engram_operator.kube.kinds import LEASES
from engram_operator.kube.lease import Election, LeaseLost
from tests.support.fake_kube import FakeKube


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def candidate(kube: FakeKube, identity: str, clock: Clock) -> Election:
    return Election(kube, "engram", "ml", identity, 15.0, 10.0, 2.0, clock)


def holder(kube: FakeKube) -> str:
    lease = kube.find(LEASES, "ml", "engram")
    assert lease is not None
    return str(lease["spec"]["holderIdentity"])


async def test_the_first_leads_and_renews() -> None:
    kube, clock = FakeKube(), Clock()
    first, second = candidate(kube, "a", clock), candidate(kube, "b", clock)
    assert await first._try()
    assert not await second._try()
    for _ in range(20):
        clock.now += 2
        assert await first._try()
        assert not await second._try()
    assert first.leading
    assert not second.leading
    assert holder(kube) == "a"


async def test_a_lease_that_does_not_change_is_over_after_its_duration_by_the_watchers_own_clock() -> None:
    kube, clock = FakeKube(), Clock()
    assert await candidate(kube, "dead", clock)._try()
    clock.now += 1000  # how old the lease says it is does not matter
    second = candidate(kube, "b", clock)
    assert not await second._try()
    clock.now += 14.9
    assert not await second._try()
    clock.now += 0.1
    assert await second._try()
    lease = kube.find(LEASES, "ml", "engram")
    assert lease is not None
    assert lease["spec"]["leaseTransitions"] == 1


async def test_leading_ends_before_another_can_begin() -> None:
    kube, clock = FakeKube(), Clock()
    first = candidate(kube, "a", clock)
    assert await first._try()
    clock.now += 9.9
    assert first.leading
    clock.now += 0.2
    assert not first.leading


async def test_whose_lease_was_taken_knows_at_the_next_look() -> None:
    kube, clock = FakeKube(), Clock()
    first = candidate(kube, "a", clock)
    assert await first._try()
    kube.edit(LEASES, "ml", "engram", {"spec": {"holderIdentity": "b"}})
    clock.now += 2
    assert not await first._try()  # a conflict: look again
    with pytest.raises(LeaseLost, match="held by b"):
        await first._try()
    assert holder(kube) == "b"


async def test_two_that_see_an_expired_lease_do_not_both_get_it() -> None:
    kube, clock = FakeKube(), Clock()
    assert await candidate(kube, "dead", clock)._try()
    first, second = candidate(kube, "a", clock), candidate(kube, "b", clock)
    assert not await first._try()
    assert not await second._try()
    clock.now += 15
    won: list[bool] = []
    kube.fail(200, "patch", LEASES, action=lambda: kube.edit(LEASES, "ml", "engram", {"spec": {"holderIdentity": "b"}}))
    won.append(await first._try())
    assert won == [False]
    assert holder(kube) == "b"


async def test_an_answer_that_got_lost_does_not_lose_the_lease() -> None:
    kube, clock = FakeKube(), Clock()
    first = candidate(kube, "a", clock)
    assert await first._try()
    kube.fail(0, "patch", LEASES, after=True)
    clock.now += 2
    assert not await first._try()
    clock.now += 2
    assert await first._try()
    assert first.leading


async def test_a_restarted_container_gets_its_own_lease_at_once_and_a_released_one_is_free() -> None:
    kube, clock = FakeKube(), Clock()
    assert await candidate(kube, "a", clock)._try()
    again = candidate(kube, "a", clock)
    assert await again._try()
    await again.release()
    assert holder(kube) == ""
    assert not again.leading
    assert await candidate(kube, "b", clock)._try()


async def test_a_deleted_lease_is_made_again() -> None:
    kube, clock = FakeKube(), Clock()
    first = candidate(kube, "a", clock)
    assert await first._try()
    kube.remove(LEASES, "ml", "engram")
    assert not await first._try()
    assert await first._try()
    assert holder(kube) == "a"


async def test_who_does_not_lead_writes_nothing() -> None:
    kube, clock = FakeKube(), Clock()
    first = candidate(FakeKube(), "a", clock)
    assert await first._try()
    kube.may_write = lambda: first.leading
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x", "namespace": "ml"}, "spec": {}}
    await kube.apply(service)
    clock.now += 10
    with pytest.raises(Exception, match="nothing may be written"):
        await kube.apply(service)
    assert len(kube.writes()) == 1
