"""Gathers the elements of a message from gradients, and writes averages back."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ddltrace.experiments.messages.message_plan import Message


class Payloads:
    """Makes flat payloads of messages; keeps a buffer for each message that has to be copied."""

    def __init__(self, *, copies: bool) -> None:
        """Creates empty buffers.

        Args:
            copies: Whether a payload never shares memory with a gradient.
        """
        self._copies = copies
        self._buffers: dict[tuple[int, int], torch.Tensor] = {}

    @torch.no_grad()
    def gather(self, message: Message, gradients: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The elements that a message carries, flat and contiguous.

        Args:
            gradients: Gradients by their index.

        Returns:
            A view of the gradient, if the message carries one piece of its memory, else a
            buffer that holds until the same message is gathered again.
        """
        if len(message.slices) == 1 and not self._copies:
            (part,) = message.slices
            gradient = gradients[part.gradient]
            if gradient.is_contiguous():
                return gradient.view(-1)[part.start : part.stop]
        like = gradients[message.slices[0].gradient]
        # A message with the same number can be fused with others or not; the sizes differ.
        key = (message.number, message.elements)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.dtype != like.dtype or buffer.device != like.device:
            buffer = torch.empty(message.elements, dtype=like.dtype, device=like.device)
            if not message.parts:
                self._buffers[key] = buffer
        at = 0
        for part in message.slices:
            flat = gradients[part.gradient].reshape(-1)[part.start : part.stop]
            buffer[at : at + part.elements] = flat
            at += part.elements
        return buffer

    @torch.no_grad()
    def scatter(
        self, message: Message, averaged: torch.Tensor, gradients: Mapping[int, torch.Tensor]
    ) -> None:
        """Writes the average of a message into the gradients, in place."""
        at = 0
        for part in message.slices:
            target = gradients[part.gradient]
            source = averaged[at : at + part.elements]
            at += part.elements
            if target.is_contiguous():
                place = target.view(-1)[part.start : part.stop]
                if place.data_ptr() != source.data_ptr():
                    place.copy_(source)
            else:
                # Elements of a flattened strided gradient have no view: copy by way of one.
                flat = target.reshape(-1)
                flat[part.start : part.stop] = source
                target.copy_(flat.view_as(target))
