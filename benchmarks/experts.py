"""Compares how tokens travel to their experts, and capacities of experts.

    sudo python benchmarks/experts.py                  # about 10 minutes
    sudo python benchmarks/experts.py --report-only    # only write the section again

Runs one experiment for each bandwidth on two emulated hosts of two ranks, and writes a section of
docs/experiments.md. What was measured stays in benchmarks/results/; an experiment that has a file
there is not run again, and one that was interrupted is resumed. Needs root, iproute2 and an
otherwise idle machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from experiment_runs import keep, read_kept, run_or_resume, step_text
from page_section import PAGE, RESULTS, write_section

from ddltrace.experiments.harness.results import Results
from ddltrace.experiments.harness.results_table import number_text

HOSTS: Final = 2
RANKS_PER_HOST: Final = 2
STRATEGIES: Final = (
    "ddp",
    "expert",
    "expert:exchange=hierarchical",
    "expert:capacity=2",
    "expert:capacity=1.25",
    "expert:capacity=1",
)


def main() -> None:
    """Runs the missing experiments and writes the section."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bandwidth", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=Path("experts-benchmark"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--report-only", action="store_true")
    options = parser.parse_args()
    parts = []
    for bandwidth in options.bandwidth:
        kept = options.results / f"experts-{bandwidth}.json.gz"
        if not (kept.exists() or options.report_only):
            directory = options.directory / bandwidth
            _run(directory, bandwidth, options)
            keep(directory, kept)
        results = read_kept(kept)
        parts += [] if parts else [_head(results)]
        parts.append(_table(bandwidth, results))
    write_section("experts", "\n\n".join(parts), options.page)
    print(f"wrote {options.page}")


def _run(directory: Path, bandwidth: str, options: argparse.Namespace) -> None:
    cluster = ["--hosts", str(HOSTS), "--ranks-per-host", str(RANKS_PER_HOST)]
    sizes = ["--width", str(options.width), "--steps", str(options.steps)]
    rounds = ["--repeats", str(options.repeats)]
    run_or_resume(
        bandwidth,
        directory,
        ["--workload", "moe", "--bandwidth", bandwidth, *cluster, *sizes, *rounds],
        STRATEGIES,
    )


def _head(results: Results) -> str:
    settings = results.settings
    return (
        "## Experts\n\n"
        f"`benchmarks/experts.py` with ddltrace {settings.get('ddltrace')} and torch "
        f"{settings.get('torch')}: workload `moe` of width {settings.get('width')}, "
        f"{HOSTS} emulated hosts of {RANKS_PER_HOST} ranks on {settings.get('cpus')} cores, "
        f"{settings.get('steps')} steps, rounds in turns: {settings.get('repeats')}; times of a "
        "step with their 95 % intervals over the rounds. Dropped: tokens over a capacity. "
        "Imbalance: tokens of the rank whose experts had most, over the mean of the ranks. The "
        "[guide](experiment-guide.md#experts) explains the parameters."
    )


def _table(bandwidth: str, results: Results) -> str:
    lines = [
        f"### {bandwidth.replace('mbit', ' Mbit/s').replace('gbit', ' Gbit/s')} between hosts",
        "",
        "| strategy | step ms | messages a step | MB a step | loss | dropped | imbalance |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in results.rows:
        experts = row.choices.get("experts") or {}
        dropped = experts.get("dropped_share")
        cells = (
            f"`{row.strategy}`",
            step_text(row),
            number_text(row.messages, 1, 1),
            number_text(row.payload_bytes, 1e-6, 3),
            number_text(row.train_loss, 1, 3),
            number_text(dropped, 100, 1) + ("" if dropped is None else " %"),
            number_text(experts.get("imbalance"), 1, 2),
        )
        lines.append(f"| {' | '.join(cells)} |")
    failed = [
        f"- `{row.strategy}` {row.status}: {row.reason}" for row in results.rows if not row.is_sound
    ]
    return "\n".join([*lines, *(["", *failed] if failed else [])])


if __name__ == "__main__":
    main()
