"""Found by Python at start-up because the launcher put this folder on ``PYTHONPATH``.

It arms the tracer, removes its folder from the import path and loads the ``sitecustomize`` that
it shadows. Nothing here may raise or print: every Python process below the launcher runs it.
"""

import os
import sys


def _run_shadowed_sitecustomize() -> None:
    """Loads the ``sitecustomize`` that would have been found without this one."""
    import importlib.util

    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or os.curdir) != here]
    own = sys.modules.pop("sitecustomize", None)
    importlib.invalidate_caches()
    spec = importlib.util.find_spec("sitecustomize")
    if spec is None or spec.loader is None:
        if own is not None:
            sys.modules["sitecustomize"] = own
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def _arm() -> None:
    try:
        from ddltrace.tracer.capture.inject import arm

        arm()
    except BaseException as error:  # noqa: BLE001 - the job must continue
        _report_failure(error)


def _report_failure(error: BaseException) -> None:
    """Reports to the launcher why this process is not traced."""
    try:
        import json

        config = json.loads(os.environ["DDLTRACE_CONFIG"])
        directories = [config["directory"], config.get("reports_directory")]
        report = f"{sys.executable} (pid {os.getpid()}): {type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError):
            fix = f"{sys.executable} -m pip install ddltrace"
            report = f"the job's Python, {sys.executable}, has no {error.name}: run `{fix}`"
    except BaseException:  # noqa: BLE001
        return
    # As `CaptureConfig.report_failure`, which may not be importable.
    for directory in filter(None, directories):
        try:
            with open(os.path.join(directory, f"untraced-{os.getpid()}.txt"), "w") as file:
                os.fchmod(file.fileno(), os.fstat(file.fileno()).st_mode & 0o777 | 0o600)
                file.write(report[:500])
            return
        except BaseException:  # noqa: BLE001
            continue


if os.environ.get("DDLTRACE_CONFIG"):
    _arm()
# An error in the shadowed module is shown as Python would show it without this one.
_run_shadowed_sitecustomize()
