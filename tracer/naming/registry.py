"""Identifies what the job trains: modules by identity, parameters and gradients by address."""

from __future__ import annotations

import dataclasses
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
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

# Modules that wrap one other module, and the attribute that holds it. Their names are left out of
# qualified names, so that users see the names that they gave.
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
    """The subject of the messages that a thread launches now.

    Attributes:
        now: The messages' name and parameters; None if not declared.
    """

    now: tuple[str | None, list[int] | None] | None = None


class Registry:
    """The job's modules and parameters.

    Args:
        recorder: Allocates the modules' recording sites.
        ready: The ready gradients; by default a new object.
        native: Records ready gradients in C++ and adds them to `ready`; None if only Python does.

    Attributes:
        layer_site: Recording site of a module, by ``id(module)``. An entry is removed with its
            module, since the id can be reused for another object.
        tensors: Every parameter seen, in the order of the ids.
        changed: Set when `tensors` has grown since it was last written.
        ready: Ids of parameters whose gradients became ready since the last look-up.
        ready_in_backward: The same since the backward pass began.
        trained: Ids of parameters that ever had a gradient.
        carried: The subject of the messages that a thread launches now.
        frozen: Parameters that did not require a gradient when last seen, by id.
        unnamed: Number of parameters beyond the limit; messages do not name them.
        native: The argument.
        access: Decides which threads may read gradients.
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
        self._scanned = _NOTHING  # parameters and gradients that `_scan` indexed in this step
        self.trained = ready.trained
        self.frozen: dict[int, weakref.ref[torch.Tensor]] = {}
        self.carried = _Carried()
        self._shards: WeakIdentityMap[torch.Tensor, bool] = WeakIdentityMap()

    def is_known(self, module: nn.Module) -> bool:
        """Whether the module was registered, as a root or inside one."""
        return id(module) in self._modules

    def add_model(self, model: nn.Module) -> list[tuple[int, torch.Tensor]]:
        """Registers a module tree under its qualified names.

        Args:
            model: An outermost module, which the job calls.

        Returns:
            The parameters that were not known before, with their ids.
        """
        while (inner := _WRAPPERS.get(type(model).__name__)) is not None:
            self._add_module("", model)
            model = getattr(model, inner)
        try:
            modules = [*model.named_modules()]
        except ValueError:  # a RemoteModule in the tree refuses to be asked
            modules = [*_local_modules("", model)]
        for name, module in modules:
            self._add_module(_plain(name), module)
        return self.add_parameters(_named_parameters(model))

    def add_parameters(
        self, named: Iterable[tuple[str, torch.Tensor]]
    ) -> list[tuple[int, torch.Tensor]]:
        """Registers parameters; known ones keep their first name.

        A new parameter takes the id of a deleted one with the same name, shape and type. So a job
        that copies or rebuilds its model repeatedly does not make the registry grow.

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
        """An id for a new parameter: that of a deleted one, or the next; None at the limit."""
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

    def name_like(self, stand_in: torch.Tensor, parameter: torch.Tensor) -> None:
        """Gives another tensor the id of a parameter, such as this rank's part of it."""
        number = self.tensor_id(parameter)
        if number is not None:
            self._id_of.set(stand_in, number)

    def drop_reference(self, parameter: torch.Tensor) -> int | None:
        """Drops the weak reference to a parameter until `refer_to`.

        Returns:
            Its id; None if the parameter is not known.
        """
        self._shards.pop(parameter)
        number = self._id_of.pop(parameter)
        if number is not None:
            self._parameters[number] = _deleted
            self.frozen.pop(number, None)
        return number

    def refer_to(self, parameter: torch.Tensor, tensor: int) -> None:
        """Refers weakly to a parameter."""
        self._id_of.set(parameter, tensor)
        self._parameters[tensor] = weakref.ref(parameter)
        self._scanned = _NOTHING

    def parameter(self, tensor: int) -> torch.Tensor | None:
        """The parameter with an id; None if it does not exist any more."""
        return self._parameters[tensor]()

    def unfrozen(self) -> list[tuple[int, torch.Tensor]]:
        """Parameters that were frozen and no longer are, with their ids."""
        unfrozen = []
        for tensor, reference in list(self.frozen.items()):
            parameter = reference()
            if parameter is None:
                del self.frozen[tensor]
            elif parameter.requires_grad:
                del self.frozen[tensor]
                unfrozen.append((tensor, parameter))
        return unfrozen

    def carry(
        self, name: str | None, tensors: Sequence[int | None]
    ) -> tuple[str | None, list[int] | None]:
        """Builds a value of `carried` for messages about some parameters.

        Args:
            name: The messages' name; by default derived from the parameters.
            tensors: Ids; None for a parameter that is not registered.
        """
        known = [t for t in tensors if t is not None]
        whole = known if known and len(known) == len(tensors) else None
        return name or (self.name_of(whole) if whole else None), whole

    def name_of(self, tensors: Sequence[int]) -> str:
        """A common name of some parameters: the name of the first, and the number of the others."""
        first = self.tensors[tensors[0]].name
        return f"{first} +{len(tensors) - 1}" if len(tensors) > 1 else first

    def add_shard(self, parameter: torch.Tensor) -> None:
        """Notes that a parameter is a shard, whose gradient appears after its reduction."""
        self._shards.set(parameter, True)

    def is_shard(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter was noted as a shard."""
        return self._shards.get(parameter) is not None

    def set_shape(self, tensor: int, shape: tuple[int, ...]) -> None:
        """Sets the full shape of a parameter of which only a shard was seen."""
        info = self.tensors[tensor]
        parameter = self._parameters[tensor]()
        if parameter is None or info.shape == shape:
            return
        num_bytes = math.prod(shape) * parameter.element_size()
        self.tensors[tensor] = dataclasses.replace(info, shape=shape, bytes=num_bytes)
        self.changed = True

    def model_is_trained(self, model: nn.Module) -> bool:
        """Whether any parameter of the model ever had a gradient."""
        self.collect_ready()
        return any(self.tensor_id(p) in self.trained for _, p in _named_parameters(model))

    def tensors_at(
        self, tensors: Sequence[torch.Tensor], at: tuple[int, int] | None = None
    ) -> list[int] | None:
        """Finds the parameters whose values or gradients lie in tensors, by address.

        Args:
            tensors: The tensors of a message.
            at: Addresses of the elements and of the storage of a single tensor, if known.

        Returns:
            Ids; None if a tensor holds anything else, or a gradient that this thread must not
            read.
        """
        by_address = self._by_address
        if (
            at is not None
            and at[0] not in by_address
            and at[1] not in by_address
            and self._scanned == _GRADIENTS_TOO
            # The order matters: an entry becomes ready before it stops being new.
            and (self.native is None or not self.native.has_news)
            and not self.ready
        ):
            return None  # the usual case: nothing can have changed
        found = []
        at_ready = self.access.may_read_ready()
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
        """Updates the ready gradients from C++; call it before reading them."""
        if self.native is not None:
            self.native.collect()

    def note_ready(self, tensors: Sequence[int]) -> None:
        """Adds gradients that became ready, in this order."""
        self.ready.extend(tensors)
        self.ready_in_backward.extend(tensors)
        self.trained.update(tensors)

    def begin_backward(self) -> None:
        """Notes the start of a backward pass."""
        if self.native is None:
            self.ready_in_backward.clear()
        else:
            self.native.begin_backward(paused=self._recorder.paused)
        most = 2 * len(self.tensors)
        if len(self.ready) > most or len(self._by_address) > 2 * most:
            self.forget_gradients()  # a job without messages never looks them up

    def forget_gradients(self) -> None:
        """Forgets gradient addresses at the end of a step: their memory may be freed and reused."""
        self._by_address.clear()
        if self.native is None:
            self.ready.clear()
        else:
            self.native.end_step()
        self._scanned = _NOTHING

    def _find(
        self, tensor: torch.Tensor, addresses: tuple[int, int], *, at_ready: bool
    ) -> int | None:
        """The parameter whose value or gradient contains a tensor."""
        for address in addresses:
            number = self._by_address.get(address)
            parameter = None if number is None else self._parameters[number]()
            if parameter is None:
                continue
            # Memory can be reused: the object there must still be the parameter's.
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
        self._by_address.pop(0, None)  # tensors without elements

    def _scan(self) -> bool:
        """Indexes all parameters and gradients, once per step, for messages not foreseen.

        Returns:
            Whether it indexed anything new that this thread may read.
        """
        gradients = self.access.may_read()
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

        self._modules[key] = weakref.ref(module, forget)
        self.layer_site[key] = self._recorder.site("layer", name or type(module).__name__)


def _deleted() -> None:
    """Stands for a deleted parameter."""


def _address(tensor: torch.Tensor) -> int:
    """The address of a tensor's elements; 0 if it has none."""
    local = getattr(tensor, "_local_tensor", tensor)  # a DTensor has no memory of its own
    return (local._values() if local.is_sparse else local).data_ptr()


def _addresses(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of a tensor's elements and of its storage."""
    address = _address(tensor)
    return address, address if tensor.is_sparse else tensor.untyped_storage().data_ptr()


def _fits(tensor: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether a tensor at the address of another does not extend beyond it."""
    if tensor.is_sparse or own.is_sparse:
        return tensor.is_sparse and own.is_sparse
    local = getattr(own, "_local_tensor", own)
    return tensor.numel() <= local.numel() and tensor.dtype == local.dtype


def _plain(name: str) -> str:
    """A qualified name without the parts that wrappers inside the model add."""
    hidden = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
    return ".".join(part for part in name.split(".") if part not in hidden)


def _local_modules(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a tree, without asking them; what is below a RemoteModule is elsewhere."""
    yield name, module
    for own, inner in module._modules.items():
        if inner is not None:
            yield from _local_modules(f"{name}.{own}" if name else own, inner)


def _named_parameters(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The parameters of a tree that are on this rank."""
    try:
        return [*model.named_parameters()]
    except ValueError:  # as above
        return [
            (f"{name}.{own}" if name else own, parameter)
            for name, module in _local_modules("", model)
            for own, parameter in module._parameters.items()
            if parameter is not None
        ]
