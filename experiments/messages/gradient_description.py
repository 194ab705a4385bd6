"""Describes the gradients of a model for its message plan."""

from __future__ import annotations

import torch

from ddltrace.experiments.messages.message_plan import Gradient


def describe_gradient(
    index: int, name: str, parameter: torch.Tensor, use: int | None = None
) -> Gradient:
    """Describes the gradient of a parameter for a schedule.

    Args:
        index: Index of the parameter among those of the model.
        name: Qualified name of the parameter.
        parameter: The parameter.
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
