"""The commands import no package that they do not need: `analyzer/commands.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SAMPLES = Path(__file__).parents[3] / "sample_traces"

# Packages of which each takes longer to import than a small trace to analyze.
PROGRAM = """
import atexit, json, sys
from ddltrace.cli import main
heavy = ("pandas", "plotly", "duckdb", "torch")
atexit.register(lambda: print(json.dumps([name for name in heavy if name in sys.modules]),
                              file=sys.stderr))
sys.argv = sys.argv[1:]
main()
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("analyze", "straggler"),
        ("analyze", "gpu-2-ranks", "--json"),
        ("compare", "straggler", "ddp-4-hosts-400mbit"),
    ],
    ids=" ".join,
)
def test_a_command_imports_no_heavy_package(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "ddltrace", *arguments],
        cwd=SAMPLES,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout
    assert json.loads(done.stderr.splitlines()[-1]) == []


def test_arrow_finds_pandas_where_it_is_needed() -> None:
    program = """
import sys
import pyarrow as pa
from ddltrace.tracer.trace.arrow_arrays import without_pandas
without_pandas()
table = pa.table({"a": [1, 2]})
assert "pandas" not in sys.modules
assert table.to_pandas()["a"].tolist() == [1, 2]
"""
    subprocess.run([sys.executable, "-c", program], check=True)
