"""Averages tensors other than gradients: parameters, or their differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddltrace.experiments.lazy_torch import torch
from ddltrace.experiments.messages.message_exchange import Handle, MessageExchange
from ddltrace.experiments.messages.message_plan import Message, describe_gradient, plan_in_order
from ddltrace.experiments.messages.trace_marks import carrying


@dataclass
class _Sent:
    message: Message
    handle: Handle


class ParameterExchange:
    """Averages one tensor for each parameter of a model, or of a part of it.

    Messages are of one element type and some 32 MiB each, in the order of the parameters.
    """

    def __init__(
        self, parameters: Sequence[tuple[str, torch.nn.Parameter]], exchange: MessageExchange
    ) -> None:
        """Creates the plan.

        Args:
            parameters: The parameters with their names, the same on all ranks.
            exchange: A new exchange that averages one message; it keeps state by the index of the
                parameters in this list.
        """
        self._parameters = [parameter for _, parameter in parameters]
        self._exchange = exchange
        gradients = [
            describe_gradient(index, name, parameter)
            for index, (name, parameter) in enumerate(parameters)
        ]
        self._plan = plan_in_order(gradients)
        exchange.prepare(self._plan.gradients)

    def average(self, tensors: Sequence[torch.Tensor], name: str) -> list[torch.Tensor]:
        """The averages; arguments and result as of `start` and `finish`."""
        return self.finish(self.start(tensors, name), name)

    def start(self, tensors: Sequence[torch.Tensor], name: str) -> list[_Sent]:
        """Starts to average.

        Args:
            tensors: One for each parameter, of its shape and type; they are not changed.
            name: Name of the messages in the trace.

        Returns:
            The argument of `finish`.
        """
        sent = []
        for message in self._plan.messages:
            carried = [part.gradient for part in message.slices]
            payload = torch.cat([tensors[index].reshape(-1) for index in carried])
            with carrying(name, [self._parameters[index] for index in carried]):
                sent.append(_Sent(message, self._exchange.start(message, payload)))
        return sent

    def finish(self, sent: Sequence[_Sent], name: str) -> list[torch.Tensor]:
        """Waits for the averages.

        Args:
            sent: The result of `start`.
            name: Name of the messages of a second pass in the trace.

        Returns:
            One for each parameter, in its shape.
        """
        averages: dict[int, torch.Tensor] = {}
        for entry in sent:
            carried = [part.gradient for part in entry.message.slices]
            with carrying(name, [self._parameters[index] for index in carried]):
                average = entry.handle.wait()
            at = 0
            for part in entry.message.slices:
                flat = average[at : at + part.elements]
                averages[part.gradient] = flat.view(self._parameters[part.gradient].shape)
                at += part.elements
        return [averages[index] for index in range(len(self._parameters))]
