"""Every patch of somebody else's code, one file per thing patched.

A patch calls what it replaces exactly once, with the arguments it was given, and lets its
result and its exceptions through. What the tracer adds around it may fail: then the failure
is noted and the job goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddltrace.tracer.capture.session import Session
    from ddltrace.tracer.native.library import NativeLibrary


def install(session: Session) -> None:
    """Patches what the session's level asks for.

    Args:
        session: The recording rank.
    """
    from ddltrace.tracer.interpose import (
        autograd,
        data_loader,
        ddp,
        fsdp,
        modules,
        operators,
        optimizers,
        swaps,
    )
    from ddltrace.tracer.interpose.c10d import collectives

    session.native = _native_library(session)
    patches = [collectives, autograd, swaps, optimizers, data_loader, modules, ddp, fsdp]
    if session.config.level == "op":
        patches.append(operators)
    for patch in patches:
        try:
            patch.install(session)
        except Exception as error:  # noqa: BLE001 - one missing patch must not cost the others
            session.fault(f"install {patch.__name__}", error)


def _native_library(session: Session) -> NativeLibrary | None:
    """What records without Python, if it was compiled for this PyTorch.

    To be loaded at the start: later, the job's threads are to keep off the disk.
    """
    from ddltrace.tracer.native import build
    from ddltrace.tracer.native.library import NativeLibrary

    path = build.installed()
    try:
        return None if path is None else NativeLibrary(path)
    except OSError as error:
        session.fault("native library", error)
        return None
