"""The commands import and export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddltrace.analyzer.exchange_commands import export, import_
from ddltrace.analyzer.importers.formats import read
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.tracer.errors import TraceError, UsageError

FOREIGN = Path(__file__).resolve().parents[2] / "data" / "foreign"


def invoke(command: object, *arguments: object) -> str:
    result = CliRunner().invoke(command, list(map(str, arguments)))  # type: ignore[arg-type]
    if result.exception is not None:
        raise result.exception
    return result.output


@pytest.mark.parametrize("source", ["kineto-cpu", "flight-recorder"])
def test_an_imported_directory_is_the_same_trace(tmp_path: Path, source: str) -> None:
    out = tmp_path / "trace"
    text = invoke(import_, FOREIGN / source, "-o", out)
    assert f"next: ddltrace analyze {out}" in text
    direct, stored = open_trace(FOREIGN / source), open_trace(out)
    assert stored.ranks == direct.ranks
    assert stored.run.source == direct.run.source
    assert stored.run.labels == direct.run.labels
    for note in read(FOREIGN / source).run.notes:
        assert note in text
        assert note in stored.run.notes
    for rank in direct.ranks:
        left, right = direct.events(rank), stored.events(rank)
        assert left.to_pylist() == right.to_pylist()


def test_import_replaces_only_with_force(tmp_path: Path) -> None:
    out = tmp_path / "trace"
    invoke(import_, FOREIGN / "kineto-cpu", "-o", out)
    with pytest.raises(UsageError, match="--force"):
        invoke(import_, FOREIGN / "kineto-cpu", "-o", out)
    # What cannot be read must not cost the trace that is there.
    with pytest.raises(TraceError):
        invoke(import_, tmp_path / "missing", "-o", out, "--force")
    assert open_trace(out).ranks == [0, 1]
    invoke(import_, FOREIGN / "flight-recorder", "-o", out, "--force")
    assert open_trace(out).run.source == "flight-recorder"


def test_export_of_a_foreign_folder(tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    text = invoke(export, FOREIGN / "kineto-cpu", "--to", "chrome", "-o", out)
    assert "ui.perfetto.dev" in text
    assert json.loads(out.read_text())["traceEvents"]
