"""``analyze --to``: the summary's numbers and the HTML report in a run of an experiment tracker.

The tracker's own environment variables choose the server, the project and the run: with
``MLFLOW_TRACKING_URI`` or ``WANDB_MODE=offline``, for example, nothing leaves the machine.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from ddltrace.analyzer.formatting.units import printable
from ddltrace.analyzer.model import Analysis
from ddltrace.analyzer.report.markdown_report import render_markdown
from ddltrace.analyzer.report.threshold import values_of
from ddltrace.tracer.errors import DdltraceError

PREFIX: Final = "ddltrace/"
_MAX_REASON: Final = 200


def log_analysis(tracker: str, name: str, analysis: Analysis, html: Path) -> str:
    """Logs an analysis to a new run of a tracker, or to the run that the environment names.

    Args:
        tracker: A key of `TRACKERS`, whose package is installed.
        name: Name of the trace; the run is called after it.
        html: The HTML report.

    Returns:
        Where the run is, for the user.

    Raises:
        DdltraceError: The tracker refused it.
    """
    numbers = {
        PREFIX + key: number
        for key, number in values_of(analysis.summary).items()
        if number is not None
    }
    run = f"ddltrace {printable(name)}"
    try:
        # stdout is for the report.
        with contextlib.redirect_stdout(sys.stderr):
            return TRACKERS[tracker](run, numbers, analysis, html)
    except Exception as error:
        reason = printable(str(error).strip().partition("\n")[0])[:_MAX_REASON]
        raise DdltraceError(
            f"--to {tracker}: {reason or type(error).__name__} (is it set up on this machine?)"
        ) from error


def _to_mlflow(name: str, numbers: Mapping[str, float], analysis: Analysis, html: Path) -> str:
    import mlflow  # pyright: ignore[reportMissingImports]

    resumed = os.environ.get("MLFLOW_RUN_ID")
    with mlflow.start_run(run_name=None if resumed else name) as run:
        mlflow.log_metrics(dict(numbers))
        mlflow.log_artifact(str(html))
        return f"run {run.info.run_id} in {printable(mlflow.get_tracking_uri())}"


def _to_wandb(name: str, numbers: Mapping[str, float], analysis: Analysis, html: Path) -> str:
    import wandb  # pyright: ignore[reportMissingImports]

    project = os.environ.get("WANDB_PROJECT", "ddltrace")
    with wandb.init(project=project, name=os.environ.get("WANDB_NAME", name)) as run:
        run.log({**numbers, PREFIX + "report": wandb.Html(html.read_text("utf-8"))})
        return f"run {run.id} in {printable(run.dir)}"


def _to_tensorboard(name: str, numbers: Mapping[str, float], analysis: Analysis, html: Path) -> str:
    from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]

    folder = Path("runs") / re.sub(r"[^\w.-]+", "-", name)
    with SummaryWriter(str(folder)) as writer:
        for key, number in numbers.items():
            writer.add_scalar(key, number, 0)
        writer.add_text(PREFIX + "report", render_markdown(analysis), 0)
    # TensorBoard shows no HTML: the report lies beside the events.
    (folder / html.name).write_bytes(html.read_bytes())
    return str(folder)


TRACKERS: Final[Mapping[str, Callable[[str, Mapping[str, float], Analysis, Path], str]]] = {
    "mlflow": _to_mlflow,
    "wandb": _to_wandb,
    "tensorboard": _to_tensorboard,
}
"""Name of a tracker, and of the extra that installs it -> the function that logs to it."""
