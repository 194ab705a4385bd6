"""The ledger of predictions: written down before the runs that prove or refute them.

A ledger is a file of JSON Lines. Each line has ``schema``, ``kind``, ``time`` (UTC) and
``previous``, the SHA-256 of the line before, without its newline; the first line has null. So a
line that was changed or taken out later is found. A ``prediction`` has the settings of the
experiment, the trace it was made from and the answer of ``ddltrace whatif``; a ``measurement``
names the line of its prediction by its SHA-256 and has the time per step of each run.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import numpy as np

from ddltrace.analyzer.whatif.questions import Question, describe
from ddltrace.tracer.errors import DdltraceError, UsageError

SCHEMA: Final = "ddltrace.ledger/1"


@dataclass(frozen=True)
class Pair:
    """A prediction and what was measured of it.

    Attributes:
        prediction: Its line.
        measurement: The line of the measurement; None if the runs were not made or failed.
        number: The line's number, from 1.
    """

    prediction: dict[str, Any]
    measurement: dict[str, Any] | None
    number: int


class _Answer(msgspec.Struct):
    question: Question
    step_us: float | None
    low_us: float | None
    high_us: float | None
    refused: str | None


_Time = Annotated[float, msgspec.Meta(gt=0)]


class _Prediction(msgspec.Struct, tag_field="kind", tag="prediction"):
    baseline_us: _Time
    trace: str
    answer: _Answer


class _Measurement(msgspec.Struct, tag_field="kind", tag="measurement"):
    prediction: str
    baseline_runs_us: Annotated[list[_Time], msgspec.Meta(min_length=1)]
    measured_us: _Time
    error: float
    noise: float
    covered: bool
    sign_right: bool | None


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a ledger; each also has ``sha256``, its own.

    Raises:
        UsageError: It is not a ledger, a line was changed, or one is missing.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    found: list[dict[str, Any]] = []
    previous = None
    for number, line in enumerate(text.splitlines(), 1):
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{path}:{number} is cut off or not JSON: {error}") from error
        if not isinstance(entry, dict) or entry.get("schema") != SCHEMA:
            raise UsageError(f"{path}:{number} is not a line of {SCHEMA}")
        if entry.get("previous") != previous:
            raise UsageError(f"{path}:{number} does not follow the line before it: one was changed")
        try:
            msgspec.convert(entry, _Prediction | _Measurement)
        except msgspec.ValidationError as error:
            raise UsageError(f"{path}:{number} cannot be read: {error}") from error
        previous = hashlib.sha256(line.encode()).hexdigest()
        found.append({**entry, "sha256": previous})
    return found


def append(path: Path, entries: Sequence[dict[str, Any]]) -> list[str]:
    """Appends lines and waits until they are on the disk.

    Args:
        path: The ledger; it is created if it is missing.
        entries: Contents of the lines, with their ``kind``.

    Returns:
        The SHA-256 of each line.

    Raises:
        UsageError: The file is not a ledger.
        DdltraceError: It cannot be written.
    """
    lines = read(path) if path.exists() else []
    previous = lines[-1]["sha256"] if lines else None
    hashes = []
    try:
        with path.open("a", encoding="utf-8") as file:
            for entry in entries:
                now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                head = {"schema": SCHEMA, "time": now, "previous": previous}
                line = json.dumps({**head, **entry}, allow_nan=False)
                file.write(line + "\n")
                previous = hashlib.sha256(line.encode()).hexdigest()
                hashes.append(previous)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise DdltraceError(f"{path} cannot be written: {error}") from error
    return hashes


def pairs(lines: Sequence[dict[str, Any]]) -> list[Pair]:
    """The predictions of a ledger with what was measured, in the order of the predictions."""
    measured = {line["prediction"]: line for line in lines if line["kind"] == "measurement"}
    return [
        Pair(line, measured.get(line["sha256"]), number)
        for number, line in enumerate(lines, 1)
        if line["kind"] == "prediction"
    ]


def measurement(
    prediction: dict[str, Any], sha256: str, runs_us: Sequence[float], baseline_us: Sequence[float]
) -> dict[str, Any]:
    """The line of what was measured of a prediction.

    Args:
        prediction: Its line.
        sha256: The SHA-256 of its line.
        runs_us: Time per step of each run.
        baseline_us: The same of the baseline, in the same rounds.

    Returns:
        The line: ``error`` is predicted / measured - 1; ``noise`` is the largest difference of a
        run from the median of its row, as a share, over both rows; ``covered`` whether the interval
        contains the median; ``sign_right`` whether faster or slower than the baseline was right,
        null where the measured difference is within the noise, or the baseline of the prediction
        ran on another network.
    """
    median, before = float(np.median(runs_us)), float(np.median(baseline_us))
    noise = max(_spread(runs_us), _spread(baseline_us))
    change = median / before - 1
    answer = prediction["answer"]
    predicted_change = answer["step_us"] / prediction["baseline_us"] - 1
    undecided = abs(change) <= noise or not _same_network(prediction)
    return {
        "kind": "measurement",
        "prediction": sha256,
        "runs_us": list(runs_us),
        "baseline_runs_us": list(baseline_us),
        "measured_us": median,
        "error": answer["step_us"] / median - 1,
        "noise": noise,
        "covered": answer["low_us"] <= median <= answer["high_us"],
        "sign_right": None if undecided else (change < 0) == (predicted_change < 0),
    }


def _spread(runs_us: Sequence[float]) -> float:
    """The largest difference of a run from the median of all, as a share."""
    return float(np.abs(np.array(runs_us) / np.median(runs_us) - 1).max())


def _same_network(prediction: dict[str, Any]) -> bool:
    """Whether the runs are on the network of the trace: another one is part of the question."""
    return "hosts" not in prediction["answer"]["question"]


def speedup_error(pair: Pair) -> float | None:
    """The error of the predicted ratio of the step to that of the baseline, as a share.

    Unlike ``error`` it leaves out by how much the whole machine was slower or faster when the trace
    was recorded: the measured ratio is of runs in the same rounds.

    Returns:
        None if it was not measured, or the baseline of the prediction ran on another network.
    """
    prediction, measured = pair.prediction, pair.measurement
    if measured is None or not _same_network(prediction):
        return None
    predicted = prediction["answer"]["step_us"] / prediction["baseline_us"]
    ratio = measured["measured_us"] / np.median(measured["baseline_runs_us"])
    return float(predicted / ratio - 1)


def summary(found: Sequence[Pair]) -> list[str]:
    """A line for each prediction, and one over all that were measured."""
    lines = []
    errors, ratios, covered = [], [], []
    for pair in found:
        answer = pair.prediction["answer"]
        what = describe(msgspec.convert(answer["question"], Question))
        if answer["refused"] is not None:
            lines.append(f"{what}: not predicted: {answer['refused']}")
            continue
        text = (
            f"{what}: predicted {answer['step_us'] / 1e3:.1f} ms "
            f"({answer['low_us'] / 1e3:.1f} to {answer['high_us'] / 1e3:.1f})"
        )
        measured = pair.measurement
        if measured is None:
            lines.append(f"{text}; not measured")
            continue
        errors.append(abs(measured["error"]))
        relative = speedup_error(pair)
        if relative is not None:
            ratios.append(abs(relative))
        covered.append(measured["covered"])
        lines.append(
            f"{text}; measured {measured['measured_us'] / 1e3:.1f} ms, error "
            f"{measured['error']:+.1%}, noise {measured['noise']:.1%}"
        )
    lines += _drifts(found)
    if errors:
        lines.append(
            f"{len(errors)} measured: median error {np.median(errors):.1%}, 90th percentile "
            f"{np.quantile(errors, 0.9):.1%}, {sum(covered)} within their intervals"
        )
    if ratios:
        lines.append(
            f"The ratio to the job without changes: median error {np.median(ratios):.1%}, 90th "
            f"percentile {np.quantile(ratios, 0.9):.1%}"
        )
    return lines


def _drifts(found: Sequence[Pair]) -> list[str]:
    """A line for each trace whose job took another time in the rounds, beyond their noise."""
    lines = {}
    for pair in found:
        prediction, measured = pair.prediction, pair.measurement
        if measured is None or not _same_network(prediction):
            continue
        runs, then = measured["baseline_runs_us"], prediction["baseline_us"]
        now = float(np.median(runs))
        if len(runs) > 1 and abs(then / now - 1) > _spread(runs):
            lines[prediction["trace"]] = (
                f"Without changes, a step took {then / 1e3:.1f} ms in {prediction['trace']} and "
                f"{now / 1e3:.1f} ms in the rounds: errors include this difference"
            )
    return list(lines.values())
