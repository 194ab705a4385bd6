"""Found by Python at start-up because the launcher put this folder on ``PYTHONPATH``.

It arms the tracer, steps out of the way and gives the ``sitecustomize`` that it shadows its
turn. Nothing here may raise or print: every Python process below the launcher runs it.
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
    except BaseException as error:  # noqa: BLE001 - the job goes on whatever happens here
        _leave_word(error)


def _leave_word(error: BaseException) -> None:
    """Tells the launcher why this process is not traced, in case no rank is."""
    try:
        import json

        config = json.loads(os.environ["DDLTRACE_CONFIG"])
        directories = [config["directory"], config.get("words")]
        word = f"{sys.executable} (pid {os.getpid()}): {type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError):
            fix = f"{sys.executable} -m pip install ddltrace"
            word = f"the job's Python, {sys.executable}, has no {error.name}: run `{fix}`"
    except BaseException:  # noqa: BLE001
        return
    # As `CaptureConfig.leave_word`, which may be what cannot be imported.
    for directory in filter(None, directories):
        try:
            with open(os.path.join(directory, f"untraced-{os.getpid()}.txt"), "w") as file:
                file.write(word[:500])
            return
        except BaseException:  # noqa: BLE001
            continue


if os.environ.get("DDLTRACE_CONFIG"):
    _arm()
# An error of the shadowed module is the user's own and is shown as Python would show it.
_run_shadowed_sitecustomize()
