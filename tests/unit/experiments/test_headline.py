"""The result of an experiment in words: a winner reaches the loss of what it is compared with."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ddltrace.experiments.harness import html_report, results_table
from ddltrace.experiments.harness.results import (
    Results,
    Row,
    Run,
    combine,
    compare_losses,
    summarize,
)
from ddltrace.experiments.harness.results_file import load, write

SEED = random.SystemRandom().randrange(1 << 32)


def runs(
    strategy: str, step_us: float, losses: list[float | None], *, steps: int = 30
) -> list[Run]:
    """One run for each loss, whose step times differ a little from round to round."""
    return [
        Run(
            strategy=strategy,
            round=number,
            seed=number,
            step_us=[step_us + 10 * (step % 3) + number for step in range(20)],
            losses=[2.0] * steps,
            train_loss=loss,
        )
        for number, loss in enumerate(losses, 1)
    ]


def row(strategy: str, step_us: float, *losses: float | None, steps: int = 30) -> Row:
    return summarize(strategy, runs(strategy, step_us, list(losses), steps=steps))


DDP = row("ddp", 9000.0, 1.20, 1.30, 1.10)


def headline(*rows: Row, baseline: str = "ddp") -> str:
    return Results(rows=list(rows), baseline=baseline, status="complete").headline()


def test_a_winner_reached_the_loss() -> None:
    found = headline(DDP, row("bf16", 6000.0, 1.201, 1.301, 1.099))
    assert found == "bf16 is 1.50 times as fast as ddp and reached its loss (1.2 against 1.2)."


def test_the_fastest_row_with_a_worse_loss_is_no_winner() -> None:
    topk = row("topk", 5000.0, 1.9, 2.1, 1.8)
    found = headline(DDP, topk)
    assert found == (
        "topk is 1.80 times as fast as ddp, but did not reach its loss (1.933 against 1.2). "
        "None that did is faster than ddp by more than the noise."
    )
    found = headline(topk, DDP, row("int8", 7500.0, 1.2, 1.3, 1.1), row("fifo", 9900.0, 1, 1, 1))
    assert found.endswith("The fastest that did is int8: 1.20 times.")


@pytest.mark.parametrize(
    "other",
    [
        row("topk", 5000.0, None, None, None),
        row("topk", 5000.0, 1.2, None, 1.1),
        row("topk", 5000.0, 1.2, math.nan, 1.1),
        row("topk", 5000.0, math.inf, math.inf, math.inf),
        row("topk", 5000.0, 1.0, 1.0, 1.0, steps=90),
        summarize("topk", [replace(run, seed=7) for run in runs("topk", 5000.0, [1.0, 1.0, 1.0])]),
    ],
    ids=["no loss", "one without a loss", "nan", "inf", "other steps", "other seeds"],
)
def test_a_loss_that_cannot_be_compared_is_not_known(other: Row) -> None:
    assert headline(DDP, other).endswith("; whether it reaches its loss is not known.")
    assert compare_losses(other, DDP) is None


def test_losses_that_vary_more_than_they_differ_are_not_decided() -> None:
    found = headline(DDP, row("localsgd", 5000.0, 1.25, 1.22, 1.12))
    assert "it is not decided whether it reaches its loss (1.197 against 1.2)" in found


@pytest.mark.parametrize("status", ["diverged", "failed", "hung"])
def test_rows_with_a_bad_run_neither_win_nor_are_won_against(status: str) -> None:
    bad = runs("topk", 5000.0, [1.2, 1.3, 1.1])
    bad[1] = replace(bad[1], status=status, reason="it broke")  # type: ignore[arg-type]
    int8 = row("int8", 7500.0, 1.2, 1.3, 1.1)
    assert headline(DDP, summarize("topk", bad), int8).startswith("int8 is 1.20 times as fast")
    ddp = summarize("ddp", [replace(run, strategy="ddp", step_us=[9e3] * 20) for run in bad])
    found = headline(ddp, int8, row("bf16", 8000.0, 1.2, 1.3, 1.1))
    assert found == (f"int8 has the shortest step, but ddp, with which it is compared, {status}.")
    # Another row of DDP is taken where there is one.
    assert "as fast as ddp:bucket_mb=1" in headline(
        ddp, int8, row("ddp:bucket_mb=1", 9100.0, 1.2, 1.3, 1.1)
    )


def test_one_round_names_no_winner() -> None:
    found = headline(row("ddp", 9000.0, 1.2), row("bf16", 6000.0, 1.2))
    assert found == "bf16 has the shortest step, but one run of each names no winner."


def test_losses_of_other_experiments_are_not_compared() -> None:
    both = [
        (name, Results(rows=[DDP, row("topk", 5000.0, 0.1, 0.1, 0.1)], baseline="ddp"))
        for name in ("small", "large")
    ]
    combined = combine(both, "small/ddp")
    small, large = (combined.row(f"{name}/topk") for name in ("small", "large"))
    assert small is not None
    assert large is not None
    assert compare_losses(small, combined.rows[0]) is not None
    assert compare_losses(large, combined.rows[0]) is None


def test_no_random_experiment_crowns_a_row_that_did_not_reach_the_loss() -> None:
    rng = random.Random(SEED)
    crowned = 0
    for number in range(300):
        base = [rng.uniform(0.5, 2) for _ in range(rng.randrange(2, 5))]
        ddp = row("ddp", 9000.0, *base)
        rows = [ddp]
        for name in ("topk", "int8", "bf16"):
            factor = rng.choice([1.0, 0.9, 1.005, 1.05, 2.0])
            losses = [b * factor * rng.uniform(0.999, 1.001) for b in base]
            rows.append(row(name, rng.uniform(5000, 12000), *losses))
        rng.shuffle(rows)
        found = headline(*rows)
        named = re.match(r"(\w+) is [\d.]+ times as fast as ddp and reached", found)
        if named:
            crowned += 1
            winner = next(one for one in rows if one.strategy == named[1])
            assert winner.train_loss is not None
            assert ddp.train_loss is not None
            assert winner.train_loss <= 1.01 * ddp.train_loss, (SEED, number, found)
            assert winner.step_us_p50 == min(r.step_us_p50 or 0 for r in rows), (SEED, number)
    assert 0 < crowned < 300


def test_all_outputs_have_the_same_sentence(tmp_path: Path) -> None:
    rows = [DDP, row("topk", 5000.0, 1.9, 2.1, 1.8)]
    results = Results(rows=rows, baseline="ddp", status="complete")
    sentence = results.headline()
    write(results, tmp_path)
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["headline"] == load(tmp_path).headline() == sentence
    assert [
        row["loss_difference"] and row["loss_difference"]["verdict"] for row in written["rows"]
    ] == [
        None,
        "higher",
    ]
    assert sentence in " ".join(results_table.render(results).split())
    assert sentence in html_report.render(results, None)
