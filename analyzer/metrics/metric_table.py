"""Every metric, once: Prometheus and OpenTelemetry get the same names, units and labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, TypeAlias

from ddltrace.analyzer.metrics.readings import Readings
from ddltrace.tracer.alert_expression import QUANTITIES

Samples: TypeAlias = Iterable[tuple[tuple[str, ...], float]]
"""Values of the labels, and the metric's value."""

_BY_RANK: Final = ("wait_seconds", "memory_bytes")
"""Quantities that are metrics of each rank; alerts are on their mean or maximum."""

_UNITS: Final = {"seconds": "s", "second": "1/s"}
"""Last word of a quantity -> its unit. Shares and ratios have none: collectors that pass them on to
Prometheus append a word to the name of a metric whose unit is 1."""


class Metric(NamedTuple):
    """A metric.

    Attributes:
        name: Its name.
        unit: Its unit, as in UCUM; empty for none.
        text: What it is.
        samples: Its values in readings.
        labels: Names of its labels.
        is_counter: Whether it only grows, or else may have any value.
    """

    name: str
    unit: str
    text: str
    samples: Callable[[Readings], Samples]
    labels: tuple[str, ...] = ()
    is_counter: bool = False


def _quantity(name: str, text: str) -> Metric:
    def samples(now: Readings) -> Samples:
        return [((), now.quantities[name])] if name in now.quantities else []

    unit = _UNITS.get(name.rpartition("_")[2], "")
    return Metric(f"ddltrace_{name}", unit, f"{text[0].upper()}{text[1:]}.", samples)


def _straggler(now: Readings) -> Samples:
    worst = now.straggler
    return [] if worst is None else [((str(worst.rank), worst.cause), 1.0)]


def _alerts(now: Readings) -> Samples:
    for kind in ("dead", "hang", "silent"):
        yield (kind,), float(sum(alert.kind == kind for alert in now.alerts))


METRICS: Final = (
    Metric(
        name="ddltrace_steps_total",
        unit="",
        text="Steps that all ranks have completed.",
        samples=lambda now: [((), now.num_steps)],
        is_counter=True,
    ),
    Metric(
        name="ddltrace_lost_records_total",
        unit="",
        text="Events that could not be recorded.",
        samples=lambda now: [((), now.lost)],
        is_counter=True,
    ),
    Metric(
        name="ddltrace_ranks",
        unit="",
        text="Ranks of this launcher.",
        samples=lambda now: [((), now.ranks)],
    ),
    Metric(
        name="ddltrace_recording",
        unit="",
        text="Ranks whose recording is switched on.",
        samples=lambda now: [((), now.recording)],
    ),
    *(_quantity(name, text) for name, text in QUANTITIES.items() if name not in _BY_RANK),
    Metric(
        name="ddltrace_wait_seconds",
        unit="s",
        text="Waiting for other ranks in the messages of a step.",
        samples=lambda now: [((str(rank),), value) for rank, value in sorted(now.wait_s.items())],
        labels=("rank",),
    ),
    Metric(
        name="ddltrace_memory_bytes",
        unit="By",
        text="Resident memory of a rank's process.",
        samples=lambda now: [
            ((str(rank),), size) for rank, size in sorted(now.memory_bytes.items())
        ],
        labels=("rank",),
    ),
    Metric(
        name="ddltrace_straggler",
        unit="",
        text="1 for the rank that costs most time by entering collectives last.",
        samples=_straggler,
        labels=("rank", "cause"),
    ),
    Metric(
        name="ddltrace_busbw_bytes",
        unit="By/s",
        text="Bus bandwidth of collectives in bytes per second, by size up to that of the label.",
        samples=lambda now: sorted(now.busbw.items()),
        labels=("operation", "size"),
    ),
    Metric(
        name="ddltrace_goodput_share",
        unit="",
        text="Share of the job's time since its start, by what it went to.",
        samples=lambda now: [((part,), share) for part, share in now.goodput.items()],
        labels=("part",),
    ),
    Metric(
        name="ddltrace_alerts",
        unit="",
        text="Dead ranks and hangs that are seen now.",
        samples=_alerts,
        labels=("kind",),
    ),
)
"""The metrics. A label has few values, so a long job does not add any."""
