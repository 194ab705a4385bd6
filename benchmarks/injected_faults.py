"""Whether faults that are put into real jobs are found, by the report and by live metrics.

    python benchmarks/injected_faults.py --jobs 18 --seed 11

Each job trains under DDP with 4 to 16 ranks. A seed chooses how many ranks are late (one; two at
once; one and then another), where (data, forward, backward, optimizer, host code) and why: a sleep,
more computation, garbage collections, page faults, or a network link at a fifth of its rate (in
network namespaces: needs root, otherwise these jobs are left out). `ddltrace watch` serves metrics
of the job while it runs; the last ones before its end count. The suspects of the report are the
host whose TCP connections it finds slow, if any, then the rows of `root_causes`, in its order.
Needs the repository's tests beside it: the job is theirs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path.insert(0, str(TESTS))

from support.jobs import DDLTRACE, JOBS, environment, free_port, on_ranks, traced  # noqa: E402

import ddltrace  # noqa: E402
from ddltrace.analyzer.measures.connections import slow_connections  # noqa: E402
from ddltrace.analyzer.model import Analysis  # noqa: E402

STEPS: Final = 60
ACTIVITY: Final = {"forward": "compute", "backward": "compute", "optimizer": "update"}
WORK: Final = ("sleep", "compute", "collect", "memory", "network")
PATTERNS: Final = ("one", "two", "moving")
HOSTS: Final = 4
SCRAPE_S: Final = 1.0


@dataclass(frozen=True)
class Fault:
    """One late rank.

    Attributes:
        rank: The rank.
        place: Where in its step: data, forward, backward, optimizer, host or network.
        ms: By how much it is late.
        work: What makes it late.
        steps: The first step, and the one after the last.
    """

    rank: int
    place: str
    ms: int
    work: str
    steps: tuple[int, int]

    def __str__(self) -> str:
        first, end = self.steps
        return f"{self.rank}:{self.place}:{self.ms}:{self.work}:{first}:{end}"

    def is_suspect(self, suspect: Suspect) -> bool:
        """Whether a suspect of the report is this fault, by rank and activity."""
        return suspect == (self.rank, ACTIVITY.get(self.place, self.place))


Suspect = tuple[int, str]
"""Rank and activity."""


def suspects_of(analysis: Analysis) -> list[Suspect]:
    """The suspects of a report, in its order. Hosts of an emulated network have one rank each."""
    slow = slow_connections(analysis.connections)
    link = [] if slow is None or slow.host is None else [(int(slow.host[4:]), "network")]
    return [*link, *((cause.rank, cause.activity) for cause in analysis.root_causes)]


@dataclass(frozen=True)
class Job:
    """One job with its faults."""

    ranks: int
    pattern: str
    faults: tuple[Fault, ...]
    buffers: bool

    def command(self, folder: Path) -> list[str]:
        """The command that runs and traces it."""
        injected = [str(fault) for fault in self.faults if fault.work != "network"]
        own = [",".join(injected), str(int(self.buffers)), str(STEPS)]
        if injected:
            return traced(folder, on_ranks("late_rank.py", *own, ranks=self.ranks))
        (fault,) = self.faults
        network = ["--hosts", str(HOSTS), "--bandwidth", "400mbit"]
        slow = ["--slow-host", f"host={fault.rank},factor=5"]
        script = [sys.executable, str(JOBS / "late_rank.py"), *own]
        return traced(folder, script, *network, *slow)

    def run(self, folder: Path) -> tuple[Analysis, int | None]:
        """Runs it.

        Returns:
            Its analysis, and the straggler in the last metrics that name one.
        """
        command, port = self.command(folder), free_port()
        with (folder.parent / "output").open("w+") as output:
            job = subprocess.Popen(command, env=environment(), stdout=output, stderr=output)
            with watched(folder, port):
                straggler = None
                while job.poll() is None:
                    found = straggler_now(port)
                    straggler = straggler if found is None else found
                    time.sleep(SCRAPE_S)
            if job.returncode:
                output.seek(0)
                sys.exit(f"the job failed:\n{output.read()[-2000:]}")
        return ddltrace.open(folder).analyze(), straggler


@contextlib.contextmanager
def watched(folder: Path, port: int) -> Iterator[None]:
    """Serves metrics of a job as long as the context."""
    while not folder.exists():
        time.sleep(0.1)
    address = f"127.0.0.1:{port}"
    command = [*DDLTRACE, "watch", str(folder), "--metrics", address, "--every", "2"]
    watch = subprocess.Popen(command, env=environment(), stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        watch.terminate()
        watch.wait()


def straggler_now(port: int) -> int | None:
    """The rank that the metrics name as straggler; None if there is none, or no metrics."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            text = answer.read().decode()
    except OSError:
        return None
    for family in text_string_to_metric_families(text):
        if family.name == "ddltrace_straggler":
            for sample in family.samples:
                return int(sample.labels["rank"])
    return None


def jobs(count: int, seed: int, *, network: bool) -> list[Job]:
    """Jobs in which every kind of work occurs equally often, and every pattern."""
    chance = random.Random(seed)
    works = WORK if network else WORK[:-1]
    return [
        _job(chance, works[number % len(works)], PATTERNS[number // len(works) % len(PATTERNS)])
        for number in range(count)
    ]


def _job(chance: random.Random, work: str, pattern: str) -> Job:
    buffers = chance.random() < 0.5
    if work == "network":
        fault = Fault(chance.randrange(HOSTS), "network", 0, work, (0, STEPS))
        return Job(HOSTS, "one", (fault,), buffers)
    ranks = chance.randint(4, 16)
    late = chance.sample(range(ranks), 1 if pattern == "one" else 2)
    half = STEPS // 2
    spans = [(0, half), (half, STEPS)] if pattern == "moving" else [(0, STEPS)] * 2
    faults = []
    for rank, span in zip(late, spans, strict=False):
        place = chance.choice(("data", "forward", "backward", "optimizer", "host"))
        faults.append(Fault(rank, place, chance.randint(40, 80), work, span))
    return Job(ranks, pattern, tuple(faults), buffers)


def main() -> None:
    """Runs the jobs and prints what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=18)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    totals: Counter[str] = Counter()
    for job in jobs(options.jobs, options.seed, network=os.geteuid() == 0):
        with tempfile.TemporaryDirectory(prefix="ddltrace-faults-") as name:
            analysis, straggler = job.run(Path(name, "trace"))
        suspects = suspects_of(analysis)
        first = bool(suspects) and any(fault.is_suspect(suspects[0]) for fault in job.faults)
        found = [any(map(fault.is_suspect, suspects[:2])) for fault in job.faults]
        late = {fault.rank for fault in job.faults}
        totals.update(
            {
                "jobs": 1,
                "faults": len(found),
                "first suspect": first,
                "faults in top two": sum(found),
                "live": straggler in late,
            }
        )
        print(
            f"{job.ranks:2} ranks {job.pattern:<6} {' '.join(map(str, job.faults)):<44} "
            f"suspects {' '.join(f'{rank}:{activity}' for rank, activity in suspects[:3]):<32} "
            f"live {'-' if straggler is None else straggler:<2}"
            f"{'' if first and all(found) and straggler in late else '  <'}",
            flush=True,
        )
    count = totals["jobs"]
    print(f"the first suspect of the report is a fault: {totals['first suspect']} of {count}")
    print(f"faults in the first two suspects: {totals['faults in top two']} of {totals['faults']}")
    print(f"the straggler of the metrics is a faulty rank: {totals['live']} of {count}")


if __name__ == "__main__":
    main()
