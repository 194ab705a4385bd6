"""Installs the patches."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddltrace.tracer.interpose.c10d.waits import Waits
    from ddltrace.tracer.interpose.patch_context import PatchContext


def install(context: PatchContext) -> Waits | None:
    """Installs the patches of the configured level. A patch that fails does not affect the others.

    Args:
        context: The parts of the recording rank.

    Returns:
        The recorder of the host's waits; None if it could not be installed.
    """
    from ddltrace.tracer.interpose import (
        autograd,
        checkpoints,
        data_loader,
        ddp,
        device_mesh,
        fsdp,
        garbage_collection,
        modules,
        optimizers,
        swaps,
    )
    from ddltrace.tracer.interpose.c10d import c10d_kernels, group_destruction

    waits = None
    try:
        waits = c10d_kernels.install(context)
    except Exception as error:  # noqa: BLE001 - see above
        context.fault(f"install {c10d_kernels.__name__}", error)
    patches = [
        *(autograd, swaps, optimizers, data_loader, modules, ddp, device_mesh, fsdp),
        *(checkpoints, garbage_collection, group_destruction),
    ]
    for patch in patches:
        try:
            patch.install(context)
        except Exception as error:  # noqa: BLE001 - see above
            context.fault(f"install {patch.__name__}", error)
    return waits
