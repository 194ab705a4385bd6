"""Determines which parameters the buckets of DistributedDataParallel carry.

The reducer is written in C++ and reveals the contents of its buckets only after some iterations.
Until then they are inferred: the reducer launches buckets in order, each when its last gradient is
ready, and the size of a bucket is known. An inference is used only if the sizes agree.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ddltrace.tracer.trace.schema import BUCKET

if TYPE_CHECKING:
    import torch

    from ddltrace.tracer.interpose.backward_pass import BackwardPass
    from ddltrace.tracer.interpose.c10d.groups import Group, Groups
    from ddltrace.tracer.interpose.c10d.known_messages import KnownMessages
    from ddltrace.tracer.naming.registry import Registry
    from ddltrace.tracer.record.recorder import Message

# The reducer logs its first ten iterations. One that never rebuilds its buckets (unused parameters
# may change) never logs them.
_MAX_QUESTIONS: Final = 12


class _Bucket(NamedTuple):
    """The content of one message of a reducer.

    Attributes:
        indices: Indices of its parameters in the model.
        numel: Total number of elements.
        tensors: Ids of the parameters; None if one of them is not registered.
    """

    indices: list[int]
    numel: int
    tensors: list[int] | None


class _Model:
    """One wrapped model and its buckets, as far as known."""

    def __init__(
        self, ddp: Any, group: str, parameters: Sequence[torch.Tensor], ids: list[int | None]
    ) -> None:
        self.ddp = weakref.ref(ddp)
        self.group = group
        self.numel = [p.numel() for p in parameters]
        self.ids = ids
        self.index_of_tensor = {t: i for i, t in enumerate(ids) if t is not None}
        self.buckets: list[_Bucket] | None = None
        self.settled = False
        self.asked = 0
        self.backward = -1  # number of the backward pass to which `launched` refers
        self.launched: list[_Bucket] = []
        self.ready_order: list[int] | None = None
        self.known: list[int] = []  # positions of its first buckets among the known messages

    def bucket(self, indices: list[int]) -> _Bucket:
        """The bucket of some parameters."""
        ids = [i for index in indices if (i := self.ids[index]) is not None]
        numel = sum(self.numel[index] for index in indices)
        return _Bucket(indices, numel, ids if len(ids) == len(indices) else None)

    def lasting(self, tensors: list[int] | None) -> int | None:
        """The bucket that will have exactly these tensors in every further backward pass."""
        if self.settled and self.buckets is not None and tensors is not None:
            for number, bucket in enumerate(self.buckets):
                if bucket.tensors is tensors:
                    return number
        return None


class DdpBuckets:
    """Determines the parameters that an all-reduce of DDP's reducer carries.

    Args:
        registry: The ids of parameters, and which gradients are ready.
        groups: The process groups.
        backward: State of the current backward pass.
        known: The messages that C++ records without Python; None if there are none.

    Attributes:
        in_use: Whether a model was ever wrapped.
    """

    def __init__(
        self,
        registry: Registry,
        groups: Groups,
        backward: BackwardPass,
        known: KnownMessages | None,
    ) -> None:
        self._registry = registry
        self._groups = groups
        self._backward = backward
        self._known = known
        self._models: list[_Model] = []
        self.in_use = False

    def add(self, ddp: Any, initial: list[list[int]] | None) -> None:
        """Registers a wrapped model.

        Args:
            ddp: The wrapper.
            initial: Parameter indices of each bucket, in the order of launch.
        """
        parameters, _ = ddp._build_params_for_reducer()
        ids = [self._registry.tensor_id(p) for p in parameters]
        group = self._groups.of(ddp.process_group)
        model = _Model(ddp, group.name, parameters, ids)
        model.buckets = None if initial is None else [model.bucket(b) for b in initial]
        self._models = [m for m in self._models if m.ddp() is not None]
        self._models.append(model)
        self.in_use = True

    def knows(self, ddp: Any) -> bool:
        """Whether a wrapped model was registered."""
        return any(model.ddp() is ddp for model in self._models)

    def begin_backward(self) -> None:
        """Asks the reducers for their rebuilt buckets until they are available.

        Not to be called while a reducer launches a bucket: it holds the lock that the answer
        needs.
        """
        for model in self._models:
            ddp = model.ddp()
            if model.settled or ddp is None or model.asked >= _MAX_QUESTIONS:
                continue
            model.asked += 1
            data = ddp._get_ddp_logging_data()
            rebuilt = data.get("rebuilt_per_bucket_param_indices")
            order = data.get("prev_iteration_grad_ready_order_indices")
            if order:
                model.ready_order = [int(i) for i in order.replace(",", " ").split()]
            if rebuilt:
                model.buckets = [
                    model.bucket([int(i) for i in bucket.split()]) for bucket in rebuilt.split(",")
                ]
                model.settled = True

    def bucket_of(self, group: str, tensor: torch.Tensor) -> tuple[str, list[int] | None] | None:
        """Name and parameters of the bucket that a message of C++ code carries.

        Args:
            group: The group of an all-reduce that was launched below autograd's engine.

        Returns:
            None if the message is not a bucket of a known model.
        """
        state = self._backward
        if not state.depth:
            return None
        known = self._known
        like = None if known is None else known.passing()
        if like is not None:
            state.bucket_messages += 1
            return like.name, like.tensors
        self._registry.collect_ready()
        for model in self._senders(group):
            if not (tensor.is_floating_point() or tensor.is_complex()):
                state.bucket_messages += 1
                return "unused parameters", None
            if model.backward != state.started:
                model.backward, model.launched = state.started, []
            found = self._match(model, tensor)
            if found is None:
                continue
            state.bucket_messages += 1
            name = f"{BUCKET}{len(model.launched)}"
            model.launched.append(found)
            return name, found.tensors
        return None

    def make_known(self, known: KnownMessages, message: Message, group: Group) -> None:
        """Lets C++ record a bucket from now on, if every backward pass will send the same.

        All buckets of a model or none: the others are identified by their order.

        Args:
            known: Records known messages.
            message: The bucket's message, which this thread is launching.
        """
        for model in self._models:
            number = model.lasting(message.tensors)
            if number is None:
                continue
            if number == 0:
                model.known = []
            place = known.add(message, group) if number == len(model.known) else None
            if place is not None:
                model.known.append(place)
            if place is not None and len(model.known) == len(model.buckets or ()):
                known.activate(model.known)
            return

    def _senders(self, group: str) -> list[_Model]:
        """The models whose reducer may send now, since one of their gradients became ready."""
        ready = self._registry.ready_in_backward
        newest: list[_Model] = []
        others: list[_Model] = []
        for model in self._models:
            if model.group == group and model.ddp() is not None:
                sends = ready and ready[-1] in model.index_of_tensor
                (newest if sends else others).append(model)
        # At the end of backward a reducer also sends parameters that got no gradient.
        return newest or [m for m in others if any(t in m.index_of_tensor for t in ready)]

    def _match(self, model: _Model, tensor: torch.Tensor) -> _Bucket | None:
        """The parameters whose sizes add up to the bucket's; the most reliable source first."""
        numel = tensor.numel()
        known = None
        if model.buckets is not None and len(model.launched) < len(model.buckets):
            known = model.buckets[len(model.launched)]
        fits = known is not None and known.numel == numel
        if fits and model.settled:
            return known
        # All gradients that are ready and not sent yet.
        sent = {index for bucket in model.launched for index in bucket.indices}
        ready = model.bucket(
            [
                index
                for t in self._registry.ready_in_backward
                if (index := model.index_of_tensor.get(t)) is not None and index not in sent
            ]
        )
        if ready.indices and ready.numel == numel:
            return ready
        if fits:
            return known
        if model.ready_order is not None:
            prefix = _prefix([i for i in model.ready_order if i not in sent], model.numel, numel)
            if prefix is not None:
                return model.bucket(prefix)
        return None


def _prefix(order: list[int], numel_of: list[int], numel: int) -> list[int] | None:
    """The first items of an order whose sizes add up exactly."""
    total = 0
    for count, index in enumerate(order, 1):
        total += numel_of[index]
        if total == numel:
            return order[:count]
        if total > numel:
            return None
    return None
