"""Predicts strategies and networks, runs them, and writes docs/whatif-accuracy.md from the ledger.

    sudo python benchmarks/whatif.py --minutes 140                 goes on where it stopped
    sudo python benchmarks/whatif.py --report-only
    sudo python benchmarks/whatif.py --only digits:16 --bandwidth 1gbit --strategies ddp \
        --steps 6 --repeats 1 --page page.md --ledger ledger.jsonl --directory runs     a trial

Each case is a workload on a paced network of 4 hosts: strategies are predicted from a run of `ddp`
on the same network, and the job on each other network from the same trace. Predictions are in the
ledger before the runs begin. Needs root and iproute2 for the network. Nothing else should run.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from experiment_runs import verify
from page_section import findings

from ddltrace.analyzer.formatting.units import NOT_KNOWN
from ddltrace.experiments import ledger
from ddltrace.experiments.schedules.ddp_buckets import DdpBuckets
from ddltrace.experiments.strategy.spec import parse

ROOT = Path(__file__).resolve().parents[1]
HOSTS = 4
WORKLOADS = ("digits:48", "digits:24", "digits:96", "gpt:64", "vgg:16")
BANDWIDTHS = ("400mbit", "200mbit", "1gbit")
STRATEGIES = (
    *("ddp:bucket_mb=1", "ddp:bucket_mb=0.5", "wfbp", "fifo", "bf16", "fp16", "int8"),
    *("p3", "tictac", "bytescheduler", "ring", "halving_doubling", "topk:density=0.01+feedback"),
)


def main() -> None:
    """Makes the missing cases and writes the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=140.0)
    parser.add_argument("--only", action="append", metavar="WORKLOAD:WIDTH")
    parser.add_argument("--bandwidth", action="append")
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=Path("whatif-benchmark"))
    parser.add_argument("--ledger", type=Path, default=ROOT / "benchmarks" / "whatif-ledger.jsonl")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "whatif-accuracy.md")
    parser.add_argument("--report-only", action="store_true")
    options = parser.parse_args()
    until = time.monotonic() + options.minutes * 60
    made = _made(options.ledger)
    for workload in [] if options.report_only else options.only or WORKLOADS:
        traces: dict[str, Path] = {}
        for bandwidth in options.bandwidth or BANDWIDTHS:
            folder = options.directory / f"{workload.replace(':', '-')}-{bandwidth}"
            traces[bandwidth] = folder / "before" / "ddp"
            if time.monotonic() < until and (workload, bandwidth, bandwidth) not in made:
                _verify(
                    options,
                    workload,
                    bandwidth,
                    strategies=options.strategies,
                    folder=folder,
                    trace=None,
                )
        for source, target in [(a, b) for a in traces for b in traces if a != b]:
            new = (workload, source, target) not in made
            if time.monotonic() < until and new and traces[source].is_dir():
                folder = options.directory / f"{workload.replace(':', '-')}-{source}-to-{target}"
                _verify(
                    options,
                    workload,
                    target,
                    strategies=["ddp", "bf16"],
                    folder=folder,
                    trace=traces[source],
                )
    text = page(ledger.read(options.ledger), findings("whatif", options.page))
    options.page.write_text(text, encoding="utf-8")
    print(f"wrote {options.page}")


def _made(path: Path) -> set[tuple[str, str, str]]:
    """Workload, network of the trace and network of the runs of the cases in the ledger."""
    found = set()
    for pair in ledger.pairs(ledger.read(path)) if path.exists() else []:
        settings = pair.prediction["settings"]
        if pair.measurement is not None:
            workload = f"{settings['workload']}:{settings['width']}"
            found.add((workload, _source(pair), settings["bandwidth"]))
    return found


def _source(pair: ledger.Pair) -> str:
    """The bandwidth on which the trace was recorded: part of its folder's name."""
    folder = Path(pair.prediction["trace"]).parents[1].name
    return folder.rpartition("-")[2]


def _verify(
    options: argparse.Namespace,
    workload: str,
    bandwidth: str,
    *,
    strategies: Sequence[str],
    folder: Path,
    trace: Path | None,
) -> None:
    name, _, width = workload.partition(":")
    of_job = ["--workload", name, "--width", width]
    cluster = ["--hosts", str(HOSTS), "--bandwidth", bandwidth]
    rounds = ["--steps", str(options.steps), "--repeats", str(options.repeats)]
    source = [] if trace is None else ["--trace", str(trace)]
    verify(folder, [*of_job, *cluster, *rounds, *source], strategies, options.ledger)


def page(lines: Sequence[dict[str, object]], by_hand: str) -> str:
    """The page of all rows of a ledger.

    Args:
        lines: The ledger.
        by_hand: What people wrote, which stands between the overview and the rows.
    """
    pairs = ledger.pairs(lines)
    rows = [pair for pair in pairs if pair.measurement is not None]
    refused = [pair for pair in pairs if pair.prediction["answer"]["refused"] is not None]
    open_ = len(pairs) - len(rows) - len(refused)
    text = [
        "# How good the predictions are",
        "",
        "Written by `benchmarks/whatif.py` from the ledger `benchmarks/whatif-ledger.jsonl`, in "
        "which each prediction was written down before its runs; see [whatif.md](whatif.md). Rows "
        "of `vgg`, `resnet` and of the default `gpt` are by `benchmarks/experiments.py`.",
        "",
        f"{len(rows)} predictions were measured, {len(refused)} questions were refused, {open_} "
        "were predicted only. All on emulated links between 4 hosts that share the two processors "
        "of one machine, with Gloo. A star marks a time outside of its interval. *Noise*: by how "
        "much the rounds differ from their median, at most, of the row or of DDP. The error *of "
        "the speed-up* is that of the ratio to DDP, measured in the same rounds: it leaves out by "
        "how much the whole machine was slower or faster when the trace was recorded.",
        "",
    ]
    if rows:
        text += [*_goals(rows), *_overview(rows), by_hand, "", "## All rows", ""]
        text += [
            "| date | job | strategy | trace from | predicted, ms | measured, ms | error | noise |"
        ]
        text += ["|---|---|---|---|---|---|---|---|"]
        text += [_row(pair) for pair in rows]
        text.append("")
    if refused:
        text += ["## Refused", ""]
        reasons = {
            (
                pair.prediction["answer"]["question"]["strategy"],
                pair.prediction["answer"]["refused"],
            )
            for pair in refused
        }
        text += [f"- `{spec}`: {reason}" for spec, reason in sorted(reasons)]
        text.append("")
    return "\n".join(text)


def _goals(rows: Sequence[ledger.Pair]) -> list[str]:
    """The goals beside what was measured."""
    replays = {pair.prediction["trace"]: abs(pair.prediction["self_replay_error"]) for pair in rows}
    replay = np.median(list(replays.values()))
    near, far = list[dict[str, Any]](), list[dict[str, Any]]()
    for row in rows:
        (near if _kind(row) in ("bucket", "schedule") else far).append(_measured(row))
    found = [*near, *far]
    signs = [bool(each["sign_right"]) for each in found if each["sign_right"] is not None]
    right = np.mean(signs) if signs else np.nan
    near_middle, _ = _quantiles(near)
    far_middle, far_most = _quantiles(far)
    covered = [each["covered"] for each in found]
    low, high = _wilson(sum(map(bool, covered)), len(covered))
    goals = [
        ("rows: at least 300", f"{len(rows)}", len(rows) >= 300),
        (
            "a replay of the trace as it is: median error 0.5%",
            f"{replay:.1%}, {len(replays)} traces",
            replay <= 0.005,
        ),
        (
            "DDP's buckets and other schedules: median error 2%",
            _share(near_middle),
            near_middle <= 0.02,
        ),
        (
            "all others: median error 3%, 90th percentile 8%",
            f"{_share(far_middle)}, {_share(far_most)}",
            far_middle <= 0.03 and far_most <= 0.08,
        ),
        (
            "sign right in 98% of the rows whose effect is larger than the noise",
            _share(right),
            right >= 0.98,
        ),
        (
            "90% of the times in their intervals, by the 95% interval of this share",
            f"{low:.0%} to {high:.0%}",
            low <= 0.9 <= high,
        ),
    ]
    text = ["| goal | measured | |", "|---|---|---|"]
    text += [
        f"| {goal} | {value} | {'reached' if good else 'missed'} |" for goal, value, good in goals
    ]
    return [*text, ""]


def _wilson(successes: int, trials: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson, 1927)."""
    z, share = 1.96, successes / trials
    middle = share + z * z / (2 * trials)
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    below = 1 + z * z / trials
    return (middle - half) / below, (middle + half) / below


def _quantiles(found: Sequence[dict[str, Any]], key: str = "error") -> tuple[float, float]:
    """Median and 90th percentile of absolute errors where they are known; NaN if none is."""
    errors = np.abs([each[key] for each in found if each[key] is not None])
    return (
        (float(np.median(errors)), float(np.quantile(errors, 0.9)))
        if len(errors)
        else (math.nan, math.nan)
    )


def _share(value: float) -> str:
    return NOT_KNOWN if math.isnan(value) else f"{value:.1%}"


def _overview(rows: Sequence[ledger.Pair]) -> list[str]:
    text = [
        "| predictions | rows | error: median | 90th percentile | of the speed-up: median "
        "| 90th percentile | noise: median | sign right | in the interval |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    kinds = {
        "same network, DDP's buckets": [row for row in rows if _kind(row) == "bucket"],
        "same network, another schedule": [row for row in rows if _kind(row) == "schedule"],
        "same network, a codec": [row for row in rows if _kind(row) == "codec"],
        "same network, fewer exchanges": [row for row in rows if _kind(row) == "frequency"],
        "same network, an architecture": [row for row in rows if _kind(row) == "architecture"],
        "same network, a rule of synchronization": [
            row for row in rows if _kind(row) == "synchronization"
        ],
        "same network, an optimizer's rule": [row for row in rows if _kind(row) == "rule"],
        "another network": [row for row in rows if _kind(row) == "network"],
        "all": list(rows),
    }
    for name, mine in kinds.items():
        if mine:
            text.append(f"| {name} | {_numbers([_measured(row) for row in mine])} |")
    nothing = [
        {
            "error": pair.prediction["baseline_us"] / measured["measured_us"] - 1,
            "noise": measured["noise"],
            "speedup_error": None,
            "sign_right": None,
        }
        for pair in rows
        if (measured := pair.measurement) is not None
    ]
    text.append(f'| for comparison: "nothing changes" | {_numbers(nothing)} |')
    if again := _measured_again(rows):
        text.append(f"| for comparison: the same runs on an earlier day | {_numbers(again)} |")
    text += ["", "By job, with the model of that day:", ""]
    text += [
        "| predicted | job | rows | error: median | 90th percentile | of the speed-up: median "
        "| 90th percentile | noise: median | sign right | in the interval |"
    ]
    text += ["|---|---|---|---|---|---|---|---|---|---|"]
    jobs: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        settings = row.prediction["settings"]
        key = f"{row.prediction['time'][:10]} | {settings['workload']} {settings['width']}"
        jobs.setdefault(key, []).append(_measured(row))
    text += [f"| {job} | {_numbers(mine)} |" for job, mine in jobs.items()]
    return [*text, ""]


def _measured_again(rows: Sequence[ledger.Pair]) -> list[dict[str, Any]]:
    """The errors that a measurement of an earlier day has as a prediction, where there is one."""
    earlier: dict[tuple[object, ...], dict[str, Any]] = {}
    found = []
    for row in rows:
        settings, measured = row.prediction["settings"], row.measurement
        assert measured is not None
        key = (
            *(settings[name] for name in ("workload", "width", "bandwidth")),
            row.prediction["answer"]["question"]["strategy"],
        )
        before = earlier.get(key)
        if before is not None and before["time"][:10] != measured["time"][:10]:
            step, baseline = (
                np.median(before[name]) / np.median(measured[name])
                for name in ("runs_us", "baseline_runs_us")
            )
            errors = {"error": step - 1, "speedup_error": step / baseline - 1}
            found.append({**errors, "noise": measured["noise"], "sign_right": None})
        earlier[key] = measured
    return found


def _measured(pair: ledger.Pair) -> dict[str, Any]:
    """What was measured, with the error of the speed-up.

    On another network than the baseline's no sign counts; early lines of the ledger have one there.
    """
    found = {**(pair.measurement or {}), "speedup_error": ledger.speedup_error(pair)}
    return {**found, "sign_right": None} if _kind(pair) == "network" else found


def _numbers(found: Sequence[dict[str, Any]]) -> str:
    signs = [each["sign_right"] for each in found if each["sign_right"] is not None]
    covered = [each["covered"] for each in found if "covered" in each]
    sign = f"{sum(map(bool, signs))} of {len(signs)}" if signs else ""
    inside = f"{sum(map(bool, covered))} of {len(covered)}" if covered else ""
    errors = (*_quantiles(found), *_quantiles(found, "speedup_error"))
    noise = np.median([each["noise"] for each in found])
    return " | ".join([f"{len(found)}", *map(_share, errors), f"{noise:.1%}", sign, inside])


def _kind(pair: ledger.Pair) -> str:
    """What a row predicts: another network, or what differs from DDP on the same one."""
    spec = pair.prediction["answer"]["question"]["strategy"]
    if _source(pair) != pair.prediction["settings"]["bandwidth"]:
        return "network"
    strategy = parse(spec)
    kinds = {
        "synchronization": strategy.place != "all",
        "rule": strategy.optimizer_rule is not None,
        "frequency": strategy.frequency is not None,
        "codec": strategy.encodes,
        "architecture": strategy.architecture is not None,
        "bucket": isinstance(strategy.schedule, DdpBuckets),
    }
    return next((kind for kind, holds in kinds.items() if holds), "schedule")


def _row(pair: ledger.Pair) -> str:
    measured, answer = pair.measurement, pair.prediction["answer"]
    settings = pair.prediction["settings"]
    assert measured is not None
    job = f"{settings['workload']} {settings['width']}, {settings['bandwidth']}"
    low, high = answer["low_us"] / 1e3, answer["high_us"] / 1e3
    mark = "" if measured["covered"] else " *"
    return (
        f"| {measured['time'][:10]} | {job} | `{answer['question']['strategy']}` | {_source(pair)} "
        f"| {answer['step_us'] / 1e3:.1f} ({low:.1f} to {high:.1f}){mark} "
        f"| {measured['measured_us'] / 1e3:.1f} | {measured['error']:+.1%} "
        f"| {measured['noise']:.1%} |"
    )


if __name__ == "__main__":
    main()
