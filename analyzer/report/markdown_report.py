"""The report as Markdown, short enough for a comment on a pull request."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import Final

from ddltrace.analyzer.formatting.units import bytes_text, printable, share_text, time_text
from ddltrace.analyzer.measures.finding import Finding
from ddltrace.analyzer.model import Analysis
from ddltrace.analyzer.report.notes import notes_of
from ddltrace.analyzer.report.sentences import dimensions_text, predicted_text, sentences
from ddltrace.tracer.number_text import counted

_MAX_RANKS: Final = 16
_MAX_FINDINGS: Final = 5
_SPECIAL: Final = re.compile(r"([\\`*_\[\]|~])")


def render_markdown(analysis: Analysis) -> str:
    """The findings, the summary, the ranks and the notes of an analysis.

    Names come from the trace: everything that Markdown or HTML would interpret is escaped.
    """
    trace, summary = analysis.trace, analysis.summary
    first, *rest = sentences(analysis)
    lines = [
        f"### ddltrace: {_escape(trace.name)}",
        "",
        f"**{_escape(first)}**",
        *(line for sentence in rest for line in ("", _escape(sentence))),
        "",
        *_table(
            (
                "step, mean",
                "overlap ratio",
                "compute on a rank",
                "exposed communication on a rank",
                "waiting for others on a rank",
                "idle on a rank",
            ),
            [
                (
                    time_text(summary.step_us.mean),
                    share_text(summary.overlap_ratio),
                    share_text(summary.compute_share),
                    share_text(summary.exposed_comm_share),
                    share_text(summary.sync_overhead_share),
                    share_text(summary.idle_share),
                )
            ],
        ),
    ]
    if analysis.findings:
        lines += ["", "Findings, largest saving first:", ""]
        lines += [
            f"- {_saving(finding)}: {_escape(finding.evidence)}. "
            f"To try: {_escape(finding.advice)}. {_escape(predicted_text(finding))}".rstrip()
            for finding in analysis.findings[:_MAX_FINDINGS]
        ]
    if analysis.compared_dimensions():
        lines += ["", *_dimensions(analysis), "", dimensions_text(summary)]
    if analysis.ranks:
        lines += ["", "Each rank, totals over the analyzed window:", "", *_ranks(analysis)]
    lines += [f"\n> {_escape(note)}" for note in notes_of(analysis)]
    return "\n".join(lines)


def _saving(finding: Finding) -> str:
    """What a finding saves at most, or, if that is not known, what it is about."""
    if not finding.has_saving:
        return finding.kind
    return f"saves at most {time_text(finding.saves_us)} a step"


def _dimensions(analysis: Analysis) -> list[str]:
    rows = [
        (
            row.dimension,
            time_text(row.exposed_us),
            time_text(row.wait_us),
            time_text(row.transfer_us),
            f"{row.messages:.3g}",
            bytes_text(row.bytes),
            ", ".join(row.groups),
        )
        for row in analysis.compared_dimensions()
    ]
    heads = ("dimension", "exposed", "waiting", "transfer", "messages", "bytes", "groups")
    return _table(heads, rows)


def _ranks(analysis: Analysis) -> list[str]:
    rows = [
        (
            str(row.rank),
            time_text(row.step_us_p50),
            share_text(row.overlap_ratio),
            time_text(row.exposed_comm_us),
            time_text(row.wait_us),
            time_text(row.idle_us),
        )
        for row in analysis.ranks[:_MAX_RANKS]
    ]
    table = _table(("rank", "step, median", "overlap", "exposed", "waiting", "idle"), rows)
    more = len(analysis.ranks) - len(rows)
    return [*table, *(["", f"{counted(more, 'more rank', 'is')} not shown."] if more else [])]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(heads)} |",
        f"|{' --- |' * len(heads)}",
        *(f"| {' | '.join(map(_escape, row))} |" for row in rows),
    ]


def _escape(text: str) -> str:
    """Text that Markdown shows as it is."""
    text = html.escape(printable(text).replace("\n", " "), quote=False)
    return _SPECIAL.sub(r"\\\1", text).replace("@", "&#64;")
