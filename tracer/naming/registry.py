"""Names for what the job trains: modules by identity, parameters and gradients by address."""

from __future__ import annotations

import dataclasses
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from ddltrace.tracer.naming.gradient_access import GradientAccess
from ddltrace.tracer.naming.ready_gradients import ReadyGradients
from ddltrace.tracer.naming.weak_identity import WeakIdentityMap
from ddltrace.tracer.record.recorder import Recorder
from ddltrace.tracer.trace.run_info import TensorInfo

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ddltrace.tracer.naming.gradient_ready_times import NativeGradients

# Modules that wrap one other module, and the attribute that holds it: their own name would
# only stand in the way of the names that the user knows.
_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
}


_MAX_TENSORS: Final = 1 << 17

_NOTHING: Final = 0
_VALUES: Final = 1
_GRADIENTS_TOO: Final = 2


class _Carried(threading.local):
    """What the messages are about that a thread begins.

    Attributes:
        now: Their name and their parameters, if it was said.
    """

    now: tuple[str | None, list[int] | None] | None = None


class Registry:
    """Knows the job's modules and parameters.

    Args:
        recorder: Where modules record.
        ready: Which gradients are ready; by default new.
        native: What notes first that gradients are ready, in C++; None if only Python does. It
            notes them in `ready`.

    Attributes:
        layer_site: Recording site of a module, by ``id(module)``; entries leave with their
            module, since an id can be given to another object later.
        tensors: Every parameter seen, in order of its id.
        changed: Set when `tensors` has grown since it was last written out.
        ready: Ids of parameters whose gradients became ready since the last look-up.
        ready_in_backward: The same since the backward pass began.
        trained: Ids of parameters that ever had a gradient.
        carried: What the messages are about that a thread begins now.
        frozen: Parameters that wanted no gradient when last seen, by id.
        unnamed: Parameters beyond those that are kept; messages do not name them.
        native: See above.
        access: Who may look at gradients.
    """

    def __init__(
        self,
        recorder: Recorder,
        ready: ReadyGradients | None = None,
        native: NativeGradients | None = None,
    ) -> None:
        self._recorder = recorder
        ready = ready or ReadyGradients()
        self.layer_site: dict[int, int] = {}
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._roots: set[int] = set()
        self.tensors: list[TensorInfo] = []
        self.changed = False
        self._parameters: list[Callable[[], torch.Tensor | None]] = []
        self._id_of: WeakIdentityMap[torch.Tensor, int] = WeakIdentityMap()
        self._id_of_name: dict[str, int] = {}
        self.unnamed = 0
        self.native = native
        self.access = GradientAccess()
        self.ready = ready.latest
        self.ready_in_backward = ready.in_backward
        self._by_address: dict[int, int] = {}
        self._scanned = _NOTHING  # what was indexed of all parameters in this step
        self.trained = ready.trained
        self.frozen: dict[int, weakref.ref[torch.Tensor]] = {}
        self.carried = _Carried()
        self._shards: WeakIdentityMap[torch.Tensor, bool] = WeakIdentityMap()

    def is_known(self, module: nn.Module) -> bool:
        """Whether the module was registered as a root or inside one."""
        return id(module) in self._modules

    def is_root(self, module: nn.Module) -> bool:
        """Whether the module's own tree has been registered through it."""
        return id(module) in self._roots

    def add_model(self, model: nn.Module) -> list[tuple[int, torch.Tensor]]:
        """Registers a module tree under its qualified names.

        Args:
            model: An outermost module: what the job calls.

        Returns:
            The parameters that were not known before, with their ids.
        """
        self._roots.add(id(model))
        while (inner := _WRAPPERS.get(type(model).__name__)) is not None:
            self._add_module("", model)
            model = getattr(model, inner)
        for name, module in model.named_modules():
            self._add_module(_plain(name), module)
        return self.add_parameters(model.named_parameters())

    def add_parameters(
        self, named: Iterable[tuple[str, torch.Tensor]]
    ) -> list[tuple[int, torch.Tensor]]:
        """Registers parameters; known ones keep their first name.

        One that comes when another of the same name, shape and type is gone takes its place: a
        job that copies or builds its model again and again does not make us grow.

        Returns:
            The parameters that were not known before, with their ids.
        """
        new = []
        for qualified, parameter in named:
            if self.tensor_id(parameter) is not None:
                continue
            tensor = self._place(_plain(qualified), parameter)
            if tensor is None:
                self.unnamed += 1
                continue
            self.refer_to(parameter, tensor)
            new.append((tensor, parameter))
        return new

    def _place(self, name: str, parameter: torch.Tensor) -> int | None:
        """The id for a new parameter: of one that is gone, or the next; None if all are taken."""
        info = TensorInfo(
            id=len(self.tensors),
            name=name,
            shape=tuple(parameter.shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
            bytes=parameter.numel() * parameter.element_size(),
        )
        number = 1
        while (former := self._id_of_name.get(info.name)) is not None:
            same = (self.tensors[former].shape, self.tensors[former].dtype)
            if self._parameters[former]() is None and same == (info.shape, info.dtype):
                self.collect_ready()
                self.trained.discard(former)
                self.frozen.pop(former, None)
                return former
            number += 1  # a second model with the same layers
            info = dataclasses.replace(info, name=f"{name}#{number}")
        if info.id >= _MAX_TENSORS:
            return None
        self._id_of_name[info.name] = info.id
        self.tensors.append(info)
        self._parameters.append(weakref.ref(parameter))
        self.changed = True
        return info.id

    def tensor_id(self, parameter: torch.Tensor) -> int | None:
        """The id of a registered parameter."""
        return self._id_of.get(parameter)

    def let_go(self, parameter: torch.Tensor) -> int | None:
        """Refers no longer to a parameter, not even weakly, until `refer_to`.

        Returns:
            Its id; None if it is none that is known.
        """
        self._shards.pop(parameter)
        number = self._id_of.pop(parameter)
        if number is not None:
            self._parameters[number] = _nobody
            self.frozen.pop(number, None)
        return number

    def refer_to(self, parameter: torch.Tensor, tensor: int) -> None:
        """Refers to a parameter, weakly."""
        self._id_of.set(parameter, tensor)
        self._parameters[tensor] = weakref.ref(parameter)
        self._scanned = _NOTHING

    def thawed(self) -> list[tuple[int, torch.Tensor]]:
        """Parameters that were frozen and no longer are, with their ids."""
        thawed = []
        for tensor, reference in list(self.frozen.items()):
            parameter = reference()
            if parameter is None:
                del self.frozen[tensor]
            elif parameter.requires_grad:
                del self.frozen[tensor]
                thawed.append((tensor, parameter))
        return thawed

    def carry(
        self, name: str | None, tensors: Sequence[int | None]
    ) -> tuple[str | None, list[int] | None]:
        """What is `carried` by messages about some parameters.

        Args:
            name: The messages' name; by default after the parameters.
            tensors: Ids; None for a parameter that is not registered.
        """
        known = [t for t in tensors if t is not None]
        whole = known if known and len(known) == len(tensors) else None
        return name or (self.name_of(whole) if whole else None), whole

    def name_of(self, tensors: Sequence[int]) -> str:
        """A name for some parameters together: the first one's, and how many more."""
        first = self.tensors[tensors[0]].name
        return f"{first} +{len(tensors) - 1}" if len(tensors) > 1 else first

    def add_shard(self, parameter: torch.Tensor) -> None:
        """Notes a parameter that is only a part, whose gradient comes after its reduction."""
        self._shards.set(parameter, True)

    def is_shard(self, parameter: torch.Tensor) -> bool:
        """Whether it was noted as a part of a parameter."""
        return self._shards.get(parameter) is not None

    def set_shape(self, tensor: int, shape: tuple[int, ...]) -> None:
        """Says how large a parameter is of which only a part was seen."""
        info = self.tensors[tensor]
        parameter = self._parameters[tensor]()
        if parameter is None or info.shape == shape:
            return
        num_bytes = math.prod(shape) * parameter.element_size()
        self.tensors[tensor] = dataclasses.replace(info, shape=shape, bytes=num_bytes)
        self.changed = True

    def model_is_trained(self, model: nn.Module) -> bool:
        """Whether a gradient of one of the model's parameters was ever seen."""
        self.collect_ready()
        return any(self.tensor_id(p) in self.trained for p in model.parameters())

    def tensors_at(
        self, tensors: Sequence[torch.Tensor], at: tuple[int, int] | None = None
    ) -> list[int] | None:
        """Which parameters' values or gradients lie in these tensors, by address.

        Args:
            tensors: What a message holds.
            at: Where the elements of the only tensor lie, and where its memory begins, if known.

        Returns:
            Ids, or None if any of the tensors holds something else, or a gradient that this
            thread must not look at.
        """
        by_address = self._by_address
        if (
            at is not None
            and at[0] not in by_address
            and at[1] not in by_address
            and self._scanned == _GRADIENTS_TOO
            # In this order: what was news is ready before it is none any more.
            and (self.native is None or not self.native.has_news)
            and not self.ready
        ):
            return None  # on the way of most launches: nothing can have changed
        found = []
        at_ready = self.access.may_look_at_ready()
        if at_ready:
            self._index_ready()
        for tensor in tensors:
            addresses = at or _addresses(tensor)
            number = self._find(tensor, addresses, at_ready=at_ready)
            if number is None and self._scanned < _GRADIENTS_TOO and self._scan():
                number = self._find(tensor, addresses, at_ready=at_ready)
            if number is None:
                return None
            found.append(number)
        return found or None

    def collect_ready(self) -> None:
        """Notes as ready what is: to be called before anybody looks."""
        if self.native is not None:
            self.native.collect()

    def note_ready(self, tensors: Sequence[int]) -> None:
        """Gradients have become ready, in this order."""
        self.ready.extend(tensors)
        self.ready_in_backward.extend(tensors)
        self.trained.update(tensors)

    def begin_backward(self) -> None:
        """A new backward pass begins."""
        if self.native is None:
            self.ready_in_backward.clear()
        else:
            self.native.begin_backward(paused=self._recorder.paused)
        most = 2 * len(self.tensors)
        if len(self.ready) > most or len(self._by_address) > 2 * most:
            self.forget_gradients()  # a job without messages never looks them up

    def forget_gradients(self) -> None:
        """Gradients may be freed and their memory reused: at the end of a step."""
        self._by_address.clear()
        if self.native is None:
            self.ready.clear()
        else:
            self.native.end_step()
        self._scanned = _NOTHING

    def _find(
        self, tensor: torch.Tensor, addresses: tuple[int, int], *, at_ready: bool
    ) -> int | None:
        """The parameter in whose value or gradient a tensor lies, as a whole or a part."""
        for address in addresses:
            number = self._by_address.get(address)
            parameter = None if number is None else self._parameters[number]()
            if parameter is None:
                continue
            # Memory can be given to others: what lies there now must be the parameter's.
            for own in (parameter.grad if at_ready else None, parameter):
                if own is not None and address == _address(own) and _fits(tensor, own):
                    return number
        return None

    def _index_ready(self) -> None:
        self.collect_ready()
        while self.ready:
            number = self.ready.pop()
            parameter = self._parameters[number]()
            if parameter is not None and parameter.grad is not None:
                self._by_address[_address(parameter.grad)] = number
        self._by_address.pop(0, None)  # of tensors without elements

    def _scan(self) -> bool:
        """Indexes every parameter and gradient: once a step, for messages not foreseen.

        Returns:
            Whether anything that this thread may look at was not indexed before.
        """
        gradients = self.access.may_look()
        wanted = _GRADIENTS_TOO if gradients else _VALUES
        if self._scanned >= wanted:
            return False
        self._scanned = wanted
        for number, reference in enumerate(self._parameters):
            parameter = reference()
            if parameter is None:
                continue
            for tensor in (parameter, parameter.grad if gradients else None):
                if tensor is not None:
                    self._by_address[_address(tensor)] = number
        self._by_address.pop(0, None)
        return True

    def _add_module(self, name: str, module: nn.Module) -> None:
        key = id(module)
        if key in self._modules:
            return

        def forget(_: object, key: int = key) -> None:
            self.layer_site.pop(key, None)
            self._modules.pop(key, None)
            self._roots.discard(key)

        self._modules[key] = weakref.ref(module, forget)
        self.layer_site[key] = self._recorder.site("layer", name or type(module).__name__)


def _nobody() -> None:
    """What is left of a parameter that is gone."""


def _address(tensor: torch.Tensor) -> int:
    """Where a tensor's elements lie; 0 if it has none."""
    local = getattr(tensor, "_local_tensor", tensor)  # a DTensor has no memory of its own
    return (local._values() if local.is_sparse else local).data_ptr()


def _addresses(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor's elements lie, and where its memory begins."""
    address = _address(tensor)
    return address, address if tensor.is_sparse else tensor.untyped_storage().data_ptr()


def _fits(tensor: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether a tensor at the address of another is no more than that."""
    if tensor.is_sparse or own.is_sparse:
        return tensor.is_sparse and own.is_sparse
    local = getattr(own, "_local_tensor", own)
    return tensor.numel() <= local.numel() and tensor.dtype == local.dtype


def _plain(name: str) -> str:
    """A qualified name without the parts that wrappers inside the model put into it."""
    hidden = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
    return ".".join(part for part in name.split(".") if part not in hidden)
