"""What an experiment found, as text of at most 100 columns: which columns, and how to read them.

Setting columns under each other is the analyzer's `table`.
"""

from __future__ import annotations

from ddltrace.analyzer.compare.mean_difference import LEVEL
from ddltrace.analyzer.formatting.text_table import aligned
from ddltrace.analyzer.formatting.units import NOT_KNOWN, printable, share_text
from ddltrace.experiments.harness.median_difference import Difference
from ddltrace.experiments.harness.results import Results, Row

_COLUMNS = 100
_HEADS = (
    ("", "strategy"),
    ("step", "median"),
    ("ms", "p95"),
    ("over-", "lapped"),
    ("exposed", "ms"),
    ("wire", "MB"),
    ("", "loss"),
    ("accu-", "racy"),
    ("step against the baseline", "change [low, high]"),
)


def render(results: Results) -> str:
    """The results as a table, with what must be known to read it below."""
    body = [
        (*_cells(row), _difference(row, results, difference))
        for row, difference in zip(results.rows, results.differences(), strict=True)
    ]
    lines = [
        *_setting_lines(results),
        *aligned([*zip(*_HEADS, strict=True), *body], _COLUMNS, keep="start"),
        "",
    ]
    lines += _explanations(results)
    return "\n".join(lines)


def _setting_lines(results: Results) -> list[str]:
    settings = results.settings
    if not settings:
        return []
    network = (
        f"on {settings['hosts']} hosts at {settings.get('bandwidth')}"
        if settings.get("hosts")
        else "on this machine's own network"
    )
    size = settings.get("gradient_bytes")
    model = f", {size / 1e6:.1f} MB of gradients" if isinstance(size, int) else ""
    return [
        printable(
            f"{settings.get('workload')} width {settings.get('width')}{model}, "
            f"{settings.get('ranks')} ranks {network}"
        ),
        printable(
            f"{settings.get('steps')} steps, the first {settings.get('warmup')} not measured"
        ),
        "",
    ]


def _cells(row: Row) -> tuple[str, ...]:
    return (
        printable(row.strategy),
        _number(row.step_us_p50, 1e-3, 2),
        _number(row.step_us_p95, 1e-3, 2),
        share_text(row.overlap_ratio),
        _number(row.exposed_us, 1e-3, 2),
        _number(row.wire_bytes, 1e-6, 3),
        _number(row.train_loss, 1, 4),
        share_text(row.test_accuracy),
    )


def _difference(row: Row, results: Results, difference: Difference | None) -> str:
    if row.strategy == results.baseline:
        return "baseline"
    if difference is None:
        return NOT_KNOWN
    low, high = 100 * difference.low, 100 * difference.high
    text = f"{100 * difference.relative:+.1f} % [{low:+.1f}, {high:+.1f}]"
    return text if difference.is_clear else f"{text} ~"


def _explanations(results: Results) -> list[str]:
    lines = [
        "Steady steps only. exposed, wire: mean per rank and step; wire is what the sockets sent.",
        "loss: over all training data at the end; accuracy: on held-out data.",
        f"[low, high]: {100 * LEVEL:.0f} % interval over the steps of these runs; "
        "~ where zero is inside it.",
    ]
    if results.status != "complete":
        lines.append(f"The experiment is {printable(results.status)}: rows may be missing.")
    for row in results.rows:
        if row.replicas_identical is False:
            lines.append(f"{printable(row.strategy)}: the ranks ended with different parameters.")
        lines += [f"{printable(row.strategy)}: {printable(str(note))}" for note in row.notes]
    return lines


def _number(value: float | None, scale: float, digits: int) -> str:
    return NOT_KNOWN if value is None else f"{value * scale:.{digits}f}"
