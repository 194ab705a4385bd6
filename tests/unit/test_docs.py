"""The documentation cannot drift from the code: the reference page is what the commands say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
from support import scripts

from ddltrace.analyzer.analysis import analyze_in_full
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.analyzer.query.result_tables import OF_ANALYSIS, OF_TRACE, TABLES
from ddltrace.experiments.harness import results_file
from ddltrace.experiments.harness.results import Row, Run
from ddltrace.experiments.harness.settings import Settings
from ddltrace.experiments.transport_benchmark.comparison import (
    Comparison,
    Point,
    TransportResult,
)
from ddltrace.experiments.transport_benchmark.comparison import Settings as TransportSettings
from ddltrace.tracer.optional_packages import EXTRAS
from ddltrace.tracer.trace.run_info import RankInfo, RunInfo
from ddltrace.tracer.trace.schema import EVENTS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def generator() -> Any:
    return scripts.load(ROOT / "docs" / "generate_cli_reference.py")


@pytest.mark.parametrize("name", ["cli", "report", "sql", "api"])
def test_reference_is_fresh(name: str, tmp_path: Path) -> None:
    # In a process of its own: click keeps the help option that a command was first asked for,
    # and other tests ask commands without their parent.
    page = tmp_path / f"{name}-reference.md"
    script = ROOT / "docs" / f"generate_{name}_reference.py"
    subprocess.run([sys.executable, str(script), str(page)], check=True)
    written = (ROOT / "docs" / page.name).read_text(encoding="utf-8")
    assert written == page.read_text(encoding="utf-8"), "stale: run python3 dev.py docs"


def test_every_key_of_the_json_has_a_meaning() -> None:
    page = (ROOT / "docs" / "report-reference.md").read_text(encoding="utf-8")
    keys = re.findall(r"^- `(\w+)`(.*)$", page, re.MULTILINE)
    assert len(keys) > 150
    assert [key for key, meaning in keys if not meaning.startswith(": ")] == []
    for key in ("late_steps", "steps_share", "late_step_us", "sometimes", "cause_us"):
        assert key in dict(keys)


def documented(page: str, heading: str) -> set[str]:
    """The keys that a section of a page lists."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    section = text.split(f"{heading}\n", 1)[1]
    section = re.split(r"^# ", section, maxsplit=1, flags=re.MULTILINE)[0]
    return set(re.findall(r"^- `(\w+)`: \S", section, re.MULTILINE))


def keys_of(value: Any) -> set[str]:
    """The keys of an object and of those in it, but not those of free texts and numbers."""
    found: set[str] = set()
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, dict):
            found |= set(each)
            for name, inner in each.items():
                if name not in ("choices", "also", "synchronization", "profile", "planned"):
                    found |= keys_of(inner)
    return found


def test_every_key_of_an_experiment_is_documented() -> None:
    results = results_file.read(ROOT / "sample_traces/experiment-400mbit/results.json")
    assert len(results.rows) > 1
    written = keys_of(results.to_json())
    page = documented("report-reference.md", "# `results.json`")
    of_progress = {"done", "total", "running"}
    assert written - of_progress <= page
    assert {field.name for kind in (Row, Run, Settings) for field in fields(kind)} <= page
    assert len(written) > 60


def test_every_key_of_a_comparison_of_transports_is_documented() -> None:
    points = tuple(Point("ping_pong", size, size / 2, 1.0, 5) for size in (4, 64))
    settings = TransportSettings(("tcp",), 2, (4, 64), 5, None, None, 60.0)
    found = Comparison(settings, (TransportResult("tcp", "complete", "", points),)).to_json()
    page = documented("report-reference.md", "# `ddltrace experiment transports --json`")
    assert keys_of(found) - {"schema", "settings", "transports", "ping_pong"} <= page


@pytest.mark.parametrize("name", ["straggler", "ddp-4-hosts-400mbit", "gpu-2-ranks"])
def test_every_column_of_sql_is_documented(name: str) -> None:
    page = (ROOT / "docs" / "sql-reference.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## `(\w+)`\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert [table for table, _ in sections] == list(TABLES)
    trace = open_trace(ROOT / "sample_traces" / name)
    analyzed = analyze_in_full(trace)
    for table, text in sections[1:]:
        make = OF_TRACE.get(table)
        columns = make(trace) if make else OF_ANALYSIS[table](analyzed)
        if columns.num_rows:
            assert re.findall(r"^- `(\w+)`: \S", text, re.MULTILINE) == columns.column_names
    assert all(f"`{column}`" in sections[0][1] for column in EVENTS.names)


@pytest.mark.parametrize("name", ["straggler", "ddp-4-hosts-400mbit", "gpu-2-ranks"])
def test_every_key_of_run_json_is_documented(name: str) -> None:
    page = (ROOT / "docs" / "trace-format.md").read_text(encoding="utf-8")
    section = page.split("## `run.json`\n")[1].split("## Traces in parts")[0]
    run = json.loads((ROOT / "sample_traces" / name / "run.json").read_text())
    known = {field.name for kind in (RunInfo, RankInfo) for field in fields(kind)}
    known -= {"tensors", "tensor_table"}  # stored as `tensor_tables`
    for key in known | keys_of({**run, "tensor_tables": [], "ranks": run["ranks"]}):
        assert re.search(rf"[`{{ ,]{key}[`,}}]", section), key


def test_every_variable_and_extra_has_a_line(generator: Any) -> None:
    sources = [
        path.read_text(encoding="utf-8")
        for folder in ("package-root", "tracer", "analyzer", "experiments", "dashboard")
        for path in (ROOT / folder).rglob("*.py")
    ]
    read = set(re.findall(r"\"(DDLTRACE_[A-Z_]+)\"", "\n".join(sources)))
    assert read == set(generator.VARIABLES), "see VARIABLES in docs/generate_cli_reference.py"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for extra in EXTRAS:
        assert re.search(rf"^\| .*`{extra}`.* \|", readme, re.MULTILINE), extra


def test_measures_are_defined_in_words() -> None:
    page = (ROOT / "docs" / "report-reference.md").read_text(encoding="utf-8")
    assert not re.findall(r"\|[A-Z]\||\b[CMWK] [nu] [CMWK]\b", page)
    # Names of Python classes say nothing to a reader of JSON.
    assert set(re.findall(r"`([A-Z][a-z]+[A-Za-z]*)[`.]", page)) == {"Analysis", "Memset"}


def test_every_command_and_option_is_documented(generator: Any) -> None:
    sections = dict(
        re.findall(
            r"^## `(.+?)`\n(.*?)(?=^## |\Z)",
            generator.PAGE.read_text(encoding="utf-8"),
            re.MULTILINE | re.DOTALL,
        )
    )
    contexts = list(generator.all_contexts())
    for context in contexts:
        text = sections[context.command_path]
        for parameter in context.command.get_params(context):
            if isinstance(parameter, click.Option) and not parameter.hidden:
                for option in parameter.opts:
                    assert option in text, f"{context.command_path} {option}"
    assert len(contexts) > 1


def test_every_command_and_option_says_what_it_is_for(generator: Any) -> None:
    for context in generator.all_contexts():
        assert context.command.help, context.command_path
        for parameter in context.command.get_params(context):
            if isinstance(parameter, click.Option):
                assert parameter.help, f"{context.command_path} {parameter.opts[0]}"


@pytest.mark.parametrize(
    "page",
    [path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))],
)
def test_links_lead_somewhere(page: str) -> None:
    """Every relative link of every page names a file of the repository."""
    path = ROOT / page
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:|#", target):
            continue
        assert (path.parent / target.split("#")[0]).exists(), f"{page} links to {target}"


def test_every_message_of_the_troubleshooting_page_is_in_the_code() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^### `(.+)`$", page, re.MULTILINE)
    assert len(messages) > 10
    sources = [
        path.read_text(encoding="utf-8")
        for folder in ("tracer", "analyzer", "experiments", "dashboard")
        for path in (ROOT / folder).rglob("*.py")
    ]
    for message in messages:
        assert any(message in source for source in sources), message
