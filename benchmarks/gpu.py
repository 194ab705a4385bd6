#!/usr/bin/env python3
"""Measures the tracer's overhead on a machine with one GPU.

Real training of a ResNet-50-sized CNN and a GPT-2-sized transformer on synthetic inputs: two ranks
that share the GPU over Gloo, one over NCCL, and two over NCCL 2.30 and newer, also with NCCL's own
events (``run --nccl``), which are kept in the folder `nccl`. Step time with recording on and off in
turns in one job; and at each level against untraced and against torch.profiler, in interleaved
rounds. A part that fails is reported and the others continue; `results.json` and `report.txt` are
updated after every part.

tests/gpu checks that the same jobs are recorded correctly.

Runs from a checkout, too, where ddltrace is not installed (but its dependencies are).

Examples:
  python benchmarks/gpu.py --output gpu-results
  python benchmarks/gpu.py --output gpu-results --budget 200
  python benchmarks/gpu.py --output /tmp/dry --cpu-dry-run     everything but CUDA itself
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gzip
import importlib
import json
import os
import platform
import re
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGES: Final = ("tracer", "analyzer", "dashboard", "experiments")
MODELS: Final = ("cnn", "transformer")
LEVELS: Final = ("comm", "layer", "op")
MODES: Final = ("untraced", *LEVELS, "profiler")
OP_STEPS: Final = (8, 11)
COST_STEPS: Final = 240
MAX_SAMPLE_BYTES: Final = 1_000_000
RUN_TIMEOUT_S: Final = 150.0
REPORT_RESERVE_S: Final = 5.0


class Failed(Exception):
    """A check failed or a job could not be run; the message gives the reason."""


class Skipped(Exception):
    """A part is not available on this machine; the message gives the reason."""


@dataclass(frozen=True)
class Spec:
    """One training job.

    Attributes:
        models: What is trained, one after the other.
        backend: ``gloo`` or ``nccl``.
        ranks: How many processes; all on the first GPU.
        steps: Steps of each model.
        warm_up: Steps of each model that are not timed.
        device: ``cuda`` or ``cpu``.
        tiny: Whether the models are small enough for a CPU.
        deterministic: Whether two runs are to give the same losses to the bit.
        profile: Steps of the first model in which torch.profiler runs, from and to before.
        captures: Whether graphs are captured between the steps.
    """

    models: tuple[str, ...]
    backend: str
    ranks: int
    steps: int = 12
    warm_up: int = 4
    device: str = "cuda"
    tiny: bool = False
    deterministic: bool = True
    profile: tuple[int, int] | None = None
    captures: bool = False


# --- the job: what runs in each rank -----------------------------------------------------------


def build_cnn(tiny: bool) -> Any:
    """A residual network of bottlenecks: 25.6 million parameters, or a few thousand."""
    import torch
    from torch import nn

    class Bottleneck(nn.Module):
        def __init__(self, inputs: int, width: int, stride: int) -> None:
            super().__init__()
            outputs = 4 * width
            self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
            self.norm1 = nn.BatchNorm2d(width)
            self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
            self.norm2 = nn.BatchNorm2d(width)
            self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
            self.norm3 = nn.BatchNorm2d(outputs)
            self.act = nn.ReLU()
            self.shortcut: nn.Module = nn.Identity()
            if stride != 1 or inputs != outputs:
                projection = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
                self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(outputs))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.act(self.norm1(self.conv1(x)))
            y = self.act(self.norm2(self.conv2(y)))
            return self.act(self.norm3(self.conv3(y)) + self.shortcut(x))  # type: ignore[no-any-return]

    base, depths, classes = (4, (1, 1), 10) if tiny else (64, (3, 4, 6, 3), 1000)
    layers: list[nn.Module] = [nn.Conv2d(3, base, 7, stride=2, padding=3, bias=False)]
    layers += [nn.BatchNorm2d(base), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)]
    inputs = base
    for stage, depth in enumerate(depths):
        width = base << stage
        for block in range(depth):
            layers.append(Bottleneck(inputs, width, 2 if stage and not block else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def build_transformer(tiny: bool) -> Any:
    """A decoder-only transformer of GPT-2's size: 124 million parameters, or a few thousand."""
    import torch
    from torch import nn

    width, depth, heads, words, context = (32, 2, 2, 64, 16) if tiny else (768, 12, 12, 50257, 1024)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            self.act = nn.GELU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            shape = (x.shape[0], x.shape[1], 3, heads, width // heads)
            q, k, v = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.projection(mixed.transpose(1, 2).flatten(2))
            return x + self.contract(self.act(self.expand(self.norm2(x))))  # type: ignore[no-any-return]

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(words, width)
            self.positions = nn.Embedding(context, width)
            self.blocks = nn.ModuleList(Block() for _ in range(depth))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, words, bias=False)
            self.head.weight = self.tokens.weight  # tied, as in GPT-2

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x)).flatten(0, 1)  # type: ignore[no-any-return]

    return Transformer()


def batch_for(model: str, spec: Spec) -> tuple[Any, Any]:
    """Synthetic inputs and targets, on the device."""
    import torch

    if model == "cnn":
        size, count, classes = (32, 4, 10) if spec.tiny else (224, 64, 1000)
        inputs = torch.randn(count, 3, size, size)
        return inputs.to(spec.device), torch.randint(0, classes, (count,)).to(spec.device)
    words, count, length = (64, 2, 16) if spec.tiny else (50257, 4, 512)
    ids = torch.randint(0, words, (count, length + 1))
    return ids[:, :-1].to(spec.device), ids[:, 1:].flatten().to(spec.device)


def be_rank(spec: Spec, folder: Path) -> None:
    """Trains as one rank and leaves ``rank-N.json`` in the folder."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if spec.device == "cuda":
        torch.cuda.set_device(0)
    if spec.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False
        for name in ("flash", "mem_efficient", "cudnn"):
            with contextlib.suppress(AttributeError):
                getattr(torch.backends.cuda, f"enable_{name}_sdp")(False)
    else:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
    dist.init_process_group(spec.backend)
    rank = dist.get_rank()
    found = {model: train(model, spec, folder, rank) for model in spec.models}
    found["peak_bytes"] = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if spec.device == "cuda":
        found["peak_bytes"]["device"] = torch.cuda.max_memory_allocated()
    (folder / f"rank-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def train(model_name: str, spec: Spec, folder: Path, rank: int) -> dict[str, Any]:
    """Trains one model.

    Returns:
        Losses to the bit, step times and windows of all steps, bytes of the gradients.
    """
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    build = {"cnn": build_cnn, "transformer": build_transformer}[model_name]
    model = DistributedDataParallel(build(spec.tiny).to(spec.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    torch.manual_seed(1 + rank)
    inputs, targets = batch_for(model_name, spec)
    profiled = spec.profile if model_name == spec.models[0] else None
    profiler = _profiler() if profiled else None
    losses, windows, clock = [], [], {}
    for step in range(spec.steps):
        if profiler is not None and profiled is not None and step == profiled[0]:
            profiler.start()
        start = time.monotonic_ns()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        # As many jobs do; it waits for the device, so every step's device work is in its window.
        losses.append(loss.item().hex())
        windows.append((start, time.monotonic_ns()))
        if profiler is not None and profiled is not None and step == profiled[1] - 1:
            clock = {"monotonic_ns": time.monotonic_ns(), "unix_ns": time.time_ns()}
            profiler.stop()
            profiler.export_chrome_trace(str(folder / f"kineto-{rank}.json"))
        if spec.captures and spec.device == "cuda":
            losses.append(capture_graph(step).hex())
    return {
        "losses": losses,
        "windows": windows,
        "warm_up": spec.warm_up,
        "clock": clock,
        "gradient_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "parameters": sum(1 for _ in model.parameters()),
    }


def capture_graph(seed: int) -> float:
    """Captures a graph in the strict mode while the tracer has events to ask for; replays it."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(100)]).to("cuda")
    inputs = torch.randn(8, 64, device="cuda")
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(5):
            expected = layers(inputs)
    torch.cuda.current_stream().wait_stream(side)

    class Lazy(nn.Module):
        """Captures its layers when it is called first, inside of its own forward."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return captured(self.layers, inputs)

    def captured(module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result: torch.Tensor = module(inputs)
            time.sleep(0.05)  # time enough for another thread to disturb the capture
        graph.replay()
        return result.clone()

    with torch.no_grad():
        for result in (captured(layers, inputs), Lazy()(inputs)):
            if not torch.equal(result, expected):
                raise SystemExit("a replayed graph gives another result than its layers")
    return float(expected.sum().item())


def _profiler() -> Any:
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities)


# --- starting jobs ---------------------------------------------------------------------------


def launch_ranks(spec_file: Path) -> int:
    """Starts the ranks of a job and waits for them; the first failure ends them all."""
    spec = read_spec(spec_file)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(spec.ranks):
        environment = {
            **os.environ,
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(spec.ranks)},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        }
        command = [sys.executable, __file__, "--rank-of", str(spec_file)]
        ranks.append(subprocess.Popen(command, env=environment))
    while any(process.poll() is None for process in ranks):
        failed = [process.returncode for process in ranks if process.poll()]
        if failed:
            for process in ranks:
                process.kill()
            return 1
        time.sleep(0.02)
    return max(abs(rank.wait()) for rank in ranks)


def read_spec(path: Path) -> Spec:
    value = json.loads(path.read_text(encoding="utf-8"))
    value["models"] = tuple(value["models"])
    value["profile"] = tuple(value["profile"]) if value["profile"] else None
    return Spec(**value)


@dataclass
class Ran:
    """A job that has ended well.

    Attributes:
        folder: What its ranks left.
        trace: Its trace, if it was traced.
        ranks: What each rank found.
    """

    folder: Path
    trace: Path | None
    ranks: list[dict[str, Any]]

    def losses(self) -> list[list[str]]:
        """Losses of each rank and model, to the bit."""
        return [rank[m]["losses"] for rank in self.ranks for m in MODELS if m in rank]

    def step_times(self, model: str) -> list[int]:
        """Nanoseconds of the timed steps, of the slowest rank in each."""
        timed = [rank[model]["windows"][rank[model]["warm_up"] :] for rank in self.ranks]
        return [max(end - start for start, end in step) for step in zip(*timed, strict=True)]


class Bench:
    """Runs jobs within the budget, and keeps what was found.

    Args:
        output: Where results go.
        budget_s: Seconds for everything.
        dry: Whether tiny models on the CPU stand in for the GPU.
        python_path: What has to be added for ``import ddltrace`` to work.
    """

    def __init__(self, output: Path, budget_s: float, *, dry: bool, python_path: str = "") -> None:
        self.output = output
        self.dry = dry
        self.deadline = time.monotonic() + budget_s - REPORT_RESERVE_S
        self.parts: list[dict[str, Any]] = []
        self.environment: dict[str, Any] = {}
        self._python_path = python_path
        self._scratch = Path(tempfile.mkdtemp(prefix="ddltrace-gpu-"))
        self._runs = 0
        output.mkdir(parents=True, exist_ok=True)

    def close(self) -> None:
        """Removes what the jobs left."""
        shutil.rmtree(self._scratch, ignore_errors=True)

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self.deadline - time.monotonic()

    def spec(self, models: tuple[str, ...], backend: str, ranks: int, **more: Any) -> Spec:
        """A job for this machine."""
        spec = Spec(models, backend, ranks, **more)
        if self.dry:
            spec = replace(spec, backend="gloo", device="cpu", tiny=True)
        return spec

    def run(self, spec: Spec, level: str | None = None, *options: str) -> Ran:
        """Runs a job to its end, below ``ddltrace run`` if a level is given.

        Raises:
            Failed: The job failed or took too long.
        """
        self._runs += 1
        folder = self._scratch / f"run-{self._runs}"
        folder.mkdir()
        spec_file = folder / "spec.json"
        spec_file.write_text(json.dumps(asdict(spec)), encoding="utf-8")
        command = [sys.executable, __file__, "--launch", str(spec_file)]
        trace = None
        if level is not None:
            trace = folder / "trace"
            run = [sys.executable, "-m", "ddltrace", "run", "-o", str(trace), "--level", level]
            command = [*run, *options, "--", *command]
        what = "+".join(spec.models)
        print(f"  {spec.backend} x{spec.ranks} {what} {level or 'untraced'}", file=sys.stderr)
        self.call(command, folder)
        ranks = [
            json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8"))
            for rank in range(spec.ranks)
        ]
        return Ran(folder, trace, ranks)

    def call(self, command: list[str], folder: Path) -> None:
        """Runs a command in a folder to its end, within the budget.

        Raises:
            Failed: It failed or took too long.
            Skipped: No time is left.
        """
        environment = {k: v for k, v in os.environ.items() if not k.startswith("DDLTRACE")}
        environment |= {"OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        environment |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "KINETO_LOG_LEVEL": "99"}
        if self._python_path:
            known = [path] if (path := environment.get("PYTHONPATH")) else []
            environment["PYTHONPATH"] = os.pathsep.join([self._python_path, *known])
        limit = min(RUN_TIMEOUT_S, self.left_s)
        if limit <= 0:
            raise Skipped("the budget is spent")
        with (folder / "output.txt").open("w+b") as output:
            # A session of its own, so that nothing below it outlives a time-out.
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if limit < RUN_TIMEOUT_S:
                    raise Skipped("the budget is spent") from None
                raise Failed(f"not done after {limit:.0f} s: {_tail(output)}") from None
            if status:
                raise Failed(f"exit status {status}: {_tail(output)}")

    def part(self, name: str, do: Callable[[], dict[str, Any]]) -> None:
        """Runs one part and stores its result."""
        print(f"{name} ({self.left_s:.0f} s left)", file=sys.stderr)
        begun = time.monotonic()
        entry: dict[str, Any] = {"part": name, "status": "ok", "detail": "", "figures": {}}
        try:
            if self.left_s <= 0:
                raise Skipped("the budget is spent")
            entry["figures"] = do()
        except Skipped as reason:
            entry |= {"status": "skipped", "detail": str(reason)}
        except Failed as error:
            entry |= {"status": "failed", "detail": str(error)}
        except Exception as error:  # noqa: BLE001 - one part must not cost the others
            entry |= {"status": "failed", "detail": f"{type(error).__name__}: {error}"}
        entry["seconds"] = round(time.monotonic() - begun, 1)
        self.parts.append(entry)
        print(f"  {entry['status']} {entry['detail'][:300]}", file=sys.stderr)
        self.write()

    def write(self) -> None:
        """Updates the results on disk."""
        value = {"environment": self.environment, "parts": self.parts}
        text = json.dumps(value, indent=1)
        (self.output / "results.json").write_text(text + "\n", encoding="utf-8")
        (self.output / "report.txt").write_text(report(value), encoding="utf-8")

    @property
    def num_failed(self) -> int:
        """Number of failed parts."""
        return sum(part["status"] == "failed" for part in self.parts)


def _tail(output: Any) -> str:
    output.seek(0)
    return output.read()[-1500:].decode("utf-8", "replace").strip()  # type: ignore[no-any-return]


# --- the parts ---------------------------------------------------------------------------------


class Suite:
    """The parts of the measurement."""

    def __init__(self, bench: Bench, nccl_ranks: int) -> None:
        self.bench = bench
        self.nccl_ranks = nccl_ranks
        self._ran: dict[tuple[Spec, str | None], Ran] = {}

    def once(self, spec: Spec, level: str | None) -> Ran:
        """The result of a job, which runs at the first call."""
        key = (spec, level)
        if key not in self._ran:
            self._ran[key] = self.bench.run(spec, level)
        return self._ran[key]

    def sample(self) -> dict[str, Any]:
        """A small trace of two ranks that share the GPU."""
        spec = self.bench.spec(("cnn",), "gloo", 2, steps=6)
        trace = self.once(spec, "layer").trace
        assert trace is not None
        size = sum(path.stat().st_size for path in trace.iterdir())
        if size > MAX_SAMPLE_BYTES:
            raise Failed(f"{size} bytes are too many for a sample")
        target = self.bench.output / "sample-trace"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(trace, target)
        return {"bytes": size}

    def cost(self, model: str, level: str) -> dict[str, Any]:
        """Recording on and off in turns in one job."""
        from ddltrace.tracer.capture.overhead_probe import FIRST_STEP
        from ddltrace.tracer.trace.run_reader import read_run

        steps = COST_STEPS if not self.bench.dry else 24
        spec = self.bench.spec((model,), "nccl", 1, steps=FIRST_STEP + steps, deterministic=False)
        ran = self.bench.run(spec, level, "--measure-cost", str(steps))
        assert ran.trace is not None
        [info] = read_run(ran.trace).ranks
        if info.cost is None:
            raise Failed("the job did not take enough steps")
        timed = statistics.median(ran.step_times(model)[FIRST_STEP:])
        return {
            f"{model} {level}": {
                "step_ms": round(timed / 1e6, 3),
                "ratio": round(info.cost["ratio"], 4),
                "min": round(info.cost["low"], 4),
                "max": round(info.cost["high"], 4),
            }
        }

    def nccl_events(self) -> dict[str, Any]:
        """NCCL's own events: what was recorded, and what an analysis makes of it, as files."""
        import pyarrow.compute as pc

        from ddltrace.analyzer.analysis import analyze
        from ddltrace.analyzer.joined.nccl_events import nccl_events
        from ddltrace.analyzer.open_trace import open_trace
        from ddltrace.tracer.trace.trace_files import RING_PATTERN

        spec = self.bench.spec(("cnn",), "nccl", self.nccl_ranks, steps=10)
        options = ("--nccl", "--nccl-events", "0xffdf")  # all but the proxies' idling
        ran = self.bench.run(spec, "layer", *options)
        assert ran.trace is not None
        trace = open_trace(ran.trace)
        events = nccl_events(trace)
        kinds = Counter(events["kind"].to_pylist())
        if not self.bench.dry and "coll" not in kinds:
            raise Failed("NCCL recorded no collective")
        named = events.filter(pc.is_valid(events["message"]))
        found = {
            "kinds": dict(kinds),
            "with_message": dict(Counter(named["kind"].to_pylist())),
            "nccl": analyze(trace).to_json()["nccl"],
        }
        target = self.bench.output / "nccl"
        target.mkdir(exist_ok=True)
        (target / "events.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
        for ring in ran.trace.glob(RING_PATTERN):
            content = gzip.compress(ring.read_bytes())
            if len(content) <= MAX_SAMPLE_BYTES:
                (target / f"{ring.name}.gz").write_bytes(content)
        return {"events": len(events), "kinds": dict(kinds), "with message": len(named)}

    def overhead(self, backend: str, ranks: int, modes: tuple[str, ...], share: float) -> None:
        """Rounds of all modes until a share of the time that is left is spent."""
        steps = 30 if backend == "nccl" else 10
        spec = self.bench.spec(MODELS, backend, ranks, steps=steps, deterministic=False)
        until = time.monotonic() + share * self.bench.left_s
        rounds: list[dict[str, dict[str, float]]] = []

        def measure() -> dict[str, Any]:
            longest = 0.0
            while not rounds or time.monotonic() + longest < until:
                begun = time.monotonic()
                order = list(modes)
                order = order[len(rounds) % len(order) :] + order[: len(rounds) % len(order)]
                try:
                    rounds.append({mode: self._medians(spec, mode) for mode in order})
                except (Failed, Skipped):
                    if not rounds:
                        raise
                    break  # what whole rounds there are is worth having
                longest = max(longest, time.monotonic() - begun)
            return summarize(rounds, modes)

        self.bench.part(f"overhead {backend} x{ranks}", measure)

    def _medians(self, spec: Spec, mode: str) -> dict[str, float]:
        """Milliseconds of the median step of each model, and peaks of memory in MiB.

        The peaks are those of the rank with the highest, of the host's process (``host``) and of
        PyTorch's memory of the device (``device``).
        """
        if mode == "profiler":
            spec = replace(spec, profile=(spec.warm_up, spec.steps))
            runs = [self.bench.run(replace(spec, models=(m,))) for m in spec.models]
        elif mode == "op":
            runs = [self.bench.run(spec, "op", "--op-steps", f"{OP_STEPS[0]}:{OP_STEPS[1]}")]
        elif mode == "nccl":
            runs = [self.bench.run(spec, "comm", "--nccl")]
        else:
            runs = [self.bench.run(spec, None if mode == "untraced" else mode)]
        found = {}
        for ran in runs:
            for model in (m for m in spec.models if m in ran.ranks[0]):
                found[model] = statistics.median(ran.step_times(model)) / 1e6
            for place in ran.ranks[0]["peak_bytes"]:
                peak = max(rank["peak_bytes"][place] for rank in ran.ranks) / (1 << 20)
                found[place] = max(found.get(place, 0.0), peak)
        return found


def summarize(rounds: list[dict[str, dict[str, float]]], modes: tuple[str, ...]) -> dict[str, Any]:
    """Median step time and peak of memory, and ratios to untraced taken round by round."""
    table: dict[str, Any] = {"rounds": len(rounds)}
    for model in MODELS:
        for mode in modes:
            ratios = [r[mode][model] / r["untraced"][model] for r in rounds]
            table[f"{model} {mode}"] = {
                "step_ms": round(statistics.median(r[mode][model] for r in rounds), 3),
                "ratio": round(statistics.median(ratios), 4),
                "min": round(min(ratios), 4),
                "max": round(max(ratios), 4),
            }
    for place in ("host", "device"):
        if place not in rounds[0]["untraced"]:
            continue
        for mode in modes:
            more = [r[mode][place] - r["untraced"][place] for r in rounds]
            table[f"{place} memory {mode}"] = {
                "peak_mib": round(statistics.median(r[mode][place] for r in rounds), 1),
                "more_mib": round(statistics.median(more), 1),
            }
    return table


def report(value: dict[str, Any]) -> str:
    """The results as text."""
    lines = [f"{key}: {text}" for key, text in value["environment"].items()] + [""]
    for part in value["parts"]:
        lines.append(f"{part['status']:<8} {part['seconds']:6.1f} s  {part['part']}")
        if part["detail"]:
            lines.append(f"         {' '.join(part['detail'].split())[:600]}")
        for key, figure in part["figures"].items():
            if isinstance(figure, dict) and "ratio" in figure:
                lines.append(
                    f"         {key:<22} {figure['step_ms']:9.2f} ms  {figure['ratio']:7.4f}"
                    f"  ({figure['min']:.4f} to {figure['max']:.4f})"
                )
            elif isinstance(figure, dict) and "peak_mib" in figure:
                lines.append(
                    f"         {key:<22} {figure['peak_mib']:9.1f} MiB"
                    f" {figure['more_mib']:+8.1f} MiB"
                )
            else:
                lines.append(f"         {key}: {figure}")
    return "\n".join(lines) + "\n"


# --- the machine -------------------------------------------------------------------------------


def describe_machine(*, dry: bool) -> tuple[dict[str, Any], int]:
    """Describes the machine, and how many ranks NCCL lets share a GPU.

    Raises:
        SystemExit: There is no GPU and none is to be done without.
    """
    import torch

    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "device": "none: a dry run with tiny models on the CPU over Gloo",
    }
    with contextlib.suppress(Exception):
        from importlib.metadata import version

        found["ddltrace"] = version("ddltrace")
    if dry:
        return found, 1
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: try --cpu-dry-run")
    nccl = loaded_nccl()
    found |= {
        "device": torch.cuda.get_device_name(0),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, nccl)),
    }
    return found, 2 if nccl >= (2, 30) else 1


def loaded_nccl() -> tuple[int, ...]:
    """Version of the NCCL that is used, which may be another than PyTorch was built with."""
    import torch

    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):  # PyTorch contains it
        return tuple(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def reach_ddltrace(scratch: Path) -> str:
    """Makes ``import ddltrace`` work, from the checkout if it is not installed.

    Returns:
        What has to stand in PYTHONPATH for other processes, or nothing.

    Raises:
        SystemExit: What ddltrace depends on is missing.
    """
    for name in ("click", "numpy", "pyarrow", "torch"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            raise SystemExit(f"{name} is missing: {sys.executable} -m pip install {name}") from None
    try:
        importlib.import_module("ddltrace.tracer.trace.event_reader")
        importlib.metadata.version("ddltrace")
        return ""
    except (ModuleNotFoundError, ImportError):
        pass
    for name in [n for n in sys.modules if n.split(".")[0] == "ddltrace"]:
        del sys.modules[name]
    package = scratch / "ddltrace"
    package.mkdir(parents=True)
    for path in (ROOT / "package-root").iterdir():
        (package / path.name).symlink_to(path)
    for name in PACKAGES:
        (package / name).symlink_to(ROOT / name)
    source = (ROOT / "package-root" / "__init__.py").read_text(encoding="utf-8")
    version = re.search(r"__version__\s*(?::[^=]+)?=\s*[\"']([^\"']+)", source)
    metadata = scratch / "ddltrace-0.dist-info"
    metadata.mkdir()
    text = f"Metadata-Version: 2.1\nName: ddltrace\nVersion: {version[1] if version else '0'}\n"
    (metadata / "METADATA").write_text(text, encoding="utf-8")
    sys.path.insert(0, str(scratch))
    importlib.invalidate_caches()
    importlib.import_module("ddltrace.tracer.trace.event_reader")
    return str(scratch)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("--output", type=Path, default=Path("gpu-results"), help="where results go")
    top.add_argument("--budget", type=float, default=500.0, help="seconds for everything")
    top.add_argument("--cpu-dry-run", action="store_true", help="tiny models on the CPU, over Gloo")
    top.add_argument("--launch", type=Path, help=argparse.SUPPRESS)
    top.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    return top


def main() -> int:
    """Runs all parts; returns 1 if one failed."""
    options = parser().parse_args()
    if options.launch:
        return launch_ranks(options.launch)
    if options.rank_of:
        be_rank(read_spec(options.rank_of), options.rank_of.parent)
        return 0
    with tempfile.TemporaryDirectory(prefix="ddltrace-tree-") as tree:
        python_path = reach_ddltrace(Path(tree))
        environment, nccl_ranks = describe_machine(dry=options.cpu_dry_run)
        bench = Bench(
            options.output.absolute(),
            options.budget,
            dry=options.cpu_dry_run,
            python_path=python_path,
        )
        bench.environment = environment
        try:
            suite = Suite(bench, nccl_ranks)
            bench.part("sample trace", suite.sample)
            for model in MODELS:
                for level in ("comm", "layer"):
                    part = functools.partial(suite.cost, model, level)
                    bench.part(f"cost in one job: {model}, {level}", part)
            bench.part("NCCL's events", suite.nccl_events)
            suite.overhead("nccl", suite.nccl_ranks, ("untraced", "comm", "nccl"), 0.3)
            suite.overhead("nccl", 1, MODES, 0.7)
            suite.overhead("gloo", 2, ("untraced", "comm", "layer"), 1.0)
        finally:
            bench.write()
            bench.close()
    print((bench.output / "report.txt").read_text(encoding="utf-8"))
    by_status = Counter(part["status"] for part in bench.parts)
    print(", ".join(f"{count} parts {status}" for status, count in by_status.items()))
    return 1 if bench.num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
