"""Real clocks that are shifted or drift: found, and the residual covers what is left."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.jobs import JOBS, Done, free_port, run, traced
from support.sampling import sampled

import ddltrace
from ddltrace.analyzer.trace.align import SHARED, RankClock
from ddltrace.tracer.timing.clocks import clock_domain, is_clock_interposed
from ddltrace.tracer.trace.run_info import RankInfo
from ddltrace.tracer.trace.run_reader import read_run

FAKETIME = next(
    (
        path
        for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib")
        if (path := Path(folder, "faketime", "libfaketimeMT.so.1")).exists()
    ),
    None,
)


@functools.cache
def time_namespaces_work() -> bool:
    if shutil.which("unshare") is None:
        return False
    done = subprocess.run(
        ["unshare", "--time", "--monotonic", "5", "true"], capture_output=True, check=False
    )
    return done.returncode == 0


needs_namespace = pytest.mark.skipif(
    not time_namespaces_work(), reason="needs root, unshare and time namespaces"
)
needs_faketime = pytest.mark.skipif(FAKETIME is None, reason="needs libfaketime (faketime)")


def run_with_clocks(
    tmp_path: Path, wraps: list[str], *, seconds: float = 4, shifts: tuple[float, ...] = ()
) -> Done:
    """Traces `clock_probe.py` on some ranks, each behind a command of its own."""
    job = [shlex.quote(sys.executable), shlex.quote(str(JOBS / "clock_probe.py")), str(seconds)]
    lines = []
    for rank, wrap in enumerate(wraps):
        shift = shifts[rank] if shifts else 0
        lines.append(f"RANK={rank} CLOCK_SHIFT_S={shift} {wrap} {' '.join(job)} &")
    lines.append("wait")
    (tmp_path / "launch.sh").write_text("\n".join(lines))
    done = run(
        traced(tmp_path / "trace", ["bash", str(tmp_path / "launch.sh")]),
        cwd=tmp_path,
        WORLD_SIZE=str(len(wraps)),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
    )
    assert done.status == 0, done.stderr
    return done


def rank_of(tmp_path: Path, rank: int) -> tuple[RankInfo, RankClock]:
    trace = ddltrace.open(tmp_path / "trace")
    info = trace.infos(rank)[0]
    return info, trace.clocks[info.segment]


def errors(done: Done, rank: int, clock: RankClock) -> np.ndarray:
    """Distance of the aligned from the true clock at every reading that the job printed, ns."""
    readings = re.findall(rf"rank {rank} clock (\d+) (\d+) (\d+)", done.stdout)
    assert len(readings) > 20
    local, true, width = np.array(readings, dtype=np.int64).T
    sharp = width < 20_000  # the process was not interrupted between the two readings
    return np.abs(clock.apply(local[sharp]) - true[sharp]).astype(float)


def check(done: Done, tmp_path: Path, rank: int = 1) -> RankClock:
    info, clock = rank_of(tmp_path, rank)
    assert info.errors == []
    assert clock.residual_ns is not None
    worst = errors(done, rank, clock).max()
    best_rtt = min(sample["rtt_ns"] for sample in info.clock["samples"])
    assert worst <= 100_000 + best_rtt / 2
    assert worst <= clock.residual_ns + 20_000  # the job's own reading is that unsure
    assert clock.residual_ns <= 100_000 + best_rtt
    return clock


def test_ranks_of_one_host_share_a_clock_and_it_is_known(tmp_path: Path) -> None:
    run_with_clocks(tmp_path, ["", ""], seconds=1)
    trace = ddltrace.open(tmp_path / "trace")
    assert {clock.method for clock in trace.clocks.values()} == {SHARED}
    analysis = trace.analyze().to_json()
    assert analysis["clock"]["max_residual_us"] == 0
    # It was not only claimed: one exchange was made, and its offset is 0 within its round trip.
    samples = trace.infos(1)[0].clock["samples"]
    assert len(samples) == 1
    assert abs(samples[0]["offset_ns"]) <= samples[0]["rtt_ns"] / 2 + 1_000


@pytest.mark.long
@needs_namespace
@pytest.mark.parametrize("shift", [7, -3])
def test_an_offset_of_seconds_is_found(tmp_path: Path, shift: int) -> None:
    wrap = f"unshare --time --monotonic {shift}"
    done = run_with_clocks(tmp_path, ["", wrap], shifts=(0, shift))
    clock = check(done, tmp_path)
    assert abs(clock.offset_ns + shift * 10**9) <= clock.residual_ns + 20_000
    infos = read_run(tmp_path / "trace").ranks
    assert infos[0].clock_domain != infos[1].clock_domain


@pytest.mark.long
@needs_faketime
@pytest.mark.parametrize("ppm", sampled([50, -50], 1))
def test_a_drift_is_found(tmp_path: Path, ppm: int) -> None:
    wrap = f"env LD_PRELOAD={FAKETIME} FAKETIME='+0 x{1 + ppm / 1e6:.6f}'"
    done = run_with_clocks(tmp_path, ["", wrap], seconds=12)
    clock = check(done, tmp_path)
    assert clock.drift * 1e6 == pytest.approx(-ppm, abs=8)
    assert "interposed" in read_run(tmp_path / "trace").ranks[1].clock_domain


@pytest.mark.long
@needs_faketime
@needs_namespace
def test_ranks_on_three_clocks_with_a_drifting_rank_zero(tmp_path: Path) -> None:
    """Rank 0's own clock drifts; what is drawn is drawn on it."""
    wraps = [
        f"env LD_PRELOAD={FAKETIME} FAKETIME='+0 x1.00005'",
        "",
        "unshare --time --monotonic 9",
    ]
    done = run_with_clocks(tmp_path, wraps, seconds=6, shifts=(0, 0, 9))
    readings = re.findall(r"rank 0 clock (\d+) (\d+) (\d+)", done.stdout)
    local, true, width = np.array(readings, dtype=np.int64).T
    slope, base = np.polyfit((true - true[0])[width < 20_000], (local - true)[width < 20_000], 1)
    assert slope * 1e6 == pytest.approx(50, abs=5)
    for rank in (1, 2):
        _, clock = rank_of(tmp_path, rank)
        assert clock.residual_ns is not None
        own = np.array(
            re.findall(rf"rank {rank} clock (\d+) (\d+) (\d+)", done.stdout), dtype=np.int64
        )
        own = own[own[:, 2] < 20_000]
        expected = (own[:, 1] - true[0]) * slope + base + own[:, 1]
        worst = np.abs(clock.apply(own[:, 0]) - expected).max()
        assert worst <= 100_000
        assert worst <= clock.residual_ns + 20_000


@needs_faketime
def test_a_replaced_clock_is_never_taken_for_the_hosts_own() -> None:
    code = (
        "from ddltrace.tracer.timing.clocks import clock_domain, is_clock_interposed\n"
        "print(is_clock_interposed(), clock_domain())"
    )
    assert not is_clock_interposed()
    plain, again, fake = (
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **extra},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split(maxsplit=1)
        for extra in (
            {},
            {},
            {"LD_PRELOAD": str(FAKETIME), "FAKETIME": "+0 x1.0000001"},
        )
    )
    assert plain == again
    assert plain[1].strip() == clock_domain()
    assert plain[0] == "False"
    assert fake[0] == "True"
    assert fake[1] != plain[1]


@needs_namespace
def test_a_rank_that_is_killed_leaves_its_exchanges(tmp_path: Path) -> None:
    """The exchanges so far are on disk: the clock of what it recorded is known."""
    port = str(free_port())
    python, probe = shlex.quote(sys.executable), shlex.quote(str(JOBS / "clock_probe.py"))
    (tmp_path / "launch.sh").write_text(
        f"RANK=0 {python} {probe} 120 > /dev/null 2>&1 & ZERO=$!\n"
        f"RANK=1 setsid unshare --time --monotonic 4 {python} {probe} 120 & ONE=$!\n"
        "for _ in {1..600}; do\n"
        f"  test $(cat {tmp_path}/trace/rank-00001-*.json | grep -c rtt_ns) -ge 2 && break\n"
        "  sleep 0.1\n"
        "done\n"
        "kill -9 -- -$ONE $ZERO; wait; exit 0\n"
    )
    run(
        traced(tmp_path / "trace", ["bash", str(tmp_path / "launch.sh")]),
        cwd=tmp_path,
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
    )
    info, clock = rank_of(tmp_path, 1)
    assert info.status == "killed"
    assert len(info.clock["samples"]) >= 2
    assert clock.residual_ns is not None
    assert abs(clock.offset_ns + 4 * 10**9) <= clock.residual_ns + 1_000
