"""Writes what one revision of ddltrace prints for the traces at hand, each output as a file.

`support.compare_outputs` runs it once for each of two revisions, with the revision's package first
on ``PYTHONPATH``. It uses the commands and the routes of the dashboard, which stay, and as little
as possible of what is below them.
"""

from __future__ import annotations

import argparse
import glob
import io
import json
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

# Each is a trace, or a folder or file of another tool's trace.
INPUTS: Final = (
    "sample_traces/*",
    "sample_traces/experiment-400mbit/*",
    "tests/data/foreign/*",
    "../shared/data/*",
    "../shared/data/public/*",
    "../shared/data/public/cut_from_real/*",
)
NO_TRACES: Final = re.compile(
    r"README\.md|.*\.(py|sh)|results\.(json|arrow)|jobs|public|cut_from_real"
)
EXPORTS: Final = {  # --to -> options, the name's end
    "chrome": ([], ".json"),
    "chrome --per-rank": (["--per-rank"], ""),
    "perfetto": ([], ".pftrace"),
    "parquet": ([], ".parquet"),
    "csv": ([], ".csv"),
    "chakra": ([], ""),
    "chakra-json": ([], ""),
}
# Not `progress`: it says how far the server's background work is.
ROUTES: Final = ("stages", "layout", "path", "notes", "counters", "minimap?px=1000", "search?q=e")
PAGES: Final = (
    *("/", "/timeline", "/critical-path", "/communication", "/tensors", "/sql"),
    *("/compare", "/experiments", "/live", "/traces"),
)
MOST_ROWS: Final = 512  # of a frame
OK: Final = 200
_HTML_DATA: Final = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.S)
_HTML_CODE: Final = re.compile(r"<(script|style)\b.*?</\1>", re.S)


@dataclass(frozen=True)
class Output:
    """One output.

    Attributes:
        of: What it is an output of: an input, two of them, or "ddltrace".
        name: The command or the route.
        write: Writes it into files at or below a path, which does not exist yet.
    """

    of: str
    name: str
    write: Callable[[Path], None]


def inputs() -> list[str]:
    """The traces at hand, as paths relative to the working directory: the repository."""
    found = []
    for pattern in INPUTS:
        found += sorted(glob.glob(pattern))
    return [path for path in found if not NO_TRACES.fullmatch(Path(path).name)]


def outputs(traces: Sequence[str]) -> Iterator[Output]:
    """All outputs of some traces, and those that have no input."""
    yield from _helps()
    for arguments in (["--version"], ["experiment", "list"], ["experiment", "list", "--json"]):
        yield _of_command("ddltrace", arguments)
    for trace in traces:
        yield from _of_trace(trace)
    for before, after in pairwise(traces):
        if Path(before).parent == Path(after).parent and not _is_experiment(before, after):
            pair = f"{before} {after}"
            yield _of_command(pair, ["compare", before, after], "compare")
            yield _of_command(pair, ["compare", before, after, "--json"], "compare --json")


def _is_experiment(*traces: str) -> bool:
    return any(Path(trace, "results.json").is_file() for trace in traces)


def _of_trace(trace: str) -> Iterator[Output]:
    if _is_experiment(trace):
        for options in ([], ["--json"]):
            name = " ".join(["experiment compare", *options])
            yield _of_command(trace, ["experiment", "compare", trace, *options], name)
        yield Output(
            trace,
            "experiment compare --html",
            lambda to: _html(to, ["experiment", "compare", trace]),
        )
    else:
        for options in ([], ["--full"], ["--json"], ["--format", "markdown"]):
            name = " ".join(["analyze", *options])
            yield _of_command(trace, ["analyze", trace, *options], name)
        yield Output(trace, "analyze --html", lambda to: _html(to, ["analyze", trace]))
        for table in _tables():
            query = ["query", trace, f'FROM "{table}"', "--format", "csv"]
            yield _of_command(trace, query, f"query {table}")
        for name, (options, end) in EXPORTS.items():
            yield Output(trace, f"export --to {name}", _export(trace, name, options, end))
    yield Output(trace, "dashboard", lambda to: _dashboard(to, trace))


# --- commands ------------------------------------------------------------------------------


def run(arguments: Sequence[str]) -> tuple[str, str]:
    """Runs a command in this process; returns its output, and its messages and exit status."""
    from ddltrace.cli import main

    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2)]
    sys.argv = ["ddltrace", *arguments]
    status: object = 0
    with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
        try:
            main()
        except SystemExit as end:
            status = end.code
    texts = [stream.buffer.getvalue().decode() for stream in streams]
    return texts[0], f"{texts[1]}exit status {status}\n"


def _of_command(of: str, arguments: Sequence[str], name: str | None = None) -> Output:
    return Output(of, name or " ".join(arguments), lambda to: _command(to, arguments))


def _command(to: Path, arguments: Sequence[str]) -> str:
    """Runs a command; writes its output, and its messages where it has any."""
    text, messages = run(arguments)
    to.mkdir(parents=True)
    (to / "stdout").write_text(text, encoding="utf-8")
    # The command names the file that it has written, which is elsewhere for each revision.
    messages = messages.replace(str(to.parent), "")
    (to / "stderr").write_text(messages, encoding="utf-8")
    return text


@cache
def _tables() -> list[str]:
    text, _ = run(["query", "sample_traces/straggler", "SHOW TABLES", "--format", "csv"])
    return text.splitlines()[1:]


def _html(to: Path, arguments: Sequence[str]) -> None:
    page = to.with_name("page.html")
    page.unlink(missing_ok=True)
    _command(to, [*arguments, "--html", str(page)])
    if not page.exists():
        return
    text = page.read_text(encoding="utf-8")
    (to / "stdout").unlink()  # the text report again
    data = _HTML_DATA.search(text)
    (to / "data").write_text(data.group(1) if data else "", encoding="utf-8")
    (to / "text").write_text(_HTML_CODE.sub("", text), encoding="utf-8")


def _export(trace: str, name: str, options: Sequence[str], end: str) -> Callable[[Path], None]:
    def write(to: Path) -> None:
        made = to / f"export{end}"
        arguments = ["export", trace, "--to", name.partition(" ")[0], *options, "-o", str(made)]
        made.parent.mkdir(parents=True)
        _, messages = run(arguments)
        (to / "stderr").write_text(messages.replace(str(to), ""), encoding="utf-8")

    return write


def _helps() -> Iterator[Output]:
    import click

    from ddltrace.cli import cli

    def walk(command: click.Command, path: list[str]) -> Iterator[Output]:
        yield _of_command("ddltrace", [*path, "--help"])
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                child = command.get_command(context, name)
                assert child is not None
                yield from walk(child, [*path, name])

    return walk(cli, [])


# --- the dashboard -------------------------------------------------------------------------


def _dashboard(to: Path, trace: str) -> None:
    """Writes the answers of the dashboard's routes, and its pages with their figures."""
    from ddltrace.analyzer.open_trace import open_trace
    from ddltrace.dashboard.app import create_app
    from ddltrace.dashboard.discovery import discover
    from ddltrace.dashboard.experiments import OpenExperiment
    from ddltrace.dashboard.workspace import Workspace

    to.mkdir(parents=True)

    def keep(name: str, content: bytes) -> None:
        (to / re.sub(r"[^\w.?=-]", "_", name)).write_bytes(content)

    try:
        found = discover([trace])
        traces = [open_trace(path) for path in found.traces]
        experiments = [OpenExperiment(0, path.name, path) for path in found.experiments]
        client = create_app(Workspace(traces, experiments)).server.test_client()
    except Exception as error:  # noqa: BLE001 - the refusal of an input is an output too
        keep("refusal", f"{type(error).__name__}: {error}\n".encode())
        return
    if traces:
        for route in ROUTES:
            keep(route, client.get(f"/api/0/{route}").data)
        keep("frame", _frame(client))
    for path in PAGES:
        page = _callback(
            client, "..page.children...nav.children..", {"url": {"pathname": path, "search": ""}}
        )
        keep(f"page {path}", page)
        for name in sorted(set(_figures(json.loads(page)))) if page.startswith(b"{") else ():
            shown = json.dumps({"name": name, "type": "figure"}, separators=(",", ":"))
            keep(f"figure {path} {name}", _callback(client, f"{shown}.figure", {}, name))


def _frame(client: Any) -> bytes:
    """The frame of the first rows over the whole run, as text."""
    from support.frames import decode_frame

    layout = client.get("/api/0/layout").get_json()
    last = min(len(layout.get("rows", ())), MOST_ROWS) - 1
    answer = client.get(f"/api/0/frame?t0=0&t1={layout.get('span')}&px=1000&rows=0-{last}")
    if answer.status_code != OK:
        return bytes(answer.data)
    columns = decode_frame(answer.data)
    readable = {
        name: column.tolist() if hasattr(column, "tolist") else column
        for name, column in columns.items()
    }
    return json.dumps(readable).encode()


def _callback(client: Any, output: str, url: dict[str, Any], figure: str | None = None) -> bytes:
    """The answer of one of Dash's callbacks, as the browser would ask for it."""
    body: dict[str, Any] = {"output": output}
    if figure is None:
        body["outputs"] = [
            {"id": "page", "property": "children"},
            {"id": "nav", "property": "children"},
        ]
        body["inputs"] = [
            {"id": "url", "property": name, "value": value} for name, value in url["url"].items()
        ]
        body["changedPropIds"] = ["url.pathname"]
    else:
        of = {"type": "figure", "name": figure}
        body["outputs"] = {"id": of, "property": "figure"}
        body["inputs"] = [{"id": "theme", "property": "data", "value": "light"}]
        body["state"] = [
            {"id": of, "property": "id", "value": of},
            {"id": "url", "property": "search", "value": ""},
        ]
        body["changedPropIds"] = ["theme.data"]
    return bytes(client.post("/_dash-update-component", json=body).data)


def _figures(content: Any) -> Iterator[str]:
    """The names of the figures in a page."""
    if isinstance(content, dict):
        identity = content.get("id")
        if isinstance(identity, dict) and identity.get("type") == "figure":
            yield identity["name"]
        for value in content.values():
            yield from _figures(value)
    elif isinstance(content, list):
        for value in content:
            yield from _figures(value)


# --- the process ---------------------------------------------------------------------------


def main() -> int:
    """Writes the chosen outputs; each in a folder of its number, with a list of their names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", type=Path, help="folder that has to contain the revision")
    parser.add_argument("folder", type=Path, help="folder to create")
    parser.add_argument("--input", action="append", default=[])
    parser.add_argument("--output", action="append", default=[])
    options = parser.parse_args()
    traces = [name for name in inputs() if is_chosen(name, options.input)]
    options.folder.mkdir(parents=True)
    chosen = [one for one in _chosen(traces, options) if is_chosen(one.name, options.output)]
    with (options.folder / "names").open("w", encoding="utf-8") as names:
        for number, output in enumerate(chosen):
            if number == 0 or output.of != chosen[number - 1].of:
                print(f"{number + 1}/{len(chosen)} {output.of}", file=sys.stderr, flush=True)
            try:
                output.write(options.folder / f"{number}")
            except Exception:  # noqa: BLE001 - the other outputs are wanted all the same
                (options.folder / f"{number}").mkdir(exist_ok=True)
                text = traceback.format_exc()
                (options.folder / f"{number}" / "failure").write_text(text, encoding="utf-8")
            names.write(f"{number}\t{output.of}: {output.name}\n")
    strangers = sorted(
        f"{name} of {module.__file__}"
        for name, module in sys.modules.items()
        if (name == "ddltrace" or name.startswith("ddltrace."))
        and not Path(module.__file__ or "").is_relative_to(options.package)
    )
    if strangers:
        print(f"not of this revision: {', '.join(strangers)}", file=sys.stderr)
        return 1
    return 0


def _chosen(traces: Sequence[str], options: argparse.Namespace) -> Iterator[Output]:
    for output in outputs(traces):
        if not options.input or output.of != "ddltrace":
            yield output


def is_chosen(name: str, parts: Sequence[str]) -> bool:
    """Whether a name contains one of some parts; without parts, every name is chosen."""
    return not parts or any(part in name for part in parts)


if __name__ == "__main__":
    sys.exit(main())
