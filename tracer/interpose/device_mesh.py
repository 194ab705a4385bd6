"""Device meshes: the dimensions for which PyTorch uses a group that exists already.

PyTorch describes the groups that it creates for a mesh by the names of its dimensions. For a
dimension of all ranks, such as that of a mesh with one dimension, it uses the default group.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from ddltrace.tracer.interpose.import_hooks import after_import

if TYPE_CHECKING:
    from ddltrace.tracer.interpose.patch_context import PatchContext


def install(context: PatchContext) -> None:
    """Patches the function of ``DeviceMesh`` that finds its groups, when a job loads it.

    Args:
        context: The parts of the recording rank.
    """
    after_import("torch.distributed.device_mesh", functools.partial(_patch, context))


def _patch(context: PatchContext, module: Any) -> None:
    mesh_class: Any = getattr(module, "DeviceMesh", None)
    original = vars(mesh_class).get("_init_process_groups") if mesh_class else None
    if not isinstance(original, staticmethod):
        return  # another version of PyTorch: the default group stays without a dimension
    from torch._C._distributed_c10d import _resolve_process_group

    find_groups = original.__func__

    @functools.wraps(find_groups)
    def _init_process_groups(layout: Any, rank_map: Any, names: Any, *args: Any, **kw: Any) -> Any:
        found = find_groups(layout, rank_map, names, *args, **kw)
        try:
            for name, group_name in zip(names or (), found, strict=False):
                group = _resolve_process_group(group_name)
                context.groups.describe(group, f"mesh_{name}")
        except Exception as error:  # noqa: BLE001 - the job continues
            context.fault("device mesh", error)
        return found

    mesh_class._init_process_groups = staticmethod(_init_process_groups)
