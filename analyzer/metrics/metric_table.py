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
        text: What it is.
        samples: Its values in readings.
        labels: Names of its labels.
        unit: Its unit, as in UCUM; empty for none.
        is_counter: Whether it only grows, or else may have any value.
    """

    name: str
    text: str
    samples: Callable[[Readings], Samples]
    labels: tuple[str, ...] = ()
    unit: str = ""
    is_counter: bool = False


def _number(name: str, text: str, attribute: str, *, is_counter: bool = False) -> Metric:
    """One number, an attribute of readings."""

    def samples(now: Readings) -> Samples:
        return [((), getattr(now, attribute))]

    return Metric(f"ddltrace_{name}", text, samples, is_counter=is_counter)


def _by_label(name: str, text: str, attribute: str, label: str, unit: str = "") -> Metric:
    """A number for each value of a label, an attribute of readings; ranks are ascending."""

    def samples(now: Readings) -> Samples:
        values = getattr(now, attribute).items()
        ordered = sorted(values) if label == "rank" else values
        return [((str(key),), value) for key, value in ordered]

    return Metric(f"ddltrace_{name}", text, samples, (label,), unit)


def _quantity(name: str, text: str) -> Metric:
    def samples(now: Readings) -> Samples:
        return [((), now.quantities[name])] if name in now.quantities else []

    unit = _UNITS.get(name.rpartition("_")[2], "")
    return Metric(f"ddltrace_{name}", f"{text[0].upper()}{text[1:]}.", samples, unit=unit)


def _straggler(now: Readings) -> Samples:
    worst = now.straggler
    return [] if worst is None else [((str(worst.rank), worst.cause), 1.0)]


def _alerts(now: Readings) -> Samples:
    for kind in ("dead", "hang", "silent"):
        yield (kind,), float(sum(alert.kind == kind for alert in now.alerts))


METRICS: Final = (
    _number("steps_total", "Steps that all ranks have completed.", "num_steps", is_counter=True),
    _number("lost_records_total", "Events that could not be recorded.", "lost", is_counter=True),
    _number("ranks", "Ranks of this launcher.", "ranks"),
    _number("recording", "Ranks whose recording is switched on.", "recording"),
    *(_quantity(name, text) for name, text in QUANTITIES.items() if name not in _BY_RANK),
    _by_label(
        "wait_seconds",
        "Waiting for other ranks in the messages of a step.",
        *("wait_s", "rank", "s"),
    ),
    _by_label("memory_bytes", "Resident memory of a rank's process.", "memory_bytes", "rank", "By"),
    Metric(
        name="ddltrace_straggler",
        text="1 for the rank that costs most time by entering collectives last.",
        samples=_straggler,
        labels=("rank", "cause"),
    ),
    Metric(
        name="ddltrace_busbw_bytes",
        text="Bus bandwidth of collectives in bytes per second, by size up to that of the label.",
        samples=lambda now: sorted(now.busbw.items()),
        labels=("operation", "size"),
        unit="By/s",
    ),
    _by_label(
        "goodput_share",
        "Share of the job's time since its start, by what it went to.",
        *("goodput", "part"),
    ),
    Metric(
        name="ddltrace_alerts",
        text="Dead ranks and hangs that are seen now.",
        samples=_alerts,
        labels=("kind",),
    ),
)
"""The metrics. A label has few values, so a long job does not add any."""
