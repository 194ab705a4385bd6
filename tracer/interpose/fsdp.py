"""Fully sharded data parallelism: the parameters of its messages, and when gradients are ready.

FSDP gathers parameters into its own buffers and reduces gradients from others, so addresses do not
identify the content of a message; the functions that fill the buffers do. The parameter that a job
sees is a shard, and its gradient appears after the reduction: here a gradient is ready when that
of the gathered parameter has been accumulated.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ddltrace.tracer.interpose.autograd import watch_gradients
from ddltrace.tracer.interpose.import_hooks import after_import
from ddltrace.tracer.naming.weak_identity import WeakIdentityMap

if TYPE_CHECKING:
    from ddltrace.tracer.interpose.patch_context import PatchContext


def install(context: PatchContext) -> None:
    """Patches FSDP2 (``fully_shard``) and FSDP1, when a job loads them.

    Args:
        context: The parts of the recording rank.
    """
    for module, patch in (
        ("torch.distributed.fsdp._fully_shard._fsdp_param_group", _patch_fsdp2),
        ("torch.distributed.fsdp._runtime_utils", _patch_fsdp1),
    ):
        after_import(module, functools.partial(_try, context, patch))


def _try(
    context: PatchContext, patch: Callable[[PatchContext, Any], None], module: ModuleType
) -> None:
    try:
        patch(context, module)
    except Exception as error:  # noqa: BLE001 - another version of PyTorch: names stay unknown
        context.fault(f"patch {module.__name__}", error)


def _patch_fsdp2(context: PatchContext, module: Any) -> None:
    registry = context.registry

    def carried(fsdp_params: Iterable[Any], *_: Any, **__: Any) -> list[int | None]:
        return [registry.tensor_id(p.sharded_param) for p in fsdp_params]

    for name in ("foreach_all_gather", "foreach_reduce"):
        context.patches.put(module, name, _named(context, getattr(module, name), carried))

    parameter_class = module.FSDPParam
    watched: WeakIdentityMap[Any, bool] = WeakIdentityMap()
    initialize, unshard = parameter_class.__init__, parameter_class.init_unsharded_param

    @functools.wraps(initialize)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        registry.add_shard(self.sharded_param)

    @functools.wraps(unshard)
    def init_unsharded_param(self: Any) -> None:
        unshard(self)
        try:
            gathered = self._unsharded_param
            if not watched.get(gathered):
                watched.set(gathered, True)
                tensor = registry.tensor_id(self.sharded_param)
                if tensor is not None:
                    watch_gradients(context, [(tensor, gathered)])
        except Exception as error:  # noqa: BLE001 - the job continues
            context.fault("unshard", error)

    parameter_class.__init__ = __init__
    context.patches.put(parameter_class, "init_unsharded_param", init_unsharded_param)


def note_sharded(context: PatchContext, module: Any) -> None:
    """Notes the shards of a module to which ``fully_shard`` was applied before the tracer was
    installed.

    Args:
        context: The parts of the recording rank.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not isinstance(module, fsdp.FSDPModule):
        return
    state: Any = module._get_fsdp_state()
    # A list in newer versions of PyTorch.
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    for group in filter(None, groups):
        for parameter in group.fsdp_params:
            context.registry.add_shard(parameter.sharded_param)


def _patch_fsdp1(context: PatchContext, module: Any) -> None:
    registry = context.registry
    known: WeakIdentityMap[Any, bool] = WeakIdentityMap()

    def carried(_: Any, handle: Any, *__: Any, **___: Any) -> list[int | None]:
        if handle is None:
            return []
        flat = handle.flat_param
        parameters = flat._params or [flat]
        tensors = [registry.tensor_id(p) for p in parameters]
        if not known.get(flat) and None not in tensors:
            known.set(flat, True)
            # The job sees this rank's shard; the trace describes the whole parameter.
            shapes = flat._shapes if flat._params else [flat._unpadded_unsharded_size]
            whole = [tensor for tensor in tensors if tensor is not None]
            for tensor, shape in zip(whole, shapes, strict=True):
                registry.set_shape(tensor, tuple(shape))
            if flat._params:
                watch_gradients(context, [(tensor, flat) for tensor in whole])
        return tensors

    for name in ("_unshard", "_reduce_grad", "_reduce_grad_no_shard"):
        context.patches.put(module, name, _named(context, getattr(module, name), carried))


def _named(
    context: PatchContext,
    original: Callable[..., Any],
    carried: Callable[..., list[int | None]],
) -> Callable[..., Any]:
    """Wraps a function and names the parameters that its messages carry."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        tensors: list[int | None] = [None]
        try:
            tensors = carried(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the job continues
            context.fault(original.__name__, error)
        with context.carrying(None, tensors):
            return original(*args, **kwargs)

    return function
