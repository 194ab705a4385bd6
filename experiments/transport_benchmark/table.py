"""Formats the comparison as text of at most 80 columns."""

from __future__ import annotations

from ddltrace.analyzer.formatting.terminal import wrapped
from ddltrace.analyzer.formatting.text_table import aligned
from ddltrace.analyzer.formatting.units import NOT_KNOWN, bytes_text
from ddltrace.experiments.transport_benchmark.comparison import Comparison, TransportResult
from ddltrace.experiments.transport_benchmark.settings import OPERATIONS

_COLUMNS = 80
_HEADS = (
    ("", "transport"),
    ("smallest", "us"),
    ("largest", "Gbit/s"),
    ("fitted", "latency us"),
    ("fitted", "Gbit/s"),
    ("processor", "ns/byte"),
)


def render(comparison: Comparison) -> str:
    """One table for each operation, followed by explanations of the columns."""
    settings = comparison.settings
    where = (
        "this machine's own network"
        if settings.hosts is None
        else f"{settings.hosts} emulated hosts at {settings.bandwidth}"
    )
    parts = [f"{settings.ranks} ranks on {where}; messages of {_range(settings.sizes)}"]
    for operation, meaning in OPERATIONS.items():
        rows = [_row(result, operation) for result in comparison.results if result.of(operation)]
        if rows:
            parts += [
                "",
                *wrapped(f"{operation}: {meaning}", _COLUMNS),
                *aligned([*zip(*_HEADS, strict=True), *rows], _COLUMNS),
            ]
    parts += [
        f"\n{result.name}: {result.status}: {result.reason}"
        for result in comparison.results
        if result.status != "complete"
    ]
    parts += [
        f"\n{result.name}:\n  {result.planned['messages']} messages to rank 0 took "
        f"{result.planned['taken_us'] / result.planned['planned_us']:.3f} times as long as\n  "
        f"planned, {result.planned['late']} over 5 % longer"
        for result in comparison.results
        if result.planned is not None and result.planned["messages"]
    ]
    parts.append(
        "\nus: median round of the smallest message. Gbit/s: bytes of the largest message\n"
        "over its time. Fitted: time = latency + bytes / bandwidth over all sizes.\n"
        "Processor: time of all ranks, threads of the library included, for one byte of\n"
        "the largest message."
    )
    return "\n".join(parts)


def _row(result: TransportResult, operation: str) -> tuple[str, ...]:
    points = result.of(operation)
    fit = result.fit(operation)
    large = points[-1]
    return (
        result.name,
        f"{points[0].one_way_us:.1f}",
        f"{large.gbit_s:.2f}",
        NOT_KNOWN if fit is None else f"{fit.latency_us:.1f}",
        NOT_KNOWN if fit is None or fit.gbit_s is None else f"{fit.gbit_s:.2f}",
        f"{large.cpu_ns_per_byte:.2f}",
    )


def _range(sizes: tuple[int, ...]) -> str:
    return f"{bytes_text(sizes[0])} to {bytes_text(sizes[-1])}"
