"""``ddltrace experiment verify``: predicts strategies from a trace, then runs them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ddltrace.analyzer.formatting.quantities import parse_bandwidth
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.analyzer.whatif.calibration import FILE
from ddltrace.analyzer.whatif.questions import Question, recorded_us, what_if
from ddltrace.experiments import ledger
from ddltrace.experiments.calibration import calibrate
from ddltrace.experiments.harness.results import Results
from ddltrace.experiments.harness.runner import run_experiment
from ddltrace.experiments.harness.settings import Settings
from ddltrace.experiments.strategy.spec import BASELINE, cycle_steps_of
from ddltrace.tracer.errors import DdltraceError, TraceError

_ROUNDS: Final = 5


def verify(
    settings: Settings, specs: Sequence[str], trace: Path | None, path: Path, directory: Path
) -> list[ledger.Pair]:
    """Predicts the time per step of strategies, writes that down, and runs them.

    Args:
        settings: Of the runs; its strategies are not used.
        specs: The strategies.
        trace: The trace to predict from, of the same job; by default a run without changes is made
            first, on the same network, and messages are calibrated there.
        path: The ledger.
        directory: An empty directory for the runs.

    Returns:
        The predictions of this call, with what was measured.

    Raises:
        DdltraceError: The job cannot be run or traced, or the ledger cannot be written.
    """
    if path.exists():
        ledger.read(path)
    # On another network than that of a given trace, this is part of the question.
    network: dict[str, Any] = {}
    if trace is None:
        trace = _baseline(settings, directory / "before")
        found = calibrate(
            settings.ranks or 2,
            _ROUNDS,
            settings.timeout_s,
            hosts=settings.hosts,
            bandwidth=settings.bandwidth,
            strategies=specs,
        )
        (trace / FILE).write_text(json.dumps(found), encoding="utf-8")
    else:
        network["hosts"] = settings.hosts
        if settings.bandwidth is not None:
            network["bandwidth"] = parse_bandwidth(settings.bandwidth)
    asked = what_if(open_trace(trace))
    recorded = settings.recorded()
    entries: list[dict[str, Any]] = [
        {
            "kind": "prediction",
            "settings": recorded,
            "trace": str(trace),
            "baseline_us": asked.baseline_us,
            "self_replay_error": asked.self_replay_error,
            "answer": asked.ask(Question(strategy=spec, **network)).to_json(),
        }
        for spec in specs
    ]
    hashes = ledger.append(path, entries)
    runs = directory / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    rows = list(dict.fromkeys([BASELINE, *specs]))
    results = run_experiment(replace(settings, strategies=rows), runs)
    before = _times(results, runs, BASELINE)
    measured = []
    for spec, entry, sha256 in zip(specs, entries, hashes, strict=True):
        times = _times(results, runs, spec) if entry["answer"]["refused"] is None else []
        if times and before:
            measured.append(ledger.measurement(entry, sha256, times, before))
    ledger.append(path, measured)
    return [pair for pair in ledger.pairs(ledger.read(path)) if pair.prediction["sha256"] in hashes]


def _baseline(settings: Settings, directory: Path) -> Path:
    """Runs the job without changes; returns its trace."""
    directory.mkdir(parents=True)
    once = replace(settings, strategies=[BASELINE], repeats=1)
    row = run_experiment(once, directory).rows[0]
    if row.trace is None or row.status != "complete":
        raise DdltraceError(f"the job to predict from is {row.status}: {row.reason}")
    return directory / row.trace


def _times(results: Results, directory: Path, spec: str) -> list[float]:
    """The time per step of each complete run of a strategy, us."""
    found = []
    row = results.row(spec)
    for run in [] if row is None else row.runs:
        if run.trace is not None and run.status == "complete":
            try:
                found.append(recorded_us(open_trace(directory / run.trace), cycle_steps_of(spec)))
            except TraceError:
                continue
    return found
