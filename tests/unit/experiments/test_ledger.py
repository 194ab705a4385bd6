"""The ledger of predictions: `experiments/ledger.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddltrace.experiments import ledger
from ddltrace.tracer.errors import UsageError

ANSWER = {
    "question": {"strategy": "wfbp"},
    "step_us": 900.0,
    "low_us": 800.0,
    "high_us": 1000.0,
    "speedup": 1.1,
    "refused": None,
}
PREDICTION = {"kind": "prediction", "baseline_us": 1000.0, "trace": "t", "answer": ANSWER}


def test_what_is_written_is_read_and_judged(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    first, second = ledger.append(path, [PREDICTION, PREDICTION])
    assert first != second  # the second line holds the hash of the first
    (measured,) = ledger.append(
        path,
        [ledger.measurement(PREDICTION, first, [880.0, 920.0, 960.0], [1000.0, 1010.0, 990.0])],
    )
    lines = ledger.read(path)
    assert [line["sha256"] for line in lines] == [first, second, measured]
    proven, open_ = ledger.pairs(lines)
    assert open_.measurement is None
    assert proven.measurement is not None
    assert proven.measurement["error"] == pytest.approx(900 / 920 - 1)
    assert proven.measurement["noise"] == pytest.approx(40 / 920)
    assert proven.measurement["covered"] is True
    assert proven.measurement["sign_right"] is True
    said = "\n".join(ledger.summary([proven, open_]))
    assert "predicted 0.9 ms (0.8 to 1.0)" in said
    assert "not measured" in said
    assert "1 measured" in said
    assert "Without changes" not in said


def test_a_machine_that_was_faster_in_the_rounds_is_told(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    (sha256,) = ledger.append(path, [PREDICTION])
    ledger.append(
        path, [ledger.measurement(PREDICTION, sha256, [920.0] * 3, [800.0, 810.0, 790.0])]
    )
    (pair,) = ledger.pairs(ledger.read(path))
    assert ledger.speedup_error(pair) == pytest.approx((900 / 1000) / (920 / 800) - 1)
    told = [line for line in ledger.summary([pair]) if line.startswith("Without changes")]
    assert told == [
        "Without changes, a step took 1.0 ms in t and 0.8 ms in the rounds: errors include this "
        "difference"
    ]


def test_a_difference_within_the_noise_has_no_sign() -> None:
    line = ledger.measurement(PREDICTION, "x", [1000.0, 1100.0], [1000.0, 1100.0])
    assert line["sign_right"] is None
    assert line["covered"] is False


@pytest.mark.parametrize(
    "harm", ["changed", "removed", "cut", "foreign", "binary", "short", "kind"]
)
def test_a_line_that_was_changed_is_found(tmp_path: Path, harm: str) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger.append(path, [PREDICTION, PREDICTION, PREDICTION])
    lines = path.read_text().splitlines()
    if harm == "changed":
        lines[0] = lines[0].replace("900.0", "901.0")
    elif harm == "removed":
        del lines[1]
    elif harm == "cut":
        lines[-1] = lines[-1][:-5]
    elif harm == "foreign":
        lines = [json.dumps({"hello": 1})]
    elif harm in {"short", "kind"}:
        line = json.loads(lines[-1])
        del line["answer" if harm == "short" else "kind"]
        lines[-1] = json.dumps(line)
    path.write_bytes(b"\xff\xfe" if harm == "binary" else "\n".join(lines).encode() + b"\n")
    with pytest.raises(UsageError, match=r"ledger\.jsonl"):
        ledger.read(path)
    with pytest.raises(UsageError):
        ledger.append(path, [PREDICTION])
