"""Damaged traces end in one line or in a marked partial report: no traceback, no hang.

The number of mutations is small enough for every run; DDLTRACE_FUZZ=5000 runs more of them.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest
from support.sampling import all_cases

from ddltrace.analyzer.open_trace import open_trace
from ddltrace.analyzer.report.text_report import render_report
from ddltrace.tracer.errors import DdltraceError

MUTATIONS = int(os.environ.get("DDLTRACE_FUZZ", "600" if all_cases() else "250"))
HOSTILE = (
    None,
    -1,
    0,
    2**31,
    2**63,
    -(2**63),
    10**400,
    1.5,
    float("nan"),
    float("inf"),
    True,
    "",
    "\x1b[2J\x1b]0;owned\x07",
    "<script>alert(1)</script>",
    "../../etc/passwd",
    "x" * 1_000_000,
    [],
    {},
    [[]],
    {"a": {"b": []}},
    [None] * 1000,
)


@pytest.fixture(scope="module")
def sound(build_class, tmp_path_factory) -> Path:
    """A small trace with a bit of everything."""
    built = build_class(tmp_path_factory.mktemp("fuzz") / "trace", 2)
    weight, bias = built.tensor("net.weight", 400), built.tensor("net.bias", 40)
    for rank in range(2):
        one = built[rank]
        one.info_changes["clock"] = {
            "monotonic_ns": 5,
            "unix_ns": 10**18,
            "samples": [{"local_ns": i * 10**9, "offset_ns": 7, "rtt_ns": 50} for i in range(3)],
        }
        for number in range(6):
            one.step, begin = number, 100 * number
            one.add("data", begin, begin + 5, name="next batch")
            one.add("phase", begin + 5, begin + 40, name="forward")
            one.add("layer", begin + 10, begin + 30, name="net")
            one.add("phase", begin + 40, begin + 90, name="backward")
            one.add("gradient", begin + 50, begin + 50, tensors=[weight], name="net.weight")
            one.message(
                "all_reduce", begin + 55, begin + 80, seq=number, bytes=440, tensors=[weight, bias]
            )
            one.add("wait", begin + 70, begin + 90, name="backward")
            op, column = ("send", "bytes") if rank == 0 else ("recv", "out_bytes")
            sent = one.message(
                op, begin + 91, begin + 94, seq=number, peer=1 - rank, tag=0, **{column: 64}
            )
            one.wait(begin + 91, begin + 94, sent)
            one.add("phase", begin + 94, begin + 99, name="optimizer")
            one.whole_step(number, begin, begin + 100)
    return built.write()


def _flip_bits(path: Path, random_: random.Random) -> None:
    file = random_.choice(sorted(path.glob("*.arrow")))
    content = bytearray(file.read_bytes())
    for _ in range(random_.choice((1, 1, 2, 8, 64))):
        content[random_.randrange(len(content))] ^= 1 << random_.randrange(8)
    file.write_bytes(content)


def _cut(path: Path, random_: random.Random) -> None:
    file = random_.choice(sorted(path.iterdir()))
    content = file.read_bytes()
    file.write_bytes(content[: random_.randrange(len(content))])


def _splice(path: Path, random_: random.Random) -> None:
    file = random_.choice(sorted(path.glob("*.arrow")))
    content = file.read_bytes()
    a, b = sorted((random_.randrange(len(content)), random_.randrange(len(content))))
    file.write_bytes(content[:a] + content[b:] + content[a:b])


def _remove(path: Path, random_: random.Random) -> None:
    random_.choice(sorted(path.iterdir())).unlink()


def _flip_json(path: Path, random_: random.Random) -> None:
    file = path / "run.json"
    content = bytearray(file.read_bytes())
    content[random_.randrange(len(content))] = random_.randrange(256)
    file.write_bytes(content)


def _poison(path: Path, random_: random.Random) -> None:
    """Puts a hostile value somewhere into run.json."""
    file = path / "run.json"
    value = json.loads(file.read_text())
    places: list[tuple[dict | list, str | int]] = []

    def collect(node) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, child in items:
            places.append((node, key))
            if isinstance(child, dict | list):
                collect(child)

    collect(value)
    for _ in range(random_.choice((1, 1, 2, 5))):
        node, key = random_.choice(places)
        node[key] = random_.choice(HOSTILE)
    file.write_text(json.dumps(value))


KINDS = (_flip_bits, _flip_bits, _cut, _splice, _remove, _flip_json, _poison, _poison, _poison)


def test_no_damage_ends_in_a_traceback(sound, tmp_path):
    outcomes = {"error": 0, "report": 0}
    for seed in range(MUTATIONS):
        random_ = random.Random(seed)
        path = tmp_path / "damaged"
        shutil.copytree(sound, path)
        kind = random_.choice(KINDS)
        kind(path, random_)
        try:
            analysis = open_trace(path).analyze()
            json.dumps(analysis.to_json(), allow_nan=False)
            report = render_report(analysis)
        except DdltraceError as error:
            lines = str(error).splitlines()
            outcomes["error"] += 1
            if len(lines) != 1:
                pytest.fail(f"seed {seed}: {lines}")
        except Exception as error:
            raise AssertionError(f"seed {seed}, {kind.__name__}") from error
        else:
            assert "\x1b" not in report, seed
            assert max(map(len, report.splitlines())) <= 100, seed
            outcomes["report"] += 1
        shutil.rmtree(path)
    assert min(outcomes.values()) > MUTATIONS // 20
