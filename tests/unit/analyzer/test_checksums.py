"""Every final event file has a checksum, and no changed file is read without a note."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddltrace.analyzer.commands import compare, query
from ddltrace.analyzer.exchange_commands import export, import_
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.tracer.trace.event_file import checksum_of, matches_checksum
from ddltrace.tracer.trace.run_reader import read_run
from ddltrace.tracer.trace.trace_parts import merge

SAMPLES = Path(__file__).parents[3] / "sample_traces"
NOTE = "rank 1: its file is not what was recorded"


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAMPLES / "straggler", tmp_path / "sample"))


def flip(path: Path, byte: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 1 << bit
    path.write_bytes(content)


def without_checksums(directory: Path) -> None:
    """Makes a trace as an older version wrote it."""
    path = directory / "run.json"
    value = json.loads(path.read_text())
    for entry in value["ranks"]:
        del entry["checksum"]
    value.pop("checksum", None)
    path.write_text(json.dumps(value))


def assert_has_checksums(directory: Path) -> None:
    for info in read_run(directory).ranks:
        assert info.checksum == checksum_of(directory / f"{info.segment}.arrow")


def test_every_sample_trace_has_checksums():
    traces = [path.parent for path in SAMPLES.rglob("run.json")]
    assert len(traces) > 2
    for trace in traces:
        assert_has_checksums(trace)
        opened = open_trace(trace)
        assert sum(opened.events(rank).num_rows for rank in opened.ranks) > 0
        assert opened.damage == []


def test_no_flipped_bit_is_read_without_a_note(sample):
    path = next(sample.glob("rank-00001-*.arrow"))
    whole = path.read_bytes()
    places = random.Random(11)
    where = {0, 7, len(whole) - 1, *(places.randrange(len(whole)) for _ in range(150))}
    for byte in where:
        flip(path, byte, places.randrange(8))
        trace = open_trace(sample)
        info = trace.infos(1)[0]
        trace.stored(info)
        assert any(NOTE in note for note in trace.damage), byte
        path.write_bytes(whole)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
def test_the_analysis_of_a_flipped_bit_is_partial(sample, share):
    path = next(sample.glob("rank-00001-*.arrow"))
    flip(path, round(share * path.stat().st_size))
    facts = open_trace(sample).analyze().trace
    assert facts.status == "partial"
    assert any(NOTE in note for note in facts.notes)


def test_swapped_files_are_noticed_on_both_ranks(sample):
    first, second = sorted(sample.glob("rank-*.arrow"))
    first.rename(sample / "kept")
    second.rename(first)
    (sample / "kept").rename(second)
    trace = open_trace(sample)
    assert trace.analyze().trace.status == "partial"
    assert len(trace.damage) == 2


def change(directory: Path, key: str, value: object) -> None:
    path = directory / "run.json"
    content = json.loads(path.read_text())
    content["ranks"][1][key] = value
    path.write_text(json.dumps(content))


def test_a_changed_run_file_is_noticed(sample):
    assert open_trace(sample).analyze().trace.status == "complete"
    path = sample / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=7))
    assert open_trace(sample).damage == []
    change(sample, "host", "elsewhere")
    trace = open_trace(sample)
    assert trace.damage == ["run.json is not what ddltrace wrote: its numbers may be wrong"]
    facts = trace.analyze().trace
    assert facts.status == "partial"
    assert facts.notes[-1:] == tuple(trace.damage)


def test_swapping_files_and_checksums_alike_is_noticed(sample):
    """Who swaps two ranks' files and their checksums in run.json changes run.json."""
    first, second = sorted(sample.glob("rank-*.arrow"))
    sums = [checksum_of(first), checksum_of(second)]
    content = json.loads((sample / "run.json").read_text())
    for entry, its in zip(content["ranks"], reversed(sums), strict=True):
        entry["checksum"] = its
    (sample / "run.json").write_text(json.dumps(content, indent=1))
    first.rename(sample / "kept")
    second.rename(first)
    (sample / "kept").rename(second)
    assert len(open_trace(sample).damage) == 1


def test_every_written_run_file_has_a_checksum(sample, tmp_path):
    for path in SAMPLES.rglob("run.json"):
        assert type(json.loads(path.read_text())["checksum"]) is int
    (tmp_path / "merged").mkdir()
    merge([sample], tmp_path / "merged")
    assert open_trace(tmp_path / "merged").damage == []
    change(tmp_path / "merged", "world_size", 3)
    assert len(open_trace(tmp_path / "merged").damage) == 1


def test_reading_a_few_columns_verifies_the_file_as_well(sample):
    flip(next(sample.glob("rank-00001-*.arrow")), -20)
    trace = open_trace(sample)
    list(trace.read_columns(trace.infos(1)[0], ["start_ns"]))
    assert NOTE in trace.damage[0]


def test_damage_found_by_a_view_of_some_steps_is_known_to_the_whole_trace(sample):
    flip(next(sample.glob("rank-00001-*.arrow")), -20)
    trace = open_trace(sample)
    trace.within(range(2, 4)).events(1)
    assert NOTE in trace.damage[0]


def test_a_trace_without_checksums_opens(sample):
    without_checksums(sample)
    trace = open_trace(sample)
    assert trace.analyze().trace.status == "complete"
    assert trace.damage == []


def test_merge_adds_the_checksums_that_an_older_trace_lacks(sample, tmp_path):
    without_checksums(sample)
    (tmp_path / "merged").mkdir()
    merge([sample], tmp_path / "merged")
    assert_has_checksums(tmp_path / "merged")
    before, after = open_trace(sample), open_trace(tmp_path / "merged")
    assert all(before.events(rank).equals(after.events(rank)) for rank in before.ranks)


def test_merge_keeps_the_checksum_of_a_damaged_file(sample, tmp_path):
    flip(next(sample.glob("rank-00001-*.arrow")), -20)
    (tmp_path / "merged").mkdir()
    run = merge([sample], tmp_path / "merged")
    assert [matches_checksum(tmp_path / "merged", info) for info in run.ranks] == [True, False]


def test_an_imported_trace_has_checksums(tmp_path):
    source = tmp_path / "rank0.json"
    events = [
        {"ph": "X", "name": "f", "pid": 0, "tid": 1, "ts": 10.0 * n, "dur": 5} for n in range(3)
    ]
    source.write_text(json.dumps({"traceEvents": events}))
    output = tmp_path / "imported"
    result = CliRunner().invoke(import_, [str(source), "-o", str(output)])
    assert result.exit_code == 0, result.output
    assert_has_checksums(output)
    assert [info.events for info in read_run(output).ranks] == [3]


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (query, ["TRACE", "SELECT count(*) FROM events"]),
        (compare, ["TRACE", str(SAMPLES / "straggler")]),
        (export, ["TRACE", "--to", "csv", "-o", "OUT"]),
    ],
)
def test_commands_without_a_report_print_the_damage_on_stderr(
    sample, tmp_path, command, arguments: Sequence[str]
):
    flip(next(sample.glob("rank-00001-*.arrow")), -20)
    paths = {"TRACE": str(sample), "OUT": str(tmp_path / "out.csv")}
    result = CliRunner().invoke(command, [paths.get(word, word) for word in arguments])
    assert result.exit_code == 0, result.output
    assert result.stderr.count(NOTE) == 1
    assert NOTE not in result.stdout
