"""Injects the tracer into a process without a change to its script.

A process below the launcher is armed when Python starts: an import hook waits until
``torch.distributed`` has been loaded, wraps ``init_process_group``, and does nothing else.
Only a process that joins a process group is a rank; agents, resource trackers and compile
workers stay as they were.
"""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType
from typing import Any, Final

from ddltrace.tracer.config import CaptureConfig
from ddltrace.tracer.interpose.import_hooks import after_import

_TARGET: Final = "torch.distributed.distributed_c10d"
_RPC: Final = "torch.distributed.rpc"
_loaded: Final[set[str]] = set()


def arm(config: CaptureConfig | None = None) -> None:
    """Makes this process record itself once it joins a process group.

    Args:
        config: How to record; by default what the launcher put into the environment.
            Without either, nothing happens.
    """
    config = config or CaptureConfig.from_environment()
    if config is None:
        return
    after_import(_TARGET, functools.partial(_wrap_init_process_group, config=config))
    after_import(_RPC, functools.partial(_wrap_init_rpc, config=config))


def _wrap_init_process_group(module: ModuleType, config: CaptureConfig) -> None:
    original = getattr(module, "init_process_group", None)
    if original is None or hasattr(original, "_ddltrace_original"):
        return

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        _start(config)
        _load_plugin(config)
        return result

    init_process_group._ddltrace_original = original  # type: ignore[attr-defined]
    module.init_process_group = init_process_group  # type: ignore[attr-defined]
    package = sys.modules.get("torch.distributed")
    if package is not None and getattr(package, "init_process_group", None) is original:
        package.init_process_group = init_process_group  # type: ignore[attr-defined]
    if module.is_initialized():
        _start(config)
        _load_plugin(config)


def _wrap_init_rpc(module: ModuleType, config: CaptureConfig) -> None:
    original = getattr(module, "init_rpc", None)
    if original is None or hasattr(original, "_ddltrace_original"):
        return

    @functools.wraps(original)
    def init_rpc(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        _start(config)
        try:
            _join_rpc()
        except Exception as error:  # noqa: BLE001 - the job continues
            config.report_failure(error)
        return result

    init_rpc._ddltrace_original = original  # type: ignore[attr-defined]
    module.init_rpc = init_rpc  # type: ignore[attr-defined]


def _join_rpc() -> None:
    from ddltrace.tracer.capture.session import current_session
    from ddltrace.tracer.interpose import rpc

    session = current_session()
    if session is not None:
        rpc.join(sys.modules[f"{_RPC}.api"], session.context, session.waits)


def _load_plugin(config: CaptureConfig) -> None:
    """Calls the plug-in, if there is one, once in a process.

    Its errors are the job's: the user asked for a job with the plug-in, not without it.
    """
    if config.plugin and config.plugin not in _loaded:
        _loaded.add(config.plugin)
        importlib.import_module(config.plugin).install(config.plugin_options)


def _start(config: CaptureConfig) -> None:
    """Begins to record; the job continues whatever happens, even if the tracer cannot load."""
    try:
        from ddltrace.tracer.capture.session import start_session

        start_session(config)
    except Exception as error:  # noqa: BLE001 - see above
        config.report_failure(error)
