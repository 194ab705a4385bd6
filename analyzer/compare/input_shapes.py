"""Whether operators of two traces run on inputs of the same shapes, and how those differ."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ddltrace.analyzer.measures.operation_rows import KernelRow, OperatorRow

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
