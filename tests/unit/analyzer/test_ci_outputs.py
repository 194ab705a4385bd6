"""What CI jobs use: Markdown for pull requests, and limits on differences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import ddltrace
from ddltrace.analyzer.commands import analyze
from ddltrace.analyzer.commands import compare as compare_command
from ddltrace.analyzer.compare.comparison import Comparison, compare
from ddltrace.analyzer.compare.regression import KEYS, check_limit, parse_limit
from ddltrace.analyzer.model import Analysis
from ddltrace.analyzer.report.markdown_report import render_markdown
from ddltrace.tracer.errors import DdltraceError, ThresholdError, UsageError

SAMPLE = Path(__file__).resolve().parents[3] / "sample_traces" / "straggler"


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    return ddltrace.open(SAMPLE).analyze()


@pytest.fixture(scope="module")
def slower(analysis: Analysis) -> Comparison:
    """The sample against itself with steps that take 10 % longer."""
    steps = tuple(replace(row, wall_us=row.wall_us * 1.1) for row in analysis.steps)
    return compare(analysis, replace(analysis, steps=steps))


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
    check_limit(noise, parse_limit("step_us>5%"))


def test_every_key_is_found_and_the_unknown_is_no_pass(slower: Comparison) -> None:
    for key in KEYS:
        try:
            check_limit(slower, parse_limit(f"{key}>1e12"))
        except DdltraceError as error:
            assert "do not show" in str(error)  # noqa: PT017 - either outcome is valid
    unknown = replace(slower, step_us=replace(slower.step_us, verdict="unknown"))
    with pytest.raises(DdltraceError, match="do not show"):
        check_limit(unknown, parse_limit("step_us>5%"))


@pytest.mark.parametrize("expression", ["step_us", "step_us>5%%", "steps>1", "step_us=>5", ">5%"])
def test_a_wrong_limit_is_named_before_anything_is_read(expression: str) -> None:
    with pytest.raises(UsageError, match="--fail-on"):
        parse_limit(expression)


def test_a_trace_does_not_differ_from_itself() -> None:
    arguments = [str(SAMPLE), str(SAMPLE), "--fail-on", "step_us>+5%"]
    assert CliRunner().invoke(compare_command, arguments).exit_code == 0
