"""The packages that `pip install ddltrace` leaves out, and the extras that install them.

A training environment gets what `run` and `analyze` need and nothing else. A command that needs
more calls `require_extra` before it does any work. PyTorch belongs to no extra: the job brings
its own build, which pip must not replace.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Final

from ddltrace.tracer.errors import MissingCapabilityError

EXTRAS: Final[Mapping[str, Mapping[str, str]]] = {
    "report": {"jinja2": "jinja2", "plotly": "plotly"},
    "frames": {"pandas": "pandas"},
    "query": {"duckdb": "duckdb"},
    "dashboard": {
        "dash": "dash",
        "dash-ag-grid": "dash_ag_grid",
        "plotly": "plotly",
        "jinja2": "jinja2",
    },
    "experiments": {"scikit-learn": "sklearn"},
    "metrics": {"prometheus-client": "prometheus_client"},
    "otlp": {
        "opentelemetry-sdk": "opentelemetry.sdk",
        "opentelemetry-exporter-otlp-proto-http": "opentelemetry.exporter.otlp.proto.http",
    },
    "perfetto": {"perfetto": "perfetto"},
    "chakra": {"protobuf": "google.protobuf"},
    "mlflow": {"mlflow-skinny": "mlflow"},
    "wandb": {"wandb": "wandb"},
    "tensorboard": {"tensorboardX": "tensorboardX"},
    "gpu": {"nvidia-ml-py": "pynvml"},
    # mpich is a library without a module of Python's; the extra installs it with mpi4py.
    "mpi": {"mpi4py": "mpi4py", "mpich": "mpi4py"},
    "zmq": {"pyzmq": "zmq"},
    "grpc": {"grpcio": "grpc"},
    "dask": {"dask[distributed]": "distributed", "cryptography": "cryptography"},
    "fsspec": {"fsspec": "fsspec"},
}
"""Extra -> the packages that it installs -> the module that each provides."""

NOT_IN_ALL: Final = ("mlflow", "wandb", "tensorboard", "mpi")
"""Extras that the extra ``all`` leaves out. A tracker is of use to those who have its server, and
brings some dozen packages along; PyTorch Lightning initializes MPI in each job as soon as mpi4py is
installed."""

USES: Final[Mapping[str, str]] = {
    "report": "analyze --html",
    "frames": "pandas frames in the Python API",
    "query": "ddltrace query",
    "dashboard": "ddltrace dashboard",
    "experiments": "ddltrace experiment run with a workload of images",
    "metrics": "run and watch --metrics :PORT",
    "otlp": "run and watch --metrics otlp",
    "perfetto": "export --to perfetto",
    "mlflow": "analyze --to mlflow",
    "wandb": "analyze --to wandb",
    "tensorboard": "analyze --to tensorboard",
    "gpu": "device counters of ddltrace run",
    "chakra": "export --to chakra and reading Chakra execution traces",
    "mpi": "the transports mpi and ucx of experiments",
    "zmq": "the transport zmq of experiments",
    "grpc": "the transport grpc of experiments",
    "dask": "analyze --engine dask",
    "fsspec": "URLs of stores other than s3, gs and hdfs",
}
"""Extra -> the commands that need it."""


def missing_packages(extra: str, *, by_import: bool = True) -> list[str]:
    """The packages of an extra that cannot be imported here.

    Args:
        extra: A key of `EXTRAS`.
        by_import: Whether they are imported for that; otherwise, they count if they are found.
    """
    is_there = _imports if by_import else _is_found
    return [package for package, module in EXTRAS[extra].items() if not is_there(module)]


def require_extra(extra: str, feature: str, *, by_import: bool = True) -> None:
    """Checks that the packages of an extra are installed.

    Args:
        extra: A key of `EXTRAS`.
        feature: What needs them, as the user asked for it, such as ``ddltrace dashboard``.
        by_import: See `missing_packages`.

    Raises:
        MissingCapabilityError: A package is missing; the message names the `pip install`.
    """
    missing = missing_packages(extra, by_import=by_import)
    if missing:
        raise MissingCapabilityError(
            f"{feature} needs {', '.join(missing)}: pip install 'ddltrace[{extra}]'"
        )


def require_torch(feature: str) -> None:
    """Checks that PyTorch is installed in this interpreter.

    Raises:
        MissingCapabilityError: It is not.
    """
    if not _imports("torch"):
        raise MissingCapabilityError(
            f"{feature} needs PyTorch 2.6 or newer: install the build for this machine "
            "(https://pytorch.org/get-started)"
        )


def _is_found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # of the package that contains it
        return False


def _imports(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True
