"""Which implementation runs, why, and what happens when the one asked for cannot."""

from __future__ import annotations

import dataclasses
import inspect
from typing import get_type_hints

import pytest
import torch

from engram_kernels import BackendUnavailable, Ops, OpSpec, Registry
from engram_kernels import ops as ops_module
from engram_kernels.backends import OP_NAMES, REFERENCES
from engram_kernels.spec import Place, cuda_capability


def test_every_op_of_the_bundle_has_a_reference():
    assert tuple(field.name for field in dataclasses.fields(Ops)) == OP_NAMES
    assert Registry.default().ops == OP_NAMES
    assert all("torch" in Registry.default().backends(op) for op in OP_NAMES)


@pytest.mark.parametrize("op", OP_NAMES)
def test_reference_has_the_signature_of_its_contract(op):
    implementation = Registry.default().resolve(op, "cpu", "float32", forced="torch")
    contract = getattr(ops_module, "".join(word.capitalize() for word in op.split("_")))
    expected = list(inspect.signature(contract.__call__).parameters.values())[1:]
    found = list(inspect.signature(implementation).parameters.values())
    assert [(p.name, p.default) for p in found] == [(p.name, p.default) for p in expected]
    assert implementation.__doc__


def test_on_a_cpu_every_op_falls_back_to_torch_and_says_why():
    choices = Registry.default().explain("cpu", torch.float32)
    assert [choice.op for choice in choices] == list(OP_NAMES)
    assert {choice.backend for choice in choices} == {"torch"}
    assert all(choice.why for choice in choices)


def test_explain_names_the_reason_a_better_backend_was_refused():
    registry = Registry(
        (
            OpSpec("linear", "torch", "engram_kernels.linear.reference:linear"),
            OpSpec("linear", "fast", "no.such:thing", probe=cuda_capability(9), priority=10),
        )
    )
    [choice] = registry.explain("cpu", "float32")
    assert choice.backend == "torch"
    assert "fast cannot run: needs a CUDA device, this is cpu" in choice.why


def test_explain_reports_overrides_as_forced():
    registry = Registry(REFERENCES).with_op("linear", "mine", lambda *a: None, priority=-1)
    by_op = {choice.op: choice for choice in registry.explain("cpu", "float32", {"linear": "mine"})}
    assert (by_op["linear"].backend, by_op["linear"].why) == ("mine", "forced")
    assert by_op["embedding"].why == "only backend"


def test_a_part_with_a_backend_of_its_own_is_what_a_fused_op_is_made_of():
    calls = []

    def mine(x, weight, bias=None):
        calls.append(x.shape)
        return x @ weight.t()

    registry = Registry(REFERENCES).with_op("linear", "mine", mine, priority=-1)
    ops = Ops.bind("cpu", "float32", {"linear": "mine"}, registry)
    x, weight = torch.randn(3, 8), torch.randn(10, 8)
    torch.testing.assert_close(ops.gated_linear(x, weight), Ops.bind("cpu", "float32").gated_linear(x, weight))
    assert calls == [(3, 8)]
    why = {choice.op: choice for choice in registry.explain("cpu", "float32", {"linear": "mine"})}["gated_linear"]
    assert (why.backend, why.why) == ("composed", "of its parts, because of linear=mine")
    forced = {"linear": "mine", "gated_linear": "torch"}
    Ops.bind("cpu", "float32", forced, registry).gated_linear(x, weight)
    assert len(calls) == 1


def test_highest_priority_that_can_run_wins():
    low, high, broken = (lambda: "low"), (lambda: "high"), (lambda: "broken")
    registry = (
        Registry.default()
        .with_op("silu_and_mul", "low", low, priority=5)
        .with_op("silu_and_mul", "high", high, priority=7)
        .with_op("silu_and_mul", "broken", broken, probe=lambda place: "it is broken", priority=9)
    )
    assert registry.backends("silu_and_mul")[:3] == ("broken", "high", "low")
    assert registry.resolve("silu_and_mul", "cpu", torch.float32) is high
    assert registry.resolve("silu_and_mul", "cpu", torch.float32, forced="low") is low


def test_a_forced_backend_that_cannot_run_is_an_error_with_the_reason():
    registry = Registry.default().with_op("linear", "broken", lambda: None, probe=lambda place: f"no {place.dtype}")
    with pytest.raises(BackendUnavailable, match="linear=broken cannot run: no bfloat16"):
        registry.resolve("linear", "cpu", torch.bfloat16, forced="broken")
    with pytest.raises(BackendUnavailable, match="linear=broken cannot run"):
        Ops.bind("cpu", torch.bfloat16, {"linear": "broken"}, registry)
    with pytest.raises(BackendUnavailable, match="linear=broken cannot run"):
        registry.explain("cpu", torch.bfloat16, {"linear": "broken"})


def test_a_forced_backend_that_does_not_exist_names_the_ones_that_do():
    with pytest.raises(BackendUnavailable, match=r"no such backend; linear has: .*torch"):
        Ops.bind("cpu", torch.float32, {"linear": "cutlass"})


def test_an_override_of_an_unknown_op_is_an_error():
    with pytest.raises(ValueError, match="op 'attention' does not exist; known ops: linear, "):
        Ops.bind("cpu", torch.float32, {"attention": "torch"})


def test_no_backend_at_all_lists_every_reason():
    registry = Registry(
        (OpSpec("linear", "a", "x:y", probe=lambda p: "why a"), OpSpec("linear", "b", "x:y", probe=lambda p: "why b"))
    )
    with pytest.raises(BackendUnavailable, match="linear: a cannot run: why a; b cannot run: why b"):
        registry.resolve("linear", "cpu", "float32")


def test_a_target_that_cannot_be_imported_is_reported_as_such():
    registry = Registry((OpSpec("linear", "gone", "engram_kernels.no_such_module:linear"),))
    with pytest.raises(BackendUnavailable, match=r"linear=gone: cannot load engram_kernels\.no_such_module:linear"):
        registry.resolve("linear", "cpu", "float32")


def test_with_op_leaves_the_default_registry_alone_and_serves_the_bundle():
    calls = []

    def counting(ids, weight):
        calls.append(len(ids))
        return weight[ids]

    ops = Ops.bind("cpu", torch.float32, registry=Registry.default().with_op("embedding", "counting", counting))
    ops.embedding(torch.tensor([1, 0]), torch.eye(2))
    assert calls == [2]
    assert "counting" not in Registry.default().backends("embedding")
    forced = Ops.bind(
        "cpu", torch.float32, {"embedding": "torch"}, Registry.default().with_op("embedding", "counting", counting)
    )
    forced.embedding(torch.tensor([1, 0]), torch.eye(2))
    assert calls == [2]


def test_the_same_backend_cannot_be_registered_twice():
    with pytest.raises(ValueError, match="backend 'torch' of op 'linear' is already registered"):
        Registry.default().with_op("linear", "torch", lambda: None)


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (Place("cpu", "bfloat16"), "needs a CUDA device"),
        (Place("cuda", "bfloat16", (8, 0)), "needs compute capability 9.0, this is 8.0"),
        (Place("cuda", "float64", (9, 0)), "needs dtype bfloat16 or float16, this is float64"),
    ],
)
def test_cuda_probe_gives_a_reason(place, reason):
    assert reason in (cuda_capability(9)(place) or "")


def test_places_are_described_from_torch_objects_and_from_names():
    assert Place.of(torch.device("cpu"), torch.bfloat16) == Place.of("cpu", "bfloat16") == Place("cpu", "bfloat16")


def test_bundle_is_frozen_and_fully_typed():
    ops = Ops.bind("cpu", torch.float32)
    with pytest.raises(dataclasses.FrozenInstanceError):
        ops.linear = None
    names = {"torch": torch, "Tensor": torch.Tensor}
    assert set(get_type_hints(Ops, localns=names)) == set(OP_NAMES)
