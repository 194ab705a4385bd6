"""The plan of the messages of one step: gradients, divided into slices, gathered into messages.

These objects use no torch, processes or clocks. The engine executes them in a real
job; a replay executes the same objects on the times of a trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

_MESSAGE_BYTES: Final = 32 << 20


@dataclass(frozen=True)
class Gradient:
    """Description of one parameter's gradient for a schedule.

    Attributes:
        index: The parameter's index in the model (order of ``named_parameters``).
        name: The parameter's name.
        elements: Number of elements.
        element_bytes: Size of one element in bytes.
        dtype: Name of the element type, without ``torch.``.
        shape: The parameter's shape; empty for a scalar, and where it is not known.
        use: Its position in the order in which the forward pass uses the parameters; None if
            unknown.
        ready_us: When it is ready, in microseconds from a common point of the step; None if
            unknown.
    """

    index: int
    name: str
    elements: int
    element_bytes: int = 4
    dtype: str = "float32"
    shape: tuple[int, ...] = ()
    use: int | None = None
    ready_us: float | None = None

    @property
    def bytes(self) -> int:
        """Size of the whole gradient in bytes."""
        return self.elements * self.element_bytes


def describe_gradient(
    index: int, name: str, parameter: torch.Tensor, use: int | None = None
) -> Gradient:
    """Describes the gradient of a parameter for a schedule.

    Args:
        index: Index of the parameter among those of the model.
        name: Qualified name of the parameter.
        use: Position of its first use in a forward pass; None if unknown.
    """
    return Gradient(
        index=index,
        name=name,
        elements=parameter.numel(),
        element_bytes=parameter.element_size(),
        dtype=str(parameter.dtype).removeprefix("torch."),
        shape=tuple(parameter.shape),
        use=use,
    )


@dataclass(frozen=True)
class Slice:
    """Elements ``start`` to ``stop`` (exclusive) of one flattened gradient."""

    gradient: int
    start: int
    stop: int

    @property
    def elements(self) -> int:
        """Number of elements in the slice."""
        return self.stop - self.start


@dataclass(frozen=True)
class Message:
    """One exchange between all ranks.

    Attributes:
        number: Its index in the plan, the same on all ranks.
        slices: The slices that it carries, in order.
        bytes: Size on one rank, before any codec.
        priority: Its priority, 0 first; None if the schedule has no priorities.
        parts: Numbers of the plan's messages that were fused into this one while the job ran;
            empty for a message of the plan itself.
    """

    number: int
    slices: tuple[Slice, ...]
    bytes: int
    priority: int | None = None
    parts: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        """Number of elements that it carries."""
        return sum(part.elements for part in self.slices)

    @cached_property
    def gradients(self) -> frozenset[int]:
        """Indices of the gradients with slices in the message."""
        return frozenset(part.gradient for part in self.slices)


def fuse(messages: Sequence[Message]) -> Message:
    """Fuses several messages of a plan into one, in their order."""
    if len(messages) == 1:
        return messages[0]
    return Message(
        number=messages[0].number,
        slices=tuple(part for message in messages for part in message.slices),
        bytes=sum(message.bytes for message in messages),
        parts=tuple(message.number for message in messages),
    )


class MessagePlan:
    """The messages of one step, in the order on which all ranks agree.

    A plan is checked when it is made: every element of every gradient travels exactly once,
    and no message mixes element types.

    Attributes:
        gradients: All gradients by their index.
        messages: The messages in their agreed order.
    """

    def __init__(
        self,
        gradients: Sequence[Gradient],
        contents: Sequence[Sequence[Slice]],
        priorities: Sequence[int] | None = None,
    ) -> None:
        """Numbers the messages and checks the plan.

        Args:
            gradients: All gradients of the step.
            contents: The slices of each message, in the agreed order of messages.
            priorities: The urgency of each message, 0 first.

        Raises:
            ValueError: An element is missing, travels twice, or does not exist, or a
                message mixes element types.
        """
        self.gradients = {gradient.index: gradient for gradient in gradients}
        self.messages = tuple(
            Message(
                number,
                tuple(slices),
                self._bytes_of(slices),
                None if priorities is None else priorities[number],
            )
            for number, slices in enumerate(contents)
        )
        self._check_coverage()

    @cached_property
    def carriers(self) -> dict[int, tuple[int, ...]]:
        """Numbers of the messages with slices of each gradient."""
        carriers: dict[int, list[int]] = {index: [] for index in self.gradients}
        for message in self.messages:
            for index in message.gradients:
                carriers[index].append(message.number)
        return {index: tuple(numbers) for index, numbers in carriers.items()}

    def _bytes_of(self, slices: Sequence[Slice]) -> int:
        if unknown := {part.gradient for part in slices} - self.gradients.keys():
            raise ValueError(f"a message carries gradients that do not exist: {sorted(unknown)}")
        owners = [self.gradients[part.gradient] for part in slices]
        if len({owner.dtype for owner in owners}) > 1:
            raise ValueError("a message mixes element types")
        return sum(
            part.elements * owner.element_bytes for part, owner in zip(slices, owners, strict=True)
        )

    def _check_coverage(self) -> None:
        parts: dict[int, list[Slice]] = {index: [] for index in self.gradients}
        for message in self.messages:
            for part in message.slices:
                parts[part.gradient].append(part)
        for index, slices in parts.items():
            gradient = self.gradients[index]
            reached = 0
            for part in sorted(slices, key=lambda part: part.start):
                if part.start != reached or part.stop < part.start:
                    raise ValueError(
                        f"gradient {gradient.name!r}: element {min(part.start, reached)} "
                        "travels twice or not at all"
                    )
                reached = part.stop
            if reached != gradient.elements:
                raise ValueError(
                    f"gradient {gradient.name!r}: {reached} of {gradient.elements} elements travel"
                )


def whole(gradient: Gradient) -> Slice:
    """The slice that is all of a gradient."""
    return Slice(gradient.index, 0, gradient.elements)


def plan_in_order(gradients: Sequence[Gradient]) -> MessagePlan:
    """Messages of one element type and some 32 MiB each, in the order of the gradients."""
    parts: list[list[Gradient]] = []
    by_type: dict[str, list[Gradient]] = {}
    for gradient in gradients:
        part = by_type.get(gradient.dtype)
        if part is None or sum(each.bytes for each in part) >= _MESSAGE_BYTES:
            part = by_type[gradient.dtype] = []
            parts.append(part)
        part.append(gradient)
    return MessagePlan(gradients, [[whole(each) for each in part] for part in parts])
