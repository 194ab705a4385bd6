"""``--fail-on``: a condition on the summary that makes ``analyze`` fail."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import asdict
from typing import Final

from ddltrace.analyzer.measures.summary import Summary
from ddltrace.tracer.errors import ThresholdError, UsageError

_OPERATORS: Final[dict[str, Callable[[float, float], bool]]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_EXPRESSION: Final = re.compile(
    r"\s*(?P<key>[a-z0-9_.]+)\s*(?P<operator><=|>=|==|!=|<|>)\s*(?P<number>[-+0-9.eE]+)\s*\Z"
)


def check_expression(expression: str) -> tuple[str, str, float]:
    """Parses an expression, so that an invalid one fails before the analysis.

    Args:
        expression: ``KEY OPERATOR NUMBER``, for example ``overlap_ratio<0.6``; keys are those
            of the summary in ``--json``, with ``step_us.p50`` and the like.

    Raises:
        UsageError: It is not of that form, or the summary has no such number.
    """
    match = _EXPRESSION.match(expression)
    if match is None:
        raise UsageError(
            f"--fail-on {expression!r:.60}: write KEY OPERATOR NUMBER, e.g. overlap_ratio<0.6"
        )
    if match["key"] not in KEYS:
        raise UsageError(
            f"--fail-on: the summary has no {match['key']!r:.40}; it has {', '.join(KEYS)}"
        )
    try:
        number = float(match["number"])
    except ValueError:
        raise UsageError(f"--fail-on: {match['number']!r:.40} is not a number") from None
    return match["key"], match["operator"], number


def check_threshold(summary: Summary, expression: str) -> str | None:
    """Raises an error if the expression is true.

    Returns:
        Why it is not known whether it is true; None if it is false.

    Raises:
        ThresholdError: It holds.
        UsageError: It cannot be read.
    """
    key, name, limit = check_expression(expression)
    value = values_of(summary)[key]
    if value is None:
        return f"--fail-on {expression}: not known, the trace does not give {key}"
    if _OPERATORS[name](value, limit):
        raise ThresholdError(f"--fail-on {expression}: {key} is {value:.6g}")
    return None


def values_of(summary: Summary) -> dict[str, float | None]:
    """The numbers of a summary by the names of `KEYS`; None where the trace does not give one."""
    values: dict[str, float | None] = {}
    for name, value in asdict(summary).items():
        if isinstance(value, dict):
            values |= {f"{name}.{key}": number for key, number in value.items()}
        elif not isinstance(value, str):
            values[name] = value
    return values


KEYS: Final = (
    "step_us.p50",
    "step_us.p95",
    "step_us.mean",
    "rank_step_us.p50",
    "rank_step_us.p95",
    "rank_step_us.mean",
    "overlap_ratio",
    "compute_share",
    "exposed_comm_share",
    "copy_share",
    "idle_share",
    "sync_overhead_share",
    "update_overhead_share",
    "data_share",
    "samples_per_s",
    "tokens_per_s",
    "flops_per_step",
    "mfu",
    "idle.data_share",
    "idle.other_rank_share",
    "idle.message_share",
    "idle.host_share",
    "idle.stopped_share",
    "idle.unknown_share",
    "idle.in_message_share",
    "steps",
    "warmup_steps",
)
"""The numbers that can be compared."""
