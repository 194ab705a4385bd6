"""Checks of a traced GPU job: its losses, its bytes, and its device times against Kineto's.

Each check raises `Failed`, or returns figures. The jobs are those of benchmarks/gpu.py.
"""

from __future__ import annotations

import bisect
import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from support import scripts

gpu = scripts.load(scripts.ROOT / "benchmarks" / "gpu.py")
Failed, Skipped, OP_STEPS = gpu.Failed, gpu.Skipped, gpu.OP_STEPS
Ran = Any
JOB: Final = Path(__file__).resolve().parents[1] / "gpu" / "nccl_job.py"
SYNCHRONIZING: Final = re.compile(r"(cuda|cu)(Device|Stream|Event|Ctx)Synchronize")


@dataclass
class Rows:
    """The events of one rank, one dictionary for each; of a message, its last row."""

    info: Any
    rows: list[dict[str, Any]]
    error_ns: int = field(init=False)

    def __post_init__(self) -> None:
        self.error_ns = int(self.info.clock.get("device_error_ns", 0))

    def kind(self, *kinds: str) -> list[dict[str, Any]]:
        """The events of some kinds."""
        return [row for row in self.rows if row["kind"] in kinds]


def read_ranks(trace: Path | None) -> list[Rows]:
    """All ranks of a trace, in order."""
    from ddltrace.tracer.trace.event_reader import read_events
    from ddltrace.tracer.trace.run_reader import read_run

    assert trace is not None
    found = []
    for info in sorted(read_run(trace).ranks, key=lambda r: int(r.rank)):
        rows = read_events(trace, info.segment)[0].to_pylist()
        newest = {row["id"]: row for row in rows if row["kind"] == "message"}
        others = [row for row in rows if row["kind"] != "message"]
        found.append(Rows(info, others + list(newest.values())))
    return found


def check_losses(plain: Ran, traced: Ran, again: Callable[[], Ran]) -> dict[str, Any]:
    """The tracer changes no loss, to the bit."""
    if plain.losses() != traced.losses():
        if again().losses() != plain.losses():
            raise Skipped("two untraced runs differ from each other: the job itself is unsteady")
        raise Failed("losses differ from the untraced run's, which repeats itself to the bit")
    return {"losses_compared": sum(len(losses) for losses in plain.losses())}


def check_health(trace: Path | None) -> dict[str, Any]:
    """Nothing was lost and nothing inside the tracer failed."""
    ranks = read_ranks(trace)
    for rank in ranks:
        info = rank.info
        if info.errors or info.dropped or info.lost_bytes or info.status != "complete":
            raise Failed(
                f"rank {info.rank}: {info.status}, {info.dropped} dropped, {info.lost_bytes} bytes "
                f"lost, errors {info.errors}"
            )
    return {"events": sum(len(rank.rows) for rank in ranks)}


def check_gradients_sent(ran: Ran, model: str) -> dict[str, Any]:
    """Every step sends each gradient once: their bytes, and their names."""
    for rank, found in zip(read_ranks(ran.trace), ran.ranks, strict=True):
        expected, count = found[model]["gradient_bytes"], found[model]["parameters"]
        steps = {row["step"] for row in rank.kind("step")}
        if len(steps) != len(found[model]["windows"]):
            raise Failed(f"{len(steps)} steps in the trace, {len(found[model]['windows'])} done")
        for step in sorted(steps):
            sent = [
                row
                for row in rank.kind("message")
                if row["op"] == "all_reduce" and row["step"] == step
            ]
            total = sum(row["bytes"] for row in sent)
            if total != expected:
                raise Failed(f"step {step}: {total} bytes sent, the gradients are {expected}")
            names = Counter(tensor for row in sent for tensor in row["tensors"] or ())
            if len(names) != count or set(names.values()) != {1}:
                raise Failed(f"step {step}: {len(names)} of {count} gradients named in messages")
    return {"bytes_a_step": expected, "gradients": count, "steps": len(steps)}


def check_kernels(ran: Ran) -> dict[str, Any]:
    """There is device time for each innermost layer, each gradient and each update."""
    figures = {}
    for rank in read_ranks(ran.trace):
        kernels = rank.kind("kernel")
        lanes = Counter(row["lane"] for row in kernels)
        if not kernels or not all(lane.startswith("stream-") for lane in lanes):
            raise Failed(f"rank {rank.info.rank}: kernels on the lanes {dict(lanes)}")
        seen = Counter(row["name"] for row in kernels)
        gradients = Counter(f"{row['name']}.grad" for row in rank.kind("gradient"))
        layers = Counter(row["name"] for row in rank.kind("layer"))
        steps = len(rank.kind("step"))
        wrong = [name for name, count in gradients.items() if seen[name] != count]
        wrong += [n for n in seen if n in layers and seen[n] != layers[n]]
        if wrong or seen["optimizer"] != steps or not any(name in layers for name in seen):
            raise Failed(f"rank {rank.info.rank}: device times missing of {wrong[:5]}")
        figures = {"kernels": len(kernels), "lanes": len(lanes)}
    return figures


def check_device_times(ran: Ran, model: str) -> dict[str, Any]:
    """Device work lies in the window of its step, which ends when the device is done.

    And a message begins on the device no earlier than the host hands it over.
    """
    figures = {}
    for rank, found in zip(read_ranks(ran.trace), ran.ranks, strict=True):
        windows, error = found[model]["windows"], rank.error_ns
        worst = 0
        for row in rank.kind("kernel"):
            outside = min(
                max(start - row["start_ns"], row["end_ns"] - end, 0) for start, end in windows
            )
            worst = max(worst, outside)
        if worst > error:
            raise Failed(f"{worst / 1e3:.1f} us outside its step, error {error / 1e3:.1f} us")
        for row in rank.kind("message"):
            if row["end_ns"] is None or row["enqueue_ns"] - row["start_ns"] > error:
                raise Failed(f"message {row['id']} {row['op']}: {row}")
        messages = [row for row in rank.kind("message") if row["op"] == "all_reduce"]
        lag = [(row["start_ns"] - row["enqueue_ns"]) / 1e3 for row in messages]
        figures = {
            "device_error_us": round(error / 1e3, 2),
            "outside_us": round(worst / 1e3, 2),
            "message_start_lag_us": round(statistics.median(lag), 1),
            "messages_started_on_device": sum(value != 0 for value in lag),
        }
    return figures


def compare_with_kineto(ran: Ran, model: str, *, dry: bool) -> dict[str, Any]:
    """Our device times of layers beside those of the kernels that the layers launched."""
    rank, found = read_ranks(ran.trace)[0], ran.ranks[0][model]
    data = json.loads((ran.folder / "kineto-0.json").read_text(encoding="utf-8"))
    clock = found["clock"]
    shift = data["baseTimeNanoseconds"] - clock["unix_ns"] + clock["monotonic_ns"]
    device = device_work(data["traceEvents"], shift, dry=dry)
    first, last = min(d[0] for d in device), max(d[0] for d in device)
    # On a CPU the layer's own row stands for its device time.
    layers = {row["name"] for row in rank.kind("layer")}
    ours: dict[str, Iterator[dict[str, Any]]] = {}
    for name in layers:
        kind = "layer" if dry else "kernel"
        ours[name] = iter(sorted((r for r in rank.kind(kind) if r["name"] == name), key=_start))
    pairs = []
    for layer in sorted(rank.kind("layer"), key=_start):
        timed = next(ours[layer["name"]], None)
        if timed is None or not first <= layer["start_ns"] <= last:
            continue
        launched = [d for d in device if layer["start_ns"] <= d[0] <= layer["end_ns"]]
        if launched:
            begin, end = min(d[1] for d in launched), max(d[2] for d in launched)
            pairs.append(((timed["start_ns"] - begin) / 1e3, (timed["end_ns"] - end) / 1e3))
    if not pairs:
        raise Failed("no layer with kernels of its own in Kineto's window")
    figures: dict[str, Any] = {"layers_compared": len(pairs), "kernels": len(device)}
    for which, values in (("start", [p[0] for p in pairs]), ("end", [p[1] for p in pairs])):
        figures[f"{which}_median_us"] = round(statistics.median(values), 2)
        figures[f"{which}_p95_abs_us"] = round(_percentile([abs(v) for v in values], 0.95), 2)
    rows = rank.kind("layer" if dry else "kernel")
    figures["kernel_time_covered"] = round(covered(device, rows), 3)
    limit = rank.error_ns / 1e3 + 20.0
    if not dry and abs(figures["end_median_us"]) > limit:
        raise Failed(f"ends differ by more than {limit:.0f} us in the median: {figures}")
    return figures


def compare_messages(folder: Path, trace: Path) -> dict[str, Any]:
    """Times of NCCL messages beside those of their kernels, by the form of their launch.

    Args:
        folder: What the ranks of tests/gpu/nccl_job.py left.
        trace: Their trace.
    """
    apart: dict[str, list[tuple[float, float]]] = {}
    for number, rank in enumerate(read_ranks(trace)):
        data = json.loads((folder / f"kineto-{number}.json").read_text(encoding="utf-8"))
        clock = json.loads((folder / f"clock-{number}.json").read_text(encoding="utf-8"))
        shift = data["baseTimeNanoseconds"] - clock["unix_ns"] + clock["monotonic_ns"]
        messages = sorted(rank.kind("message"), key=lambda row: int(row["enqueue_ns"]))
        enqueued = [row["enqueue_ns"] for row in messages]
        forms = [
            (1e3 * e["ts"] + shift, 1e3 * (e["ts"] + e["dur"]) + shift, e["name"].split(": ")[1])
            for e in data["traceEvents"]
            if e.get("cat") == "user_annotation" and e["name"].startswith("form: ")
        ]
        of_message: dict[int, list[tuple[float, float]]] = {}
        for launch, start, end in device_work(data["traceEvents"], shift, nccl=True):
            of_message.setdefault(bisect.bisect(enqueued, launch) - 1, []).append((start, end))
        for index, kernels in of_message.items():
            message = messages[index]
            form = next((n for s, e, n in forms if s <= message["enqueue_ns"] <= e), "outside")
            start, end = min(k[0] for k in kernels), max(k[1] for k in kernels)
            found = ((message["start_ns"] - start) / 1e3, (message["end_ns"] - end) / 1e3)
            apart.setdefault(form, []).append(found)
    if not apart:
        raise Failed("the profiler saw no kernel of NCCL")
    apart["all"] = [pair for pairs in apart.values() for pair in pairs]
    figures: dict[str, Any] = {}
    for form, pairs in apart.items():
        starts, ends = [p[0] for p in pairs], [p[1] for p in pairs]
        figures[form] = {
            "messages": len(pairs),
            "start_median_us": round(statistics.median(starts), 1),
            "start_p95_abs_us": round(_percentile([abs(v) for v in starts], 0.95), 1),
            "end_median_us": round(statistics.median(ends), 1),
            "end_p95_abs_us": round(_percentile([abs(v) for v in ends], 0.95), 1),
        }
    return figures


def device_work(
    events: list[dict[str, Any]], shift: float, *, dry: bool = False, nccl: bool = False
) -> list[tuple[float, ...]]:
    """Launch, start and end of each kernel, on our clock.

    Args:
        events: Kineto's, in Chrome's format.
        shift: Nanoseconds to be added to its times.
        dry: There are no kernels: operators stand in for them.
        nccl: Whether NCCL's kernels are wanted, or all others.
    """
    spans = [e for e in events if e.get("ph") == "X"]
    if dry:
        found = [(e["ts"], e["ts"], e["ts"] + e["dur"]) for e in spans if e.get("cat") == "cpu_op"]
    else:
        launches = {
            e["args"]["correlation"]: e["ts"]
            for e in spans
            if e.get("cat") in ("cuda_runtime", "cuda_driver")
            and "correlation" in e.get("args", {})
        }
        found = [
            (launches[e["args"]["correlation"]], e["ts"], e["ts"] + e["dur"])
            for e in spans
            if e.get("cat") == "kernel"
            and ("nccl" in e["name"]) == nccl
            and e["args"].get("correlation") in launches
        ]
    if not found:
        raise Failed("the profiler saw no kernels")
    return [tuple(1e3 * t + shift for t in times) for times in found]


def covered(device: list[tuple[float, ...]], rows: list[dict[str, Any]]) -> float:
    """The share of the kernels' time that lies in our intervals."""
    import numpy as np

    spans = np.array(sorted((r["start_ns"], r["end_ns"]) for r in rows), np.float64)
    ends = np.maximum.accumulate(spans[:, 1])
    # Length of the union up to any time, from its merged pieces.
    opens = np.concatenate([[True], spans[1:, 0] > ends[:-1]])
    starts = spans[opens, 0]
    stops = np.concatenate([ends[:-1][opens[1:]], ends[-1:]])
    before = np.concatenate([[0.0], np.cumsum(stops - starts)])

    def union_until(times: Any) -> Any:
        at = np.searchsorted(starts, times, side="right") - 1
        inside = np.where(at >= 0, np.minimum(times, stops[at]) - starts[at], 0.0)
        return np.where(at >= 0, before[np.maximum(at, 0)] + inside, 0.0)

    work = np.array([d[1:] for d in device])
    inside = union_until(work[:, 1]) - union_until(work[:, 0])
    return float(inside.sum() / (work[:, 1] - work[:, 0]).sum())


def synchronizations(ran: Ran) -> Counter[str]:
    """How often the profiled steps made the host wait for the device, by call."""
    data = json.loads((ran.folder / "kineto-0.json").read_text(encoding="utf-8"))
    names = (e["name"] for e in data["traceEvents"] if e.get("ph") == "X")
    return Counter(name for name in names if SYNCHRONIZING.match(name))


def check_synchronizations(plain: Ran, traced: Ran) -> dict[str, Any]:
    """The traced job waits for the device no more often than the untraced one."""
    before, after = synchronizations(plain), synchronizations(traced)
    added = after - before
    if added:
        raise Failed(f"added by the tracer: {dict(added)} (untraced: {dict(before)})")
    return {"untraced": dict(before), "traced": dict(after)}


def check_op_level(ran: Ran) -> dict[str, Any]:
    """Kineto's kernels are on stream lanes, in its window only."""
    rank = read_ranks(ran.trace)[0]
    operators = rank.kind("host")
    steps = {row["step"] for row in operators}
    if not operators or not steps <= set(range(OP_STEPS[0], OP_STEPS[1] + 1)):
        raise Failed(f"operators in the steps {steps}, wanted {OP_STEPS}")
    kernels = [r for r in rank.kind("kernel", "copy") if r["step"] in steps]
    return {"operators": len(operators), "device_rows": len(kernels)}


def _start(row: dict[str, Any]) -> int:
    return int(row["start_ns"])


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


class Checks:
    """Runs the jobs of the checks, each job once, and records each check as a part.

    Args:
        bench: Starts the jobs; a part that failed is in `bench.parts` with its reason.
        nccl_ranks: Number of ranks that NCCL allows on this machine.
    """

    def __init__(self, bench: Any, nccl_ranks: int) -> None:
        self.bench = bench
        self.nccl_ranks = nccl_ranks
        self._once = gpu.Suite(bench, nccl_ranks).once

    def check_job(self, backend: str, ranks: int, model: str, steps: int) -> None:
        """Trains one model traced and untraced, and holds the trace against what is known."""
        part = self.bench.part
        spec = self.bench.spec((model,), backend, ranks, steps=steps)
        name = f"{backend} x{ranks} {model}"
        plain, traced = (lambda: self._once(spec, None)), (lambda: self._once(spec, "layer"))
        part(
            f"{name}: losses",
            lambda: check_losses(plain(), traced(), lambda: self.bench.run(spec)),
        )
        part(f"{name}: nothing lost", lambda: check_health(traced().trace))
        part(f"{name}: gradients sent", lambda: check_gradients_sent(traced(), model))
        part(f"{name}: kernels on streams", lambda: self._on_device(check_kernels, traced()))
        part(f"{name}: device times", lambda: check_device_times(traced(), model))

    def _on_device(self, check: Callable[[Ran], dict[str, Any]], ran: Ran) -> dict[str, Any]:
        if self.bench.dry:
            raise Skipped("no device")
        return check(ran)

    def check_against_kineto(self, model: str) -> None:
        """Profiles some steps of one model traced and untraced."""
        spec = self.bench.spec((model,), "nccl", 1, steps=10, profile=(6, 9))
        plain, traced = (lambda: self._once(spec, None)), (lambda: self._once(spec, "layer"))
        self.bench.part(
            f"kineto {model}: device times",
            lambda: compare_with_kineto(traced(), model, dry=self.bench.dry),
        )
        self.bench.part(
            f"kineto {model}: no synchronization added",
            lambda: check_synchronizations(plain(), traced()),
        )

    def messages(self) -> dict[str, Any]:
        """Times of NCCL messages beside those of their kernels."""
        folder = self.bench.output / "nccl"
        folder.mkdir()
        trace = folder / "trace"
        run = ["-m", "ddltrace", "run", "-o", str(trace), "--level", "comm", "--"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        command = [sys.executable, *run, *torchrun, str(JOB), str(folder)]
        self.bench.call(command, folder)
        return compare_messages(folder, trace) | check_health(trace)

    def graphs(self) -> dict[str, Any]:
        """Graphs are captured, and give what they should, while the tracer asks for events."""
        spec = self.bench.spec(("transformer",), "nccl", 1, steps=4, warm_up=1, captures=True)
        spec = replace(spec, tiny=True)
        figures = check_losses(
            self._once(spec, None), self._once(spec, "layer"), lambda: self.bench.run(spec)
        )
        return figures | check_health(self._once(spec, "layer").trace)

    def operators(self) -> dict[str, Any]:
        """Level op records what Kineto sees."""
        spec = self.bench.spec(("cnn",), "nccl", 1, steps=14)
        ran = self.bench.run(spec, "op", "--op-steps", f"{OP_STEPS[0]}:{OP_STEPS[1]}")
        return check_op_level(ran) | check_health(ran.trace)
