"""Floating-point operations of operators, by the formulas of PyTorch's flop counter.

They cover matrix multiplications, convolutions and attention, forward and backward. PyTorch's
counter is a dispatch mode, which the job would notice; here the formulas get the shapes that the
profiler recorded.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

_CONVOLUTIONS: Final = (
    *("aten::convolution", "aten::_convolution", "aten::convolution_overrideable"),
    "aten::cudnn_convolution",
)
_CONVOLUTION_BACKWARD: Final = "aten::convolution_backward"


class Formula(NamedTuple):
    """The formula of an operator.

    Attributes:
        compute: The formula, of shapes and other arguments.
        positional: How many arguments of the operator it takes; the others have names.
    """

    compute: Callable[..., Any]
    positional: int


Formulas: TypeAlias = Mapping[str, Formula]
"""Name of an operator -> its formula."""


def load_formulas() -> Formulas:
    """Loads PyTorch's formulas; empty if they cannot be loaded without a message to the job."""
    import torch

    if _on_a_device(torch.version) and importlib.util.find_spec("triton") is None:
        return {}  # PyTorch's module would log a warning
    from torch.utils.flop_counter import flop_registry

    return {
        packet._qualified_op_name: Formula(compute, _positional(packet))
        for packet, compute in flop_registry.items()
        if isinstance(packet, torch._ops.OpOverloadPacket)
    }


def count_flops(events: Sequence[Any], formulas: Formulas) -> dict[int, int]:
    """Counts the operations of the profiler's events.

    An operator that calls another one with a formula is counted once.

    Args:
        events: The events, with shapes.
        formulas: See `load_formulas`.

    Returns:
        Place of an event -> its floating-point operations.

    Raises:
        Exception: Those of an operator with a formula are not known, so neither is their sum.
    """
    places = [place for place, event in enumerate(events) if event.name() in formulas]
    spans = {place: (events[place].start_thread_id(), events[place].start_ns()) for place in places}
    found: dict[int, int] = {}
    outer: tuple[int, int] = (0, 0)  # thread and end of the last counted operator
    for place in sorted(places, key=lambda each: (spans[each], -events[each].duration_ns())):
        thread, start = spans[place]
        if thread != outer[0] or start >= outer[1]:
            outer = thread, start + events[place].duration_ns()
            found[place] = _flops(events[place], formulas[events[place].name()])
    return found


def _positional(packet: Any) -> int:
    """How many arguments of an operator have no name in a call."""
    schema = getattr(packet, packet.overloads()[0])._schema
    return sum(not argument.kwarg_only for argument in schema.arguments)


def _flops(event: Any, formula: Formula) -> int:
    # A tensor has a shape and no value, any other argument a value and no shape.
    arguments = [
        shape if value is None else value
        for shape, value in zip(event.shapes(), event.concrete_inputs(), strict=True)
    ][: formula.positional]
    result = None
    if event.name() in _CONVOLUTIONS:
        result = _output_of_convolution(*arguments[:2], *arguments[3:6])
    elif event.name() == _CONVOLUTION_BACKWARD:
        result = arguments[1:3]  # gradients have the shapes of input and weight
    return int(formula.compute(*arguments, out_val=result))


def _output_of_convolution(
    image: list[int], weight: list[int], stride: list[int], padding: list[int], dilation: list[int]
) -> list[int]:
    """The shape of its result; of a transposed one, the formula does not need it."""
    sizes = zip(image[2:], weight[2:], stride, padding, dilation, strict=True)
    return [
        *(image[0], weight[0]),
        *((n + 2 * pad - apart * (k - 1) - 1) // step + 1 for n, k, step, pad, apart in sizes),
    ]


def _on_a_device(version: Any) -> bool:
    return any(getattr(version, kind, None) is not None for kind in ("cuda", "hip", "xpu"))
