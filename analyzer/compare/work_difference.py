"""Whether two traces run the same work: kernels and operators that appeared, vanished or changed.

Runs and times are of one step of one rank, mean; of traces without steps, of one rank.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ddltrace.analyzer.formatting.terminal import Section, TextTable, more
from ddltrace.analyzer.formatting.text_table import kernel_text
from ddltrace.analyzer.formatting.units import NOT_KNOWN, time_text
from ddltrace.analyzer.measures.operation_rows import KernelRow, OperatorRow
from ddltrace.analyzer.model import Analysis

_OTHER_PART: Final = 0.02
_OTHER_PART_OF_MANY: Final = 0.5
_MANY: Final = 16
"""The most shapes that a row keeps; of one that has more, some may differ by chance."""


def shapes_per_run(row: KernelRow | OperatorRow) -> dict[str, float]:
    """Shapes -> their share of the runs whose shapes are known."""
    whole = sum(part.count for part in row.shapes)
    return {part.shapes: part.count / whole for part in row.shapes}


def most_frequent(shapes: Mapping[str, float] | None) -> str | None:
    """The shapes of most runs; None if none are known."""
    return max(shapes, key=lambda each: shapes[each]) if shapes else None


def other_shapes(before: Mapping[str, float] | None, after: Mapping[str, float] | None) -> bool:
    """Whether an operation runs on inputs of other shapes; no where shapes are not known."""
    if not before or not after:
        return False
    common = sum(min(share, after.get(shapes, 0.0)) for shapes, share in before.items())
    many = max(len(before), len(after)) >= _MANY
    return 1 - common > (_OTHER_PART_OF_MANY if many else _OTHER_PART)


def common_ratio(pairs: Sequence[tuple[str | None, str | None]]) -> float | None:
    """First dimension of inputs, after / before, on which most operators agree.

    Args:
        pairs: For each operator the shapes before and after.

    Returns:
        The ratio; None if less than half of the operators have it.
    """
    ratios = Counter(ratio for pair in pairs if (ratio := _ratio(*pair)) is not None)
    if not ratios:
        return None
    ratio, count = ratios.most_common(1)[0]
    return ratio if 2 * count >= len(pairs) else None


def _ratio(before: str | None, after: str | None) -> float | None:
    """The ratio of the first dimension of the first input that differs in that only."""
    for first, second in zip(_tensors(before), _tensors(after), strict=False):
        if first != second and first and second and first[0] and first[1:] == second[1:]:
            return second[0] / first[0]
    return None


def _tensors(shapes: str | None) -> list[list[int]]:
    """The shapes of the inputs, those of a list of tensors one by one."""
    try:
        inputs = json.loads(shapes or "[]")
    except ValueError:  # cut short
        return []
    return [shape for each in inputs for shape in _flattened(each)]


def _flattened(entry: Any) -> list[list[int]]:
    if not isinstance(entry, list):
        return []
    if all(isinstance(each, int) for each in entry):
        return [entry]
    return [shape for each in entry for shape in _flattened(each)]


_OTHER_COUNT: Final = 0.02
"""Tolerated relative difference of runs per step, because a trace may end within a step."""

_OTHER_TIME: Final = 0.25
_LEAST_SHARE: Final = 0.005
_MAX_ROWS: Final = 10
_NAME_COLUMNS: Final = 36


@dataclass(frozen=True)
class OperationChange:
    """A kernel or operator that differs between the traces.

    Attributes:
        name: Its name.
        kind: As in `KernelRow` and `OperatorRow`.
        verdict: ``appeared``, ``vanished``, ``count`` (other number of runs a step), ``shapes``
            (an operator that runs as often, on inputs of other shapes) or ``duration`` (as many
            runs, whose mean duration differs by more than 25 %).
        before_count: Runs in one step of one rank, in the first trace.
        after_count: The same in the second.
        before_us: Microseconds in one step of one rank, in the first trace.
        after_us: The same in the second.
        change_us: after - before.
        before_shapes: The most frequent shapes of its inputs in the first trace; None if unknown.
        after_shapes: The same in the second.
    """

    name: str
    kind: str
    verdict: str
    before_count: float
    after_count: float
    before_us: float
    after_us: float
    change_us: float
    before_shapes: str | None = None
    after_shapes: str | None = None


@dataclass(frozen=True)
class WorkDifference:
    """Whether the two traces run the same work.

    Attributes:
        same: Whether no kernel and no operator appeared, vanished or changed its number of
            runs, operators run on inputs of the same shapes, and copies from the host carry as
            much; None where one trace has none of them.
        appeared: Kernels (operators, where no trace has kernels) of the second trace only.
        vanished: Occur in the first trace only.
        count_changed: Occur in both traces with different numbers of runs per step.
        duration_changed: Occur in both traces equally often, with different durations.
        shapes_changed: Operators that occur in both equally often, with different input shapes;
            None where the shapes are not known.
        first_dimension_ratio: First dimension of these inputs, after / before, where most agree on
            it: another batch size shows here. None otherwise.
        input_bytes_ratio: Bytes copied from host to device in a step, after / before: another
            batch size shows here. None without such copies.
        sentence: The same in words.
    """

    same: bool | None
    appeared: int
    vanished: int
    count_changed: int
    duration_changed: int
    shapes_changed: int | None
    first_dimension_ratio: float | None
    input_bytes_ratio: float | None
    sentence: str


Rows = Sequence[KernelRow] | Sequence[OperatorRow]


def operation_changes(
    before: Rows, after: Rows, parts: tuple[int, int]
) -> tuple[OperationChange, ...]:
    """The operations that differ, the largest change of time first.

    Args:
        before: Kernels or operators of the first trace.
        after: The same of the second.
        parts: Steps of all ranks in each trace; ranks, where there are no steps.
    """
    sides = [{(row.name, row.kind): row for row in rows} for rows in (before, after)]
    whole = sum(row.total_us / part for side, part in zip(sides, parts, strict=True)
                for row in side.values()) / 2  # fmt: skip
    changes = []
    for key in sides[0].keys() | sides[1].keys():
        rows = [side.get(key) for side in sides]
        counts = [row.count / part if row else 0.0 for row, part in zip(rows, parts, strict=True)]
        times = [row.total_us / part if row else 0.0 for row, part in zip(rows, parts, strict=True)]
        shapes = [None if row is None else shapes_per_run(row) for row in rows]
        verdict = _verdict(counts, times, whole, other_shapes(*shapes) and key[1] == "operator")
        if verdict is not None:
            change = OperationChange(
                name=key[0],
                kind=key[1],
                verdict=verdict,
                before_count=counts[0],
                after_count=counts[1],
                before_us=times[0],
                after_us=times[1],
                change_us=times[1] - times[0],
                before_shapes=most_frequent(shapes[0]),
                after_shapes=most_frequent(shapes[1]),
            )
            changes.append(change)
    return tuple(sorted(changes, key=lambda row: (-abs(row.change_us), row.name)))


def _verdict(
    counts: list[float], times: list[float], whole: float, other_inputs: bool
) -> str | None:
    if not counts[0]:
        return "appeared"
    if not counts[1]:
        return "vanished"
    if abs(counts[1] - counts[0]) > _OTHER_COUNT * max(counts):
        return "count"
    if other_inputs:
        return "shapes"
    means = times[0] / counts[0], times[1] / counts[1]
    differs = abs(means[1] - means[0]) > _OTHER_TIME * max(*means, 1e-9)
    return "duration" if differs and max(times) > _LEAST_SHARE * whole else None


def work_difference(
    before: Analysis, after: Analysis, kernels: Sequence[OperationChange],
    operators: Sequence[OperationChange],
) -> WorkDifference:  # fmt: skip
    """Judges whether two traces run the same work, by kernels where both have them."""
    by_kernels = bool(before.kernels and after.kernels)
    known = by_kernels or bool(before.operators and after.operators)
    changes = [
        row
        for row in (kernels if by_kernels else operators)
        # Runtime calls poll, and the time of a message is that of the slowest rank.
        if row.kind != "runtime" and (row.kind != "communication" or row.verdict != "duration")
    ]
    counts = {
        verdict: sum(row.verdict == verdict for row in changes)
        for verdict in ("appeared", "vanished", "count", "duration")
    }
    reshaped = [row for row in operators if row.verdict == "shapes"]
    shapes_known = all(any(row.shapes for row in side.operators) for side in (before, after))
    dimension = common_ratio([(row.before_shapes, row.after_shapes) for row in reshaped])
    sizes = [_input_bytes(side) for side in (before, after)]
    ratio = sizes[1] / sizes[0] if sizes[0] and sizes[1] else None
    other_input = ratio is not None and abs(ratio - 1) > _OTHER_COUNT
    same = not (
        counts["appeared"] or counts["vanished"] or counts["count"] or reshaped or other_input
    )
    what = "kernels" if by_kernels else "operators"
    return WorkDifference(
        same=same if known else None,
        appeared=counts["appeared"],
        vanished=counts["vanished"],
        count_changed=counts["count"],
        duration_changed=counts["duration"],
        shapes_changed=len(reshaped) if shapes_known else None,
        first_dimension_ratio=dimension,
        input_bytes_ratio=ratio,
        sentence=_sentence(
            counts, what, ratio if other_input else None, same, (len(reshaped), dimension)
        )
        if known
        else "",
    )


def _sentence(
    counts: dict[str, int],
    what: str,
    ratio: float | None,
    same: bool,
    reshaped: tuple[int, float | None],
) -> str:
    if same and not counts["duration"]:
        return f"Both traces run the same {what}."
    parts = [
        f"{counts[verdict]} {text}"
        for verdict, text in (
            ("appeared", "appeared"),
            ("vanished", "vanished"),
            ("count", "run a different number of times"),
            ("duration", "take a different time each"),
        )
        if counts[verdict]
    ]
    text = f"of their {what}, {', '.join(parts)}" if parts else f"their {what} are the same"
    count, dimension = reshaped
    if count:
        begin = f"{count} operator{' runs' if count == 1 else 's run'} on inputs of other shapes"
        if dimension is not None:
            begin += (
                f", whose first dimension is {dimension:.2f} times as large, as with another "
                "batch size"
            )
        text = f"{begin}; {text}"
    if ratio is not None:
        text += (
            f"; a step copies {ratio:.2f} times as many bytes from the host to the device, "
            "as with another batch size"
        )
    if same:
        return f"Both traces run the same {what}: {text}."
    return f"The traces do not run the same work, so their times do not compare: {text}."


def _input_bytes(side: Analysis) -> float:
    steps = max(side.trace.steps, 1)
    return sum(row.bytes for row in side.copies if "HtoD" in row.direction) / steps


def changes_section(title: str, changes: Sequence[OperationChange]) -> Section:
    """The largest changes as a table; empty if there are none."""
    if not changes:
        return []
    cells = [
        [
            kernel_text(row.name, _NAME_COLUMNS),
            row.verdict,
            _count_text(row.before_count),
            _count_text(row.after_count),
            time_text(row.before_us) if row.before_count else NOT_KNOWN,
            time_text(row.after_us) if row.after_count else NOT_KNOWN,
            ("+" if row.change_us > 0 else "") + time_text(row.change_us),
        ]
        for row in changes[:_MAX_ROWS]
    ]
    header = ["", "", "runs before", "after", "before", "after", "change"]
    return [
        f"{title} (of one step and rank; largest changes)",
        TextTable(header, cells, keys=2),
        *more(len(changes), _MAX_ROWS),
    ]


def _count_text(count: float) -> str:
    return f"{count:.1f}".removesuffix(".0")
