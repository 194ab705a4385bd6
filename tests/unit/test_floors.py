"""Imports point down only, and each layer avoids certain libraries.

The table of packages is in docs/architecture.md. Every import in the sources counts, as
`support/import_graph.py` finds them.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import networkx as nx
import pytest
from packaging.utils import canonicalize_name
from support.import_graph import (
    LAYERS,
    ROOT,
    Import,
    circles_in,
    closure,
    first_imports,
    import_graph,
    imports_in,
    imports_of,
    layer_files,
    layer_of,
    longest_chain,
    package_of,
)
from support.slim_environment import project

from ddltrace.cli import COMMANDS
from ddltrace.tracer.optional_packages import EXTRAS

NEVER = {
    "tracer": {"pandas", "dash", "plotly", "sklearn"},
    "analyzer": {"torch", "dash"},
    "experiments": {"dash"},
    "dashboard": {"torch"},
    "face": {"torch", "pandas", "dash", "plotly", "numpy", "pyarrow"},
}


# Parts of the interfaces of declared libraries: of Dash and of Jinja.
WELCOME = {"flask", "werkzeug", "markupsafe"}


def violations(layer: str, path: Path, imports: Iterable[Import]) -> list[str]:
    """The imports of a source file that break the rules, one line each."""
    found = []
    for imported in imports:
        where = f"{path.relative_to(ROOT)}:{imported.line} imports {imported.module}"
        target = layer_of(imported.module)
        if imported.by_entry_point:
            continue
        if target is not None:
            up = LAYERS.index(target) > LAYERS.index(layer)
            eager_face = layer == "face" and target not in {"face", "tracer"} and imported.at_import
            if up or eager_face:
                found.append(f"{where}: from {layer} up to {target}")
        elif imported.module.split(".")[0] in NEVER[layer] and (
            imported.at_import or layer != "face"
        ):
            found.append(f"{where}: never in {layer}")
    return found


def test_imports_point_down_only() -> None:
    files = layer_files()
    assert {layer for layer, _ in files} == set(LAYERS)
    found = [
        line for layer, path in files for line in violations(layer, path, imports_in(layer, path))
    ]
    assert not found, "\n".join(found)


# The sub-folders and loose modules of each layer, from the ground up.
ORDER = {
    "tracer": (
        *(
            "environment",
            "errors",
            "exit_status",
            "extensions",
            "fault_barrier",
            "masked_command",
            "next_command",
            "number_text",
            "optional_packages",
            "owner_access",
            "peak_option",
            "plugin_option",
            "output_directory",
            "alert_expression",
            "trigger_expression",
        ),
        *(
            "connections",
            "storage",
            "trace",
            "config",
            "record",
            "resources",
            "native",
            "nccl",
            "naming",
            "timing",
            "interpose",
            "capture",
        ),
        *(
            "bootstrap",
            "launch",
            "annotate",
            "codec_events",
            "gather_commands",
            "switch_orders",
            "attach_job",
            "switch_commands",
            "commands",
            "__init__",
        ),
    ),
    "analyzer": (
        *("recent_cache", "formatting", "engine", "events", "nccl", "importers", "trace"),
        "joined",
        *("measures", "model", "step_ranges", "live", "findings", "report", "analysis", "slack"),
        "open_trace",
        "open_trace",
        "open_trace",
        *("compare", "query", "exporters", "whatif", "metrics"),
        *("exchange_commands", "whatif_commands", "watch_commands", "commands", "__init__"),
    ),
    "experiments": (
        *(
            "lazy_torch",
            "parent_process",
            "technique",
            "grammar",
            "messages",
            "architectures",
            "schedules",
        ),
        *("plan_execution", "transports", "collectives", "codecs"),
        *(
            "optimizer_rules",
            "frequency",
            "synchronization",
            "workloads",
            "parallelism",
            "strategy",
        ),
        "asynchrony",
        "observation",
        *("pacing", "engine", "network", "harness", "transport_benchmark"),
        *("timed_here", "predicted", "calibration", "ledger", "verification"),
        *("commands", "__init__"),
    ),
    "dashboard": (
        *(
            "access",
            "errors",
            "callbacks",
            "address",
            "theme",
            "discovery",
            "runs",
            "timeline",
            "stored",
            "http_server",
            "widgets",
            "rank_breakdowns",
            "charts",
            "experiments",
            "workspace",
            "server",
            "pages",
        ),
        *("app", "start", "commands", "__init__"),
    ),
}


def unit_of(module: str) -> str:
    """The sub-folder or loose module of its layer that a module belongs to."""
    parts = module.split(".")
    return parts[2] if len(parts) > 2 else "__init__"


def upward(layer: str, graph: nx.DiGraph) -> list[str]:
    """The imports in a layer that go up in its `ORDER`, one line each."""
    place = {unit: number for number, unit in enumerate(ORDER[layer])}
    return [
        f"{name} imports {target}: {unit_of(name)} stands below {unit_of(target)}"
        for name, target in sorted(graph.edges)
        if layer_of(name) == layer_of(target) == layer
        and place[unit_of(target)] > place[unit_of(name)]
    ]


@pytest.fixture(scope="module")
def graph() -> nx.DiGraph:
    return import_graph()


def test_no_modules_import_each_other_in_a_circle(graph: nx.DiGraph) -> None:
    assert not circles_in(graph)


@pytest.mark.parametrize("layer", ORDER)
def test_sub_folders_stand_on_each_other(layer: str, graph: nx.DiGraph) -> None:
    units = {unit_of(name) for name in graph if layer_of(name) == layer}
    assert units == set(ORDER[layer]), "name it in ORDER, where it belongs"
    found = upward(layer, graph)
    assert not found, "\n".join(found)


def test_a_circle_and_an_upward_import_are_found() -> None:
    low, middle, high = (f"ddltrace.tracer.{unit}.x" for unit in ("trace", "record", "capture"))
    graph = nx.DiGraph([(middle, low), (high, middle), (high, low)])
    assert circles_in(graph) == upward("tracer", graph) == []
    assert longest_chain(graph) == [high, middle, low]
    graph.add_edge(low, high)
    assert circles_in(graph) == [sorted([low, middle, high])]
    assert len(upward("tracer", graph)) == 1


def test_what_a_command_reaches_is_that_of_its_own_function(graph: nx.DiGraph) -> None:
    doctor, merge = (
        closure(graph, first_imports("ddltrace.tracer.commands", name))
        for name in ("doctor", "merge")
    )
    assert "ddltrace.tracer.launch.doctor" in doctor - merge
    assert "ddltrace.tracer.trace.trace_parts" in merge


def test_opening_a_trace_imports_no_capture_buffer() -> None:
    program = (
        "import json, sys\n"
        "from ddltrace.analyzer.open_trace import open_trace\n"
        "print(json.dumps(sorted(sys.modules)))\n"
    )
    loaded = modules_after(program)
    capturing = ("record", "native", "naming", "timing", "interpose", "capture")
    assert not [
        m for m in loaded if m.startswith(tuple(f"ddltrace.tracer.{u}." for u in capturing))
    ]


def test_every_library_is_declared() -> None:
    """What the sources import is installed with ddltrace, or with one of its extras."""
    # Read from the source: an editable installation keeps the list of the day it was made.
    declarations = project()
    requirements = [
        *declarations["dependencies"],
        *(line for lines in declarations["optional-dependencies"].values() for line in lines),
    ]
    declared = {canonicalize_name(re.split(r"[^\w.-]", line)[0]) for line in requirements}
    providers = metadata.packages_distributions()
    # These need not be installed; test_light_install.py compares them with the project.
    optional = {module for packages in EXTRAS.values() for module in packages.values()}
    undeclared = {
        f"{path.relative_to(ROOT)}:{imported.line} imports {name}"
        for layer, path in layer_files()
        for imported in imports_in(layer, path)
        if (name := imported.module.split(".")[0]) not in sys.stdlib_module_names
        and name not in {"ddltrace", "__future__", *WELCOME}
        and not set(map(canonicalize_name, providers.get(name, []))) & declared
        and name not in optional
    }
    assert not undeclared, "\n".join(sorted(undeclared))


def violations_in(layer: str, path: Path, source: str) -> list[str]:
    """The same of a source that is in no file."""
    return violations(layer, path, imports_of(ast.parse(source), package_of(layer, path)))


HARNESS = "ddltrace.experiments.harness.runner"


@pytest.mark.parametrize(
    ("layer", "file", "source"),
    [
        ("tracer", "tracer/x.py", "def f():\n    import ddltrace.analyzer.open_trace"),
        ("tracer", "tracer/x.py", "from ddltrace import analyzer"),
        ("tracer", "tracer/interpose/x.py", "from ...analyzer import trace"),
        ("tracer", "tracer/x.py", "from ddltrace import open"),
        ("tracer", "tracer/x.py", "import pandas as pd"),
        ("analyzer", "analyzer/x.py", "import torch.distributed as dist"),
        ("analyzer", "analyzer/x.py", "import importlib\nimportlib.import_module('dash')"),
        ("tracer", "tracer/x.py", f"import_module({HARNESS!r})"),
        (
            "tracer",
            "tracer/x.py",
            f"A = {HARNESS!r}\ndef f():\n    importlib.import_module(A).check()",
        ),
        ("tracer", "tracer/x.py", f"A = {{'x': ({HARNESS!r}, 1)}}\nimport_module(A['x'][0])"),
        ("analyzer", "analyzer/x.py", "if TYPE_CHECKING:\n    from ddltrace.experiments import e"),
        ("experiments", "experiments/x.py", "from ddltrace.dashboard.app import app"),
        ("dashboard", "dashboard/x.py", "def f():\n    from torch import nn"),
        ("face", "package-root/x.py", "import pandas"),
        (
            "face",
            "package-root/x.py",
            "from ddltrace.analyzer.open_trace import open_trace",
        ),
    ],
)
def test_a_violation_is_found(layer: str, file: str, source: str) -> None:
    assert violations_in(layer, ROOT / file, source)


@pytest.mark.parametrize(
    ("layer", "file", "source"),
    [
        (
            "face",
            "package-root/x.py",
            "def f():\n    from ddltrace.analyzer.open_trace import open_trace",
        ),
        ("analyzer", "analyzer/x.py", "from ddltrace.tracer.errors import TraceError"),
        ("tracer", "tracer/interpose/x.py", "from ..session import session\nimport torch"),
        ("experiments", "experiments/x.py", "def f():\n    import torch"),
        ("analyzer", "analyzer/x.py", "extension('advice').command()"),
    ],
)
def test_what_is_allowed_is_not_found(layer: str, file: str, source: str) -> None:
    assert not violations_in(layer, ROOT / file, source)


# The folders of the experiments whose modules import PyTorch when they are imported. The others,
# with the descriptions of all techniques, are read by commands without it.
WITH_TORCH = {
    *("plan_execution", "collectives", "workloads"),
    *("parallelism", "asynchrony", "observation", "pacing", "engine", "harness", "transports"),
    "transport_benchmark",
}


def test_pytorch_is_imported_in_the_named_folders_only() -> None:
    found = {
        unit_of(f"ddltrace.{'.'.join(path.relative_to(ROOT).with_suffix('').parts)}")
        for layer, path in layer_files()
        if layer == "experiments"
        for imported in imports_in(layer, path)
        if imported.at_import and imported.module.split(".")[0] == "torch"
    }
    assert found == WITH_TORCH


def test_techniques_are_read_without_pytorch() -> None:
    program = (
        "import json, sys\n"
        "from ddltrace.experiments.strategy.listing import as_json\n"
        "from ddltrace.experiments.strategy.spec import names, parse\n"
        "for name in set(names()) - {'feedback'}: parse(name)\n"
        "assert as_json()['techniques']\n"
        "print(json.dumps(sorted(sys.modules)))\n"
    )
    assert "torch" not in modules_after(program)


HEAVY = {"torch", "pandas", "dash", "plotly", "numpy", "pyarrow", "flask", "sklearn", "scipy"}


def modules_after(program: str) -> list[str]:
    """The modules that a fresh interpreter has loaded when a program ends by printing them."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    modules: list[str] = json.loads(done.stdout.splitlines()[-1])
    return modules


@pytest.mark.parametrize("arguments", [[], *([name] for name in COMMANDS)], ids=" ".join)
def test_help_is_quick(arguments: list[str]) -> None:
    """`--help` loads the layer of its command and none of the heavy libraries."""
    program = (
        "import json, sys\n"
        "from ddltrace.cli import cli\n"
        f"cli.main({[*arguments, '--help']!r}, standalone_mode=False)\n"
        "print(json.dumps(sorted(sys.modules)))\n"
    )
    loaded = {name.split(".")[0] for name in modules_after(program)}
    assert loaded & HEAVY <= ({"pyarrow", "numpy"} if arguments else set())
    assert "click" in loaded


def test_import_in_a_job_costs_nothing() -> None:
    """`import ddltrace` in a training script must not load torch, nor any layer."""
    program = "import sys, json, ddltrace; print(json.dumps(sorted(sys.modules)))"
    loaded = modules_after(program)
    assert not {name.split(".")[0] for name in loaded} & (HEAVY | {"click"})
    assert not [name for name in loaded if name.startswith("ddltrace.")]
