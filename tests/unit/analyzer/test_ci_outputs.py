"""What CI jobs use: Markdown for pull requests, and limits on differences."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import ddltrace
from ddltrace.analyzer.commands import analyze
from ddltrace.analyzer.commands import compare as compare_command
from ddltrace.analyzer.compare.comparison import (
    Comparison,
    compare,
    compare_steps,
    render_comparison,
)
from ddltrace.analyzer.compare.regression import KEYS, check_limit, parse_limit
from ddltrace.analyzer.formatting.units import time_text
from ddltrace.analyzer.model import Analysis
from ddltrace.analyzer.report.markdown_report import render_markdown
from ddltrace.tracer.errors import ThresholdError, UsageError

SAMPLE = Path(__file__).resolve().parents[3] / "sample_traces" / "straggler"


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    return ddltrace.open(SAMPLE).analyze()


@pytest.fixture(scope="module")
def slower(analysis: Analysis) -> Comparison:
    """The sample against itself with steps that take 10 % longer."""
    steps = tuple(replace(row, wall_us=row.wall_us * 1.1) for row in analysis.steps)
    return compare([analysis], [replace(analysis, steps=steps)])


def test_where_steps_of_ranks_overlap_the_step_on_one_rank_decides(analysis: Analysis) -> None:
    # As with ranks that seldom wait for each other: the wall times are longer, the job is not.
    steps = tuple(replace(row, wall_us=row.wall_us * 2) for row in analysis.steps)
    drifted = replace(analysis, steps=steps)
    found = compare([analysis] * 3, [drifted] * 3)
    assert (found.step_us.verdict, found.rank_step_us.verdict) == ("more", "same")
    assert compare_steps([analysis] * 3, [drifted] * 3) == found.rank_step_us
    text = render_comparison(found)
    assert f"{time_text(found.rank_step_us.after)} after, on one rank" in text
    assert "times slower" not in text
    own_us = analysis.summary.rank_step_us.mean
    together = tuple(replace(row, wall_us=own_us) for row in analysis.steps)
    aligned = replace(analysis, steps=together)
    assert compare_steps([aligned] * 3, [aligned] * 3).name == "step"


def test_markdown_has_the_findings_and_escapes_names(analysis: Analysis) -> None:
    evil = replace(analysis, trace=replace(analysis.trace, name="<img src=x> | `a` [b](c)"))
    text = render_markdown(evil)
    assert "<img" not in text
    assert r"&lt;img src=x&gt; \| \`a\` \[b\](c)" in text
    for finding in analysis.findings[:5]:
        assert finding.evidence[:12] in text
    assert text.count("| rank |") == 1


def test_the_commands_option_chooses_the_form() -> None:
    done = CliRunner().invoke(analyze, [str(SAMPLE), "--format", "markdown"])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("### ddltrace: straggler\n")
    as_json = CliRunner().invoke(analyze, [str(SAMPLE), "--format", "json"])
    assert as_json.stdout == CliRunner().invoke(analyze, [str(SAMPLE), "--json"]).stdout


def test_a_change_beyond_the_limit_fails(slower: Comparison) -> None:
    assert slower.step_us.change is not None
    # Only what is more than noise counts: make the difference a certain one.
    certain = replace(slower, step_us=replace(slower.step_us, low=1.0, verdict="more"))
    with pytest.raises(ThresholdError, match=r"step_us changed by \+10.0%"):
        check_limit(certain, parse_limit("step_us>+5%"))
    check_limit(certain, parse_limit("step_us>+15%"))
    check_limit(certain, parse_limit("step_us<-5%"))
    noise = replace(slower, step_us=replace(slower.step_us, verdict="same"))
    assert check_limit(noise, parse_limit("step_us>5%")) is None


def test_every_key_is_found_and_the_unknown_is_said(slower: Comparison) -> None:
    for key in KEYS:
        unknown = check_limit(slower, parse_limit(f"{key}>1e12"))
        assert unknown is None or "not known" in unknown
    assert "not known" in str(check_limit(slower, parse_limit("step_us>5%")))
    # The interval excludes a change of this size, although its sign is not known.
    assert check_limit(slower, parse_limit("step_us>500%")) is None


@pytest.mark.parametrize("expression", ["step_us", "step_us>5%%", "steps>1", "step_us=>5", ">5%"])
def test_a_wrong_limit_is_named_before_anything_is_read(expression: str) -> None:
    with pytest.raises(UsageError, match="--fail-on"):
        parse_limit(expression)


@pytest.mark.parametrize(("strict", "status"), [([], 0), (["--strict"], 1)])
def test_what_is_not_known_is_a_line_and_an_error_only_if_strict(
    strict: list[str], status: int
) -> None:
    arguments = [str(SAMPLE), str(SAMPLE), "--fail-on", "step_us>+5%", *strict]
    done = CliRunner().invoke(compare_command, arguments)
    assert done.exit_code == status
    assert "not known whether step_us changed by so much" in done.stderr
    assert "--with B1 B2 B3" in done.stderr


def test_several_runs_a_side_are_given_in_any_way(tmp_path: Path) -> None:
    for words in (
        [SAMPLE, SAMPLE, "--with", SAMPLE, SAMPLE, SAMPLE, "--json"],
        ["--json", SAMPLE, "--with", SAMPLE, "--with", SAMPLE, SAMPLE, "--strict", SAMPLE],
        ["--json", SAMPLE, SAMPLE, f"--with={SAMPLE}", "--with", SAMPLE, SAMPLE],
    ):
        done = CliRunner().invoke(compare_command, list(map(str, words)))
        assert done.exit_code == 0, done.output
        value = json.loads(done.stdout)
        assert (len(value["before_runs"]), len(value["after_runs"])) == (2, 3)
        assert value["noise"]["condition"] == "idle"  # several runs show their own noise
        assert abs(value["step_us"]["change"]) < 1e-6
    for words in ([SAMPLE], [SAMPLE] * 3):
        done = CliRunner().invoke(compare_command, list(map(str, words)))
        assert isinstance(done.exception, UsageError)
