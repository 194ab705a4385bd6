"""Runs ``ddltrace`` with the given arguments, and ends it when its dashboard has ended.

``python -m ddltrace.dashboard.runs.supervised_run ARGUMENTS``, with a pipe as standard input that
the dashboard keeps open. A dashboard that is killed cannot cancel its run; the kernel closes the
pipe all the same, and the run then gets the signal that cancels it.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading


def main(arguments: list[str]) -> None:
    """Runs the command in this process."""
    pipe = os.dup(0)  # not inherited by the processes of the run
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def wait() -> None:
        while os.read(pipe, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="dashboard", daemon=True).start()
    sys.argv = ["ddltrace", *arguments]
    runpy.run_module("ddltrace", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
