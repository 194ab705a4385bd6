"""Tensors averaged in encoded form by three ranks over Gloo, and by two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.jobs import on_ranks, run

JOB = Path(__file__).parent / "jobs" / "codec_exchange_job.py"

EXACT = {"topk:density=1": 1e-6, "fp16": 1e-3, "bf16": 1e-2, "int8:block=64": 0.02}
EXACT |= {"fp8:block=64": 0.06, "fp8:form=e5m2": 0.12, "int4": 0.3, "thc": 0.08}
"""Specs whose average is that of the tensors, with the relative error that they may have."""

CONSERVING = (
    *("onebit+feedback", "signsgd+feedback", "doublesqueeze", "topk:density=0.1+feedback"),
    *("randomk:density=0.1+feedback", "powersgd:rank=1+feedback", "qsgd+feedback"),
    *("topk:density=0.1+doublesqueeze", "int8:block=64+doublesqueeze", "ternary+feedback"),
    *("topk:density=0.1,chunk=100,bits=2+feedback", "int4+feedback", "thc:block=64+feedback"),
)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    output = tmp_path_factory.mktemp("codecs") / "report.json"
    done = run(on_ranks(JOB, str(output), ranks=3), cwd=output.parent, timeout=280)
    assert done.status == 0, done.stderr[-4000:]
    value: dict[str, Any] = json.loads(output.read_text())
    return value


@pytest.mark.parametrize("ranks", ["three", "two"])
@pytest.mark.long
def test_all_ranks_have_the_same_average_to_the_last_bit(
    report: dict[str, Any], ranks: str
) -> None:
    assert [spec for spec, found in report[ranks].items() if not found["identical"]] == []


@pytest.mark.parametrize("ranks", ["three", "two"])
def test_one_ranks_nan_reaches_all_and_leaves_no_trace(report: dict[str, Any], ranks: str) -> None:
    for spec, found in report[ranks].items():
        assert found["nan_seen"], spec
        assert found["finite_after"], spec


@pytest.mark.parametrize("ranks", ["three", "two"])
def test_element_types_hold(report: dict[str, Any], ranks: str) -> None:
    for spec, found in report[ranks].items():
        assert found["type_torch.float64"], spec
        assert found["type_torch.bfloat16"], spec


@pytest.mark.parametrize("ranks", ["three", "two"])
@pytest.mark.parametrize("spec", EXACT)
def test_averages_are_as_close_as_the_codec(report: dict[str, Any], ranks: str, spec: str) -> None:
    assert max(report[ranks][spec]["errors"]) < EXACT[spec]


@pytest.mark.parametrize("ranks", ["three", "two"])
@pytest.mark.parametrize("spec", CONSERVING)
def test_what_was_sent_and_all_residuals_are_what_was_due(
    report: dict[str, Any], ranks: str, spec: str
) -> None:
    assert report[ranks][spec]["lost"] < 1e-4


def test_signs_are_decided_by_the_majority(report: dict[str, Any]) -> None:
    assert report["votes"]


def test_each_codec_takes_the_exchange_that_suits_it(report: dict[str, Any]) -> None:
    forms = {spec: found["form"] for spec, found in report["three"].items()}
    assert forms["fp16"] == forms["randomk:density=0.1"] == "AllReduceForm"
    assert forms["topk:density=0.1"] == forms["dgc:density=0.05"] == "AllGatherForm"
    assert forms["onebit"] == forms["int8:block=64"] == "AllToAllForm"
    assert forms["fp8:block=64"] == forms["int4"] == "AllToAllForm"
    assert forms["thc"] == forms["thc:block=64+feedback"] == "SharedRangeForm"
    assert report["two"]["int8:block=64"]["form"] == "AllGatherForm"
    assert report["two"]["doublesqueeze"]["form"] == "AllToAllForm"


def test_the_sockets_saw_what_the_formula_says(report: dict[str, Any]) -> None:
    for spec, wire in report["wire"].items():
        # Gloo adds a header to each message and closes barriers of its own.
        assert abs(wire["sockets"] - wire["formula"]) < 0.06 * wire["formula"] + 4096, spec
