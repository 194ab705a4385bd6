"""Shows what differs between the outputs of a revision and those of the working tree.

The inputs are the traces of the working tree, for both; the outputs are those of
`support.collect_outputs`. Both revisions run in the same environment.
"""

from __future__ import annotations

import argparse
import difflib
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

from dev import BIN, PACKAGES, ROOT, environment

MOST_LINES: Final = 2000  # compared by difflib, whose time grows with their square
_INDEX: Final = re.compile(r"\[\d+\]")


def main() -> int:
    """Compares; returns 0 if all outputs are equal, 1 if some differ, 2 if it failed."""
    parser = argparse.ArgumentParser(prog="dev.py compare-outputs", description=__doc__)
    add_options(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ddltrace-compare-") as folder:
        trees, made = Path(folder, "trees"), Path(folder, "outputs")
        source = trees / "source"
        if not checked_out(options.revision, source):
            return 2
        sources = {"before": source, "after": ROOT}
        for side, root in sources.items():
            link_package(trees / side, root)
        if not collected(trees, made, options.input, options.output):
            return 2
        return report(made / "before", made / "after", options.lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("revision", metavar="REVISION", help="what Git calls it, such as main")
    parser.add_argument(
        "--input",
        metavar="TEXT",
        action="append",
        default=[],
        help="only inputs whose path contains TEXT; repeat it for more",
    )
    parser.add_argument(
        "--output",
        metavar="TEXT",
        action="append",
        default=[],
        help="only outputs whose name contains TEXT, such as 'analyze --json'; repeat it for more",
    )
    parser.add_argument(
        "--lines", type=int, default=12, help="lines shown of each difference (default: 12)"
    )


def link_package(tree: Path, root: Path) -> None:
    """Makes a folder of links in which the package `ddltrace` is found as it is installed.

    Args:
        tree: The folder; it is made anew.
        root: The files of a revision, which need not have such links of its own.
    """
    package = tree / "ddltrace"
    package.mkdir(parents=True)
    for source in [*(root / "package-root").iterdir(), *(root / name for name in PACKAGES)]:
        (package / source.name).symlink_to(source)


def checked_out(revision: str, folder: Path) -> bool:
    """Writes the files of a revision into a new folder.

    `git archive`, not `git worktree`: nothing stays behind in the repository when this is killed.
    """
    folder.mkdir(parents=True)
    commit = f"{revision}^{{commit}}"
    git = subprocess.Popen(
        ["git", "-C", str(ROOT), "archive", "--format=tar", commit], stdout=subprocess.PIPE
    )
    with git:
        tar = subprocess.run(["tar", "-x", "-C", str(folder)], stdin=git.stdout, check=False)
    return git.returncode == 0 and tar.returncode == 0


def collected(trees: Path, made: Path, inputs: Sequence[str], outputs: Sequence[str]) -> bool:
    """Runs both revisions at the same time, each in one process; returns whether both ran."""
    chosen = [option for part in inputs for option in ("--input", part)]
    chosen += [option for part in outputs for option in ("--output", part)]
    running = []
    for side in ("before", "after"):
        paths = [trees / side, ROOT / "tests"]
        # A cache of the user would serve one revision what the other has stored.
        own = {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "XDG_CACHE_HOME": str(made / f"cache-{side}"),
            "COLUMNS": "100",
            "TZ": "UTC",
        }
        command = [str(BIN / "python"), "-m", "support.collect_outputs"]
        command += [str(trees / side), str(made / side), *chosen]
        # Progress of one of them: they take equally long.
        quiet = subprocess.PIPE if side == "before" else None
        running.append(
            subprocess.Popen(command, cwd=ROOT, env=environment(own), stderr=quiet, text=True)
        )
    messages = [process.communicate()[1] for process in running]
    if running[0].returncode != 0:
        print(messages[0], file=sys.stderr)
    return all(process.returncode == 0 for process in running)


def report(before: Path, after: Path, lines: int) -> int:
    """Prints the differences of two folders of outputs.

    Args:
        before: Written by `support.collect_outputs`.
        after: Likewise.
        lines: Lines to show of each difference.

    Returns:
        1 if there are differences, otherwise 0.
    """
    names = [_names(folder) for folder in (before, after)]
    everything = list(dict.fromkeys([*names[0], *names[1]]))
    different = 0
    for name in everything:
        old, new = (of_side.get(name) for of_side in names)
        if old is None or new is None:
            shown = [f"only in {'the working tree' if old is None else 'the revision'}"]
        else:
            shown = list(_folder_differences(old, new, lines))
        if shown:
            different += 1
            print(f"\n{name}")
            for line in shown:
                print(f"  {line}")
    print(f"\n{different} of {len(everything)} outputs differ")
    return int(different > 0)


def _names(folder: Path) -> dict[str, Path]:
    """The outputs of one side: name -> folder of its files."""
    listed = (folder / "names").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("\t", 1) for line in listed)
    return {name: folder / number for number, name in pairs}


def _folder_differences(before: Path, after: Path, most: int) -> Iterator[str]:
    """The lines that show the differences of the files of one output."""
    files = sorted(
        {
            str(path.relative_to(folder))
            for folder in (before, after)
            for path in folder.rglob("*")
            if path.is_file()
        }
    )
    for name in files:
        old, new = (
            (folder / name).read_bytes() if (folder / name).is_file() else None
            for folder in (before, after)
        )
        lines = differences(old, new, Path(name).suffix)
        if lines:
            yield f"{name}: {len(lines)} lines"
            yield from (f"  {line:.300}" for line in lines[:most])
            if len(lines) > most:
                yield f"  ... {len(lines) - most} more"


def differences(before: bytes | None, after: bytes | None, suffix: str = "") -> list[str]:
    """What differs in two contents of a file: by key if both are JSON, by line if both are text.

    The contents are compared as they are, except for what must vary: the time in the header of a
    compressed file. Paths of outputs are left out where they are collected.

    Args:
        before: Content; None if there is no such file.
        after: Likewise.
        suffix: End of the file's name: that of a binary format that can be read.
    """
    if before == after:
        return []
    if before is None or after is None:
        return ["only in the working tree" if before is None else "only in the revision"]
    try:
        texts = [_readable(content, suffix) for content in (before, after)]
    except ValueError:
        return [f"binary: {len(before)} and {len(after)} bytes, which differ"]
    if texts[0] == texts[1]:
        return []
    try:
        return json_differences(json.loads(texts[0]), json.loads(texts[1]))
    except ValueError:
        return text_differences(texts[0], texts[1])


def _readable(content: bytes, suffix: str) -> str:
    """A file's content as text.

    Raises:
        ValueError: It is binary.
    """
    if suffix == ".gz":  # whose header has the time of writing
        content = gzip.decompress(content)
    if suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        return "\n".join(map(str, pq.read_table(pa.BufferReader(content)).to_pylist()))
    if suffix == ".pftrace":
        from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

        return str(Trace.FromString(content))
    return content.decode()


def json_differences(before: Any, after: Any) -> list[str]:
    """One line for each kind of key path whose value differs: the first one, and how many."""
    flat = [dict(_leaves(value, "")) for value in (before, after)]
    kinds: dict[str, list[str]] = {}
    for path in dict.fromkeys([*flat[0], *flat[1]]):
        values = [json.dumps(side[path]) if path in side else "absent" for side in flat]
        # As text: 1 and 1.0, true and 1 differ for a reader of JSON.
        if values[0] != values[1]:
            line = f"{path or 'the value'}: {values[0]:.120} -> {values[1]:.120}"
            kinds.setdefault(_INDEX.sub("[*]", path), []).append(line)
    return [
        f"{lines[0]}{f'  (and {len(lines) - 1} more of {kind})' if len(lines) > 1 else ''}"
        for kind, lines in kinds.items()
    ]


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{index}]")
    else:
        yield path, value


def text_differences(before: str, after: str) -> list[str]:
    """The removed and added lines, with the places where they stand."""
    lines = before.splitlines(), after.splitlines()
    if max(map(len, lines)) <= MOST_LINES:
        found = difflib.unified_diff(lines[0], lines[1], lineterm="", n=0)
        shown = list(found)[2:]
    else:
        shown = []
        for number, (old, new) in enumerate(zip_longest(*lines), 1):
            if old != new:
                shown += [f"@@ {number} @@"]
                shown += [f"-{old}"] * (old is not None) + [f"+{new}"] * (new is not None)
    return shown or ["the ends of the lines differ"]


if __name__ == "__main__":
    sys.exit(main())
