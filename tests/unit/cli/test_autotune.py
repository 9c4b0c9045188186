"""`engram autotune`: what a model has to tune, what is refused, what a run says and how it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engram_kernels.autotune import store
from engram_kernels.autotune.ahead import Workers
from engram_kernels.autotune.attention import Heads
from engram_kernels.autotune.driver import Card, Session, Summary
from engram_kernels.autotune.linear import Layer
from engram_kernels.autotune.search import DeviceLost
from engram_runtime.cli import autotuning
from engram_runtime.cli.autotuning import attention_shapes, expert_shapes, layer_shapes, skeleton, subjects
from engram_runtime.cli.main import main
from tests.support.tiny import make_tiny, tiny_config

HALF = torch.float16


def described(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A checkpoint without its weights, which nobody reads here."""
    config = tiny_config(family)
    config.dtype = dtype
    config.save_pretrained(folder)
    return folder


def test_every_kind_of_layer_once(tmp_path: Path) -> None:
    model = skeleton(make_tiny("qwen3", tmp_path))
    shapes = layer_shapes(model)
    assert len(shapes) == len(set(shapes))
    vocabulary = (*model.lm_head.weight.shape, False, True)
    assert vocabulary in shapes
    assert sum(gated for _, _, gated, _ in shapes) == 1
    assert all(parameter.device.type == "meta" for parameter in model.parameters())


def test_what_cannot_be_done_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not torch.cuda.is_available():
        assert main(["autotune", "--model", str(tmp_path)]) == 1
        assert "needs a GPU" in capsys.readouterr().err
    for rows in ("3", "128", "many"):
        with pytest.raises(SystemExit):
            main(["autotune", "--model", str(tmp_path), "--rows", rows])


def test_what_a_model_has_to_tune(tmp_path: Path) -> None:
    granite = skeleton(described("granite", tmp_path / "granite"))
    assert expert_shapes(granite) == [(4, 2, 64, 128, 64)]
    assert attention_shapes(granite, HALF) == [Heads(4, 2, 16, HALF)]
    qwen = skeleton(described("qwen3", tmp_path / "qwen3"))
    assert expert_shapes(qwen) == []
    assert attention_shapes(qwen, HALF) == [Heads(4, 2, 32, HALF, rotated=32, normed=True)]
    work = subjects(granite, HALF, ("experts", "attention", "linear"), (1, 16), (128, 512))
    assert [(subject.op, subject.sizes) for subject in work[:4]] == [
        ("experts", (1, 16, 128, 512)),
        ("paged_attention.split_kv", (1, 16, 128)),
        ("paged_attention.split_kv", (1,)),
        ("paged_attention.prefill", (512,)),
    ]
    linear = {isinstance(subject, Layer) and subject.wide: subject.sizes for subject in work[4:]}
    assert linear == {True: (1, 16), False: (1, 16, *range(128, 513, 64))}  # the vocabulary's are decodes
    assert [subject.key(16) for subject in work[:1]] == [
        "tokens=16,top=2,experts=4,width=64,inner=128,shared=64,dtype=float16"
    ]
    keys = [(subject.op, subject.key(size)) for subject in work for size in subject.sizes]
    assert len(keys) == len(set(keys))


def options(folder: Path, *words: str) -> list[str]:
    return ["autotune", "--model", str(folder), "--output", str(folder / "tuning"), *words]


def test_a_dry_run_counts_and_needs_no_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    folder = described("granite", tmp_path, torch.bfloat16)
    assert main(options(folder, "--dry-run", "--rows", "1,8")) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "no CUDA device here: candidates as on an H200"
    counts = {line.partition(":")[0]: line for line in said[1:]}
    assert set(counts) == {
        "paged_attention.split_kv", "paged_attention.prefill", "experts", "linear", "gated_linear", "all"
    }  # fmt: skip
    assert counts["experts"].startswith("experts: 9 keys, ")
    total = sum(int(line.split(" keys, ")[1].split()[0]) for op, line in counts.items() if op != "all")
    assert counts["all"] == f"all: {total} candidates"
    assert not (tmp_path / "tuning").exists()


@pytest.fixture
def imaginary(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose work is done on the CPU by nobody: the search is told times instead of running kernels."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "NVIDIA Imaginary 9")
    monkeypatch.setattr(autotuning.Card, "of", lambda device: Card(80, (8, 0)))


@pytest.mark.usefixtures("imaginary")
def test_a_run_tells_what_it_did_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = described("granite", tmp_path, torch.bfloat16)
    sessions: list[Session] = []

    def tune(work: Any, session: Session) -> Summary:
        sessions.append(session)
        store.merge(session.folder, session.about, {"experts": {work[0].key(1): {"kind": "direct"}}})
        return Summary(found=1, left=2)

    monkeypatch.setattr(autotuning, "tune", tune)
    words = ("--ops", "experts", "--rows", "1,2,4", "--tokens", "128", "--workers", "0")
    assert main(options(folder, *words, "--seconds", "77", "--force")) == 0
    said = capsys.readouterr().out
    assert "NVIDIA Imaginary 9, Triton" in said
    assert "keys: 1 found, 0 in the table before, 2 left" in said
    assert "goes on from here" in said
    (session,) = sessions
    assert (session.seconds, session.force, session.ahead) == (77.0, True, None)
    assert session.card == Card(80, (8, 0))
    assert session.about["gpu"] == "NVIDIA Imaginary 9"
    assert main(options(folder, *words, "--dry-run")) == 0
    assert "experts: 3 keys" in capsys.readouterr().out
    assert main(options(folder, *words, "--dry-run", "--force")) == 0
    assert "experts: 4 keys" in capsys.readouterr().out


@pytest.mark.usefixtures("imaginary")
@pytest.mark.parametrize(
    ("outcome", "says"),
    [
        (Summary(failed=1), ""),
        (DeviceLost("nothing runs on the device any more after Small(...)"), "after Small(...); what was found before"),
        (PermissionError(13, "Permission denied"), "cannot be written: Permission denied"),
    ],
    ids=["failed", "lost", "unwritable"],
)
def test_a_run_that_did_not_work_ends_with_1(
    outcome: Any, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def tune(work: Any, session: Session) -> Summary:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(autotuning, "tune", tune)
    assert main(options(described("granite", tmp_path, torch.bfloat16), "--workers", "0")) == 1
    assert says in capsys.readouterr().err


def test_a_model_in_fp32_has_nothing_to_tune(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = described("granite", tmp_path)
    assert main(options(folder, "--dry-run", "--dtype", "float32")) == 1
    assert "served in float32" in capsys.readouterr().err


def test_processes_are_started_only_when_asked_for() -> None:
    with autotuning._workers(0, torch.device("cpu")) as nobody:
        assert nobody is None
    with autotuning._workers(1, torch.device("cpu")) as somebody:
        assert isinstance(somebody, Workers)


@pytest.mark.parametrize("word", [("--tokens", "64"), ("--tokens", "300"), ("--ops", "attention,sampling")], ids=str)
def test_other_sizes_and_ops_are_refused(word: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(options(tmp_path, *word))


@pytest.mark.parametrize(("option", "value"), [("--seconds", "nan"), ("--seconds", "-5"), ("--workers", "-1")])
def test_limits_that_are_none_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(options(tmp_path, f"{option}={value}"))
    assert refused.value.code == 2
    assert f"argument {option}: " in capsys.readouterr().err
