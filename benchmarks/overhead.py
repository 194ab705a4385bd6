"""What tracing costs a job: step time, processor time, memory, per event and on disk.

Two runs of the same job differ by some percent on a shared machine, more than what is to be
measured. So all modes of a job are started at once, on two ranks each, and take turns: one of
them trains for a second while the others wait for their turn. Every round holds each mode once,
in an order of its own; the median step of a mode is taken over all rounds, processor time round
by round. Two processes of the same code differ by some percent, too, for as long as they live: the
whole is started several times, in an order of its own each time, and the interval is that of the
starts. What a mode leaves to do for its threads falls into its own turn, or into the pause after
it. The modes: untraced; untraced again, which shows what chance alone does; `ddltrace run` at each
level; `torch.profiler`. On request: level `layer` without the counters of processors and memory,
and with a dashboard on the same machine that follows the job in a browser, and is stopped outside
its turns. Prints the numbers of docs/measurements.md::

    python benchmarks/overhead.py                      # all three jobs, an hour
    python benchmarks/overhead.py --job cnn            # a quarter of an hour
    python benchmarks/overhead.py --job cnn --mode layer --mode no-counters --mode followed
    python benchmarks/overhead.py --upload 6           # a store against a directory: five minutes

The jobs: `cnn`, a residual CNN under DistributedDataParallel; `messages`, a step that makes
1,000 small all-reduces; `layers`, a model of 2,000 layers.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import psutil

if TYPE_CHECKING:
    from torch import nn

MODES = ("untraced", "again", "comm", "layer", "op", "profiler")
NO_COUNTERS = "no-counters"
FOLLOWED = "followed"
ON_REQUEST = (NO_COUNTERS, FOLLOWED)
UPLOAD = "upload"
"""Level `layer`, with a store of `store` as the output."""
RUN_OPTIONS = {
    **{level: ("--level", level) for level in ("comm", "layer", "op")},
    NO_COUNTERS: ("--level", "layer", "--no-counters"),
    **dict.fromkeys((FOLLOWED, UPLOAD), ("--level", "layer")),
}
"""Options of `ddltrace run` in each traced mode."""
JOBS = ("cnn", "messages", "layers")
WARM_UP_STEPS = 15  # the window of level `op` lies in it: what it leaves behind is measured
NUM_MESSAGES = 1000
NUM_LAYERS = 2000
NUM_RANKS = 2
# How glibc gives memory back depends on what a process has done before, and with it how many
# page faults a step of the CNN takes: a job that was profiled once was 15 % faster ever after.
SAME_FOR_ALL = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
SETTLING_STEPS = 2  # of each turn, not counted: caches fill again
PAUSE_S = 0.3  # longer than a tracer keeps what it has before it writes
START_TIMEOUT_S = 120
CALLS = (
    *("a layer", "a blocking all_reduce", "the launch of an asynchronous one"),
    *("the launch of a reduce_scatter", "the launch of a barrier"),
    "the launch of a functional all_reduce",
)
CALLS_OF_TURN = 100
NUM_TURNS = 300
BUCKET = "bucket"


def residual_cnn() -> nn.Module:
    """A small residual network for images of 32 x 32 pixels."""
    from torch import nn

    def block(width: int, out: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(width, out, 3, stride=2 if width != out else 1, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
        )

    widths = [16, 16, 16, 32, 32, 64, 64]
    blocks = [block(a, b) for a, b in pairwise(widths)]
    first, last = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(64, 10)
    return nn.Sequential(first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), last)


def make_step(job: str) -> Callable[[], None]:
    """One step of a job, ready to be called again and again."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    if job == "messages":
        tensors = [torch.ones(256) for _ in range(NUM_MESSAGES)]
        parameter = nn.Parameter(torch.ones(4))
        small = torch.optim.SGD([parameter], lr=0.01)

        def messages() -> None:
            for tensor in tensors:
                dist.all_reduce(tensor)
            parameter.square().sum().backward()  # type: ignore[no-untyped-call]
            small.step()

        return messages

    if job == "cnn":
        module, inputs = residual_cnn(), torch.randn(32, 3, 32, 32)
        labels = torch.randint(0, 10, (32,))
    else:
        halves = [nn.Linear(32, 32) if i % 20 == 0 else nn.ReLU() for i in range(NUM_LAYERS - 1)]
        module, inputs = nn.Sequential(*halves, nn.Linear(32, 10)), torch.randn(256, 32)
        labels = torch.randint(0, 10, (256,))
    model = DistributedDataParallel(module, bucket_cap_mb=0.25)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def train() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return train


def work(job: str, address: str, with_profiler: bool) -> None:
    """The job on one rank: trains on request of the parent."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    step = make_step(job)
    for _ in range(WARM_UP_STEPS):
        step()
    with Client(address) as launcher:
        launcher.send(dist.get_rank())
        while steps := launcher.recv():
            profiler: Any = profile(activities=[ProfilerActivity.CPU]) if with_profiler else None
            if profiler:
                profiler.start()
            for _ in range(SETTLING_STEPS):
                step()
            cpu = time.process_time()
            times = [time.perf_counter()]
            for _ in range(steps):
                step()
                times.append(time.perf_counter())
            cpu = time.process_time() - cpu
            turn = Turn([end - start for start, end in pairwise(times)], cpu)
            if profiler:
                profiler.stop()
            launcher.send(turn)
        launcher.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    dist.destroy_process_group()


@dataclass(frozen=True)
class Turn:
    """What some steps took.

    Attributes:
        step_seconds: Each of them; of several ranks, those of all.
        cpu_seconds: Processor time of all of them, of a rank or on average over ranks.
    """

    step_seconds: list[float]
    cpu_seconds: float


class RunningJob:
    """A job in one mode on all its ranks, which trains only when it has its turn.

    Args:
        job: Which.
        mode: One of `MODES` or `ON_REQUEST`, or `UPLOAD`.
        directory: Where to leave what it writes; a trace goes to ``directory / "trace-MODE"``.
    """

    def __init__(self, job: str, mode: str, directory: Path) -> None:
        address = str(directory / f"{mode}.socket")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={NUM_RANKS}", __file__]
        command += ["--rank-of", job, "--address", address]
        if mode == "profiler":
            command.append("--profiler")
        trace = directory / f"trace-{mode}"
        if mode in RUN_OPTIONS:
            output = f"s3://{BUCKET}/{directory.name}" if mode == UPLOAD else str(trace)
            run = [sys.executable, "-m", "ddltrace", "run", *RUN_OPTIONS[mode], "-o", output]
            command = [*run, "--", *command]
        environment = {**os.environ, **SAME_FOR_ALL}
        self._log = (directory / f"{mode}.log").open("w+")
        self._follower: Follower | None = None
        with Listener(address) as listener:
            listener._listener._socket.settimeout(START_TIMEOUT_S)  # type: ignore[attr-defined]
            self._process = subprocess.Popen(
                command, stdout=self._log, stderr=subprocess.STDOUT, env=environment, cwd=directory
            )
            try:
                self._ranks: list[Connection] = [listener.accept() for _ in range(NUM_RANKS)]
                for rank in self._ranks:
                    rank.recv()
            except (OSError, EOFError):
                self._failed()
        if mode == FOLLOWED:
            self._follower = Follower(trace)

    def train(self, steps: int) -> Turn:
        """Gives it a turn of some steps."""
        with nullcontext() if self._follower is None else self._follower.resumed():
            turns: list[Turn] = self._ask(steps)
        return Turn(
            [seconds for turn in turns for seconds in turn.step_seconds],
            statistics.mean(turn.cpu_seconds for turn in turns),
        )

    def launcher_seconds(self) -> float:
        """Processor time of its first process so far: of a traced job, that of `ddltrace run`."""
        used = psutil.Process(self._process.pid).cpu_times()
        return float(used.user + used.system)

    def end(self) -> int:
        """Ends it; returns the most memory that a rank held, in kB."""
        peak_kb: int = max(self._ask(0))
        if self._process.wait():
            self._failed()
        return peak_kb

    def stop(self) -> None:
        """Ends it whatever it does."""
        if self._follower is not None:
            self._follower.stop()
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()
        self._log.close()

    def _ask(self, steps: int) -> list[Any]:
        try:
            for rank in self._ranks:
                rank.send(steps)
            return [rank.recv() for rank in self._ranks]
        except (OSError, EOFError):
            self._failed()

    def _failed(self) -> NoReturn:
        self.stop()
        sys.exit(f"a job failed:\n{Path(self._log.name).read_text()[-2000:]}")


class Follower:
    """A dashboard that follows a trace in a browser. It is stopped until it is resumed.

    Args:
        trace: A trace that is being written.
    """

    def __init__(self, trace: Path) -> None:
        from dashboard import chromium, dashboard_of

        with ExitStack() as started:
            server, _, url = started.enter_context(dashboard_of(trace))
            page = started.enter_context(chromium()).new_page()
            page.goto(url)  # of a trace that is being written: the page that follows it
            page.wait_for_selector("main[data-page=live] #live-tiles")
            self._server = psutil.Process(server.pid)
            self._server.suspend()
            started.callback(self._server.resume)  # a suspended process does not end
            self._started = started.pop_all()

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Lets the dashboard follow the job in the context."""
        self._server.resume()
        try:
            yield
        finally:
            self._server.suspend()

    def stop(self) -> None:
        """Ends the dashboard and the browser."""
        self._started.close()


@dataclass
class Start:
    """What was measured of all modes of a job that were started together.

    Attributes:
        turns: For each mode: its turns, one in each round.
        peaks_kb: For each mode: the peak memory of a rank.
        event_bytes: For each traced mode: the mean size of an event on disk, and the size of one
            more event, without the fixed part of a file.
    """

    turns: dict[str, list[Turn]]
    peaks_kb: dict[str, int]
    event_bytes: dict[str, tuple[float, float]]

    def cpu_ratio(self, mode: str) -> float:
        """A mode's median ratio of processor time to the untraced one in the same round."""
        pairs = zip(self.turns[mode], self.turns["untraced"], strict=True)
        return statistics.median(own.cpu_seconds / plain.cpu_seconds for own, plain in pairs)

    def step_ms(self, mode: str) -> float:
        """The median length of a mode's steps."""
        steps = [seconds for turn in self.turns[mode] for seconds in turn.step_seconds]
        return statistics.median(steps) * 1e3


def take_turns(job: str, modes: Sequence[str], rounds: int, seconds: float, *, label: str) -> Start:
    """Starts a job in some modes and lets them take turns.

    Args:
        job: Which.
        modes: Which of `MODES` and `ON_REQUEST`.
        rounds: In each of which every mode has one turn.
        seconds: Length of a turn.
        label: Text shown beside the progress.
    """
    turns: dict[str, list[Turn]] = {mode: [] for mode in modes}
    with tempfile.TemporaryDirectory(prefix="ddltrace-") as name, ExitStack() as started:
        directory = Path(name)
        running = {}
        for mode in random.sample(modes, len(modes)):
            print(f"\r{job}: {label}: starting {mode:<11}", end="", file=sys.stderr)
            running[mode] = RunningJob(job, mode, directory)
            started.callback(running[mode].stop)
        usual = statistics.mean(running["untraced"].train(10).step_seconds)
        steps = max(5, math.ceil(seconds / usual))
        order = list(modes)
        for number in range(rounds):
            random.shuffle(order)
            for mode in order:
                progress = f"round {number + 1}/{rounds}: {mode:<11}"
                print(f"\r{job}: {label}: {progress}", end="", file=sys.stderr)
                turns[mode].append(running[mode].train(steps))
                time.sleep(PAUSE_S)
        peaks = {mode: running[mode].end() for mode in modes}
        sizes = {
            mode: event_sizes(directory / f"trace-{mode}") for mode in modes if mode in RUN_OPTIONS
        }
    return Start(turns, peaks, sizes)


def measure(job: str, modes: Sequence[str], starts: int, rounds: int, seconds: float) -> None:
    """Measures one job in some modes and prints its table."""
    found = [
        take_turns(job, modes, rounds, seconds, label=f"start {number + 1}/{starts}")
        for number in range(starts)
    ]
    print(file=sys.stderr)
    print(
        f"\n{job}: {NUM_RANKS} ranks, {starts} starts of {rounds} rounds; ratios of the median "
        "step and of processor time to untraced: in each start; of these median, 95 % interval"
    )
    print(
        "mode         step ms   time (interval)          processor time (interval)  MB more"
        "  B/event  a further one"
    )
    for mode in modes:
        time_ratio = interval([start.step_ms(mode) / start.step_ms("untraced") for start in found])
        cpu_ratio = interval([start.cpu_ratio(mode) for start in found])
        step_ms = statistics.median(start.step_ms(mode) for start in found)
        more_mb = statistics.median(
            (start.peaks_kb[mode] - start.peaks_kb["untraced"]) / 1024 for start in found
        )
        size = ""
        if mode in RUN_OPTIONS:
            each, further = zip(*(start.event_bytes[mode] for start in found), strict=True)
            size = f"{statistics.median(each):8.1f} {statistics.median(further):14.1f}"
        print(f"{mode:<11} {step_ms:8.2f}   {time_ratio:<24} {cpu_ratio:<26} {more_mb:7.1f} {size}")


@contextmanager
def store() -> Iterator[None]:
    """Runs a server of Amazon's S3 protocol at the lowest priority, as the store of `UPLOAD`."""
    from pyarrow import fs

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = ["nice", "-n", "19", sys.executable, "-m", "moto.server", "-H", "127.0.0.1"]
    server = subprocess.Popen([*command, "-p", port], stderr=subprocess.DEVNULL)
    try:
        os.environ |= {"AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none"}
        os.environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
        place = {"endpoint_override": f"127.0.0.1:{port}", "scheme": "http"}
        retries = fs.AwsStandardS3RetryStrategy(max_attempts=20)  # until it has started
        fs.S3FileSystem(**place, retry_strategy=retries, allow_bucket_creation=True).create_dir(
            BUCKET
        )
        yield
    finally:
        server.terminate()
        server.wait()


def measure_upload(job: str, pairs: int, seconds: float) -> None:
    """Compares a job that uploads its trace with one that writes it to a directory.

    The upload does not keep to turns, so only one job is alive at a time.
    """
    step_ratios, cpu_ratios = [], []
    launchers: dict[str, list[float]] = {"layer": [], UPLOAD: []}
    with store():
        for number in range(pairs):
            turns = {}
            for mode in random.sample(list(launchers), 2):
                print(f"\r{job}: pair {number + 1}/{pairs}: {mode:<9}", end="", file=sys.stderr)
                with tempfile.TemporaryDirectory(prefix="ddltrace-") as name:
                    running = RunningJob(job, mode, Path(name))
                    try:
                        usual = statistics.mean(running.train(10).step_seconds)
                        began, used = time.monotonic(), running.launcher_seconds()
                        turns[mode] = running.train(math.ceil(seconds / usual))
                        used = running.launcher_seconds() - used
                        launchers[mode].append(used / (time.monotonic() - began))
                        running.end()
                    finally:
                        running.stop()
            step = {mode: statistics.median(turn.step_seconds) for mode, turn in turns.items()}
            step_ratios.append(step[UPLOAD] / step["layer"])
            cpu_ratios.append(turns[UPLOAD].cpu_seconds / turns["layer"].cpu_seconds)
    print(file=sys.stderr)
    print(
        f"\n{job}: {NUM_RANKS} ranks, {pairs} pairs of runs of {seconds:.0f} s, with the store on "
        "the same machine; ratio of -o s3://... to -o DIRECTORY, median and 95 % interval"
    )
    print(f"median step                {interval(step_ratios)}")
    print(f"processor time of a rank   {interval(cpu_ratios)}")
    for mode, shares in launchers.items():
        print(f"ddltrace run, {mode:<12} {statistics.median(shares) * 1e3:.1f} ms of processor / s")


def run_traced(script: str, arguments: Sequence[str], level: str = "layer") -> int:
    """Runs a script in traced ranks with ``--rank-of``, and returns the exit status.

    Args:
        script: Path of the script.
        arguments: Further arguments of each rank.
        level: Level of the trace, which is deleted at the end.
    """
    with tempfile.TemporaryDirectory(prefix="ddltrace-") as name:
        command = [sys.executable, "-m", "ddltrace", "run", "--level", level]
        command += ["-o", str(Path(name) / "trace"), "--"]
        command += [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={NUM_RANKS}", script, "--rank-of", *arguments]
        environment = {**os.environ, **SAME_FOR_ALL}
        return subprocess.run(command, env=environment, check=False).returncode


def interval(values: Sequence[float]) -> str:
    """A median and the order statistics that hold the true one in 95 % of all cases.

    The number of values below the true median is binomial with p = 1/2, whatever the values'
    distribution.
    """
    ordered, count = sorted(values), len(values)
    below, low = 0.0, 0
    while (below := below + math.comb(count, low) / 2**count) <= 0.025:
        low += 1
    middle = f"{statistics.median(ordered):.3f}"
    if low == 0:
        return f"{middle} (too few)"
    return f"{middle} ({ordered[low - 1]:.3f} to {ordered[count - low]:.3f})"


def ranks_of(trace: Path) -> list[dict[str, Any]]:
    """What a trace says of its ranks."""
    ranks: list[dict[str, Any]] = json.loads((trace / "run.json").read_text())["ranks"]
    return ranks


def event_sizes(trace: Path) -> tuple[float, float]:
    """Bytes that an event takes on disk, and that each further one takes.

    A file has some thousand bytes of its own, which are much of a short trace: the second number is
    by how much its files are longer than with the first half of their events.
    """
    from ddltrace.tracer.trace.event_file import write_events
    from ddltrace.tracer.trace.event_reader import read_events

    events = further = 0
    with tempfile.TemporaryDirectory() as name:
        halves = Path(name)
        for rank in ranks_of(trace):
            table, _ = read_events(trace, rank["segment"])
            half = len(table) // 2
            write_events(halves, rank["segment"], iter(table.slice(0, half).to_batches()))
            events += len(table)
            further += len(table) - half
        size = _size_of_events(trace)
        return size / events, (size - _size_of_events(halves)) / further


def _size_of_events(trace: Path) -> int:
    return sum(path.stat().st_size for path in trace.glob("*.arrow"))


@dataclass(frozen=True)
class HotPathCost:
    """What recording adds to one call.

    Attributes:
        added_ns: Nanoseconds on the thread that calls.
        plain_ns: How long the call takes without.
    """

    added_ns: float
    plain_ns: float

    def __str__(self) -> str:
        return f"{self.added_ns / 1e3:.1f} us, to {self.plain_ns / 1e3:.1f} us without"


def hot_path_costs() -> dict[str, HotPathCost]:
    """What one event adds to the thread that records it.

    Two processes of world size 1, one of them traced, take turns of some milliseconds: medians of
    the difference between neighbours, as a machine that is shared may be half as fast a second
    later. They share a core: what it takes to wake up another one is not recording's, and differs
    from one process to the next by more than that.
    """
    context = multiprocessing.get_context("spawn")
    with ExitStack() as started:
        ends = []
        for traced in (False, True):
            own, its = context.Pipe()
            process = context.Process(target=_time_calls, args=(its, traced))
            process.start()
            started.callback(process.join)
            started.callback(own.close)
            ends.append(own)

        def asked(end: Connection[str, float], call: str) -> float:
            end.send(call)
            return end.recv()

        costs = {}
        for call in CALLS:
            pairs = [tuple(asked(end, call) for end in ends) for _ in range(NUM_TURNS)]
            costs[call] = HotPathCost(
                statistics.median(own - plain for plain, own in pairs),
                statistics.median(plain for plain, _ in pairs),
            )
    return costs


def _time_calls(launcher: Connection[float, str], traced: bool) -> None:
    """One of the two processes: times requested calls until the connection is closed.

    What is timed is the calling thread's time on the core. A launch is what the call of an
    asynchronous message takes; its end is waited for before the next one, outside of what is
    timed: with many at a time, Gloo's thread is what is measured.
    """
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional
    from torch import nn

    from ddltrace.tracer.capture.session import current_session, start_session
    from ddltrace.tracer.config import CaptureConfig

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = self.inner
            for _ in range(CALLS_OF_TURN):
                inner(x)
            return x

    model, tensor, output = Outer(), torch.ones(16), torch.ones(16)

    def layers() -> float:
        return mean_ns(lambda: model(tensor))

    def messages() -> float:
        return mean_ns(lambda: [dist.all_reduce(tensor) for _ in range(CALLS_OF_TURN)])

    def mean_ns(calls: Callable[[], object]) -> float:
        start = time.thread_time_ns()
        calls()
        return (time.thread_time_ns() - start) / CALLS_OF_TURN

    def launch_ns(launch: Callable[[], Any]) -> float:
        taken = []
        for _ in range(CALLS_OF_TURN):
            start = time.thread_time_ns()
            work = launch()
            taken.append(time.thread_time_ns() - start)
            work.wait()
        return statistics.median(taken)

    launches: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(tensor, async_op=True),
        lambda: dist.reduce_scatter_tensor(output, tensor, async_op=True),
        lambda: dist.barrier(async_op=True),
        lambda: functional.all_reduce(tensor, "sum", dist.group.WORLD),
    ]
    turns = dict(
        zip(CALLS, (layers, messages, *[partial(launch_ns, x) for x in launches]), strict=True)
    )
    with tempfile.TemporaryDirectory() as name:
        dist.init_process_group("gloo", init_method=f"file://{name}/store", rank=0, world_size=1)
        if traced:
            start_session(CaptureConfig(directory=Path(name), level="layer"))
        try:
            while True:
                launcher.send(turns[launcher.recv()]())
        except EOFError:
            pass
        session = current_session()
        if session is not None:
            session.close()
        dist.destroy_process_group()


def main() -> None:
    """Parses the options and measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", choices=JOBS, action="append", help="default: all")
    parser.add_argument(
        "--mode",
        choices=MODES[1:] + ON_REQUEST,
        action="append",
        help=f"default: all but {' and '.join(ON_REQUEST)}",
    )
    parser.add_argument("--starts", type=int, default=6, help="6 give a 95 %% interval")
    parser.add_argument("--rounds", type=int, default=8, help="in each start")
    parser.add_argument("--seconds", type=float, default=0.8, help="length of a turn (0.8)")
    parser.add_argument("--upload", type=int, metavar="PAIRS", help="6 give a 95 %% interval")
    parser.add_argument("--rank-of", choices=JOBS, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--profiler", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        work(options.rank_of, options.address, options.profiler)
        return
    if options.upload:
        measure_upload("cnn", options.upload, seconds=15)
        return
    costs = hot_path_costs()
    for call, cost in costs.items():
        print(f"recording {call + ' adds':<39} {cost}")
    modes = MODES if options.mode is None else (MODES[0], *options.mode)
    for job in options.job or JOBS:
        measure(job, modes, options.starts, options.rounds, options.seconds)


if __name__ == "__main__":
    main()
