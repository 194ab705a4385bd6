"""Layers wait out the times of a profile, and profiles are what their sources say."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ddltrace.analyzer.open_trace import open_trace
from ddltrace.experiments.pacing import builtin, paced_layers
from ddltrace.experiments.pacing.paced_layers import PacedLayers
from ddltrace.experiments.pacing.profile import PaceProfile, read_profile
from ddltrace.experiments.pacing.slowdown import factor_of, read_slowdown
from ddltrace.experiments.pacing.trace_profile import profile_of_trace
from ddltrace.tracer.errors import TraceError, UsageError

ROOT = Path(__file__).resolve().parents[3]
SAMPLE = ROOT / "sample_traces" / "ddp-4-hosts-400mbit"
FOREIGN = ROOT / "tests" / "data" / "foreign"


@pytest.mark.parametrize("name", builtin.PROFILES)
def test_a_builtin_profile_sums_to_the_published_throughput(name: str) -> None:
    profile = builtin.builtin_profile(name)
    images_per_second, device = builtin._THROUGHPUT[name]
    total_s = (sum(profile.forward_us) + sum(profile.backward_us)) / 1e6
    assert 32 / total_s == pytest.approx(images_per_second)
    assert sum(profile.backward_us) == pytest.approx(2 * sum(profile.forward_us))
    assert device in profile.source
    # The 53 convolutions and the dense layer of ResNet-50 v1.5, 4.1 billion multiplications.
    assert len(profile.forward_us) == 54
    assert sum(builtin._multiplications()) == pytest.approx(4.1e9, rel=0.01)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 100])
def test_resampling_keeps_the_sums_and_the_curve(count: int) -> None:
    random = np.random.default_rng(5)
    profile = PaceProfile("x", "y", tuple(random.exponential(size=7)), (3.0, 1.0))
    fitted = profile.for_layers(count)
    assert len(fitted.forward_us) == len(fitted.backward_us) == count
    assert sum(fitted.forward_us) == pytest.approx(sum(profile.forward_us))
    assert sum(fitted.backward_us) == pytest.approx(4.0)
    assert profile.for_layers(7).forward_us == pytest.approx(profile.forward_us)
    if count == 2:
        assert fitted.backward_us == pytest.approx((3.0, 1.0))


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    profile = builtin.builtin_profile("a100-resnet50")
    profile.write(tmp_path / "pace.json")
    assert read_profile(tmp_path / "pace.json") == profile
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(TraceError, match="cannot be read as a pace profile"):
        read_profile(tmp_path / "bad.json")


def test_the_layers_of_a_trace_give_its_profile() -> None:
    profile = profile_of_trace(SAMPLE)
    events = open_trace(SAMPLE).events(0).to_pandas()
    step = int(profile.source.split("of step ")[1].split()[0])
    one = events[events.step == step]
    layers = one[one.kind == "layer"].sort_values("start_ns")
    # Those of the model itself: the two that hold the others begin before the first of them.
    own = (layers.end_ns - layers.start_ns)[layers.name.str.isdigit()]
    assert profile.forward_us == pytest.approx(tuple(own / 1e3))
    ready = one[one.kind == "gradient"].start_ns
    (begin,) = one[(one.kind == "phase") & (one.name == "backward")].start_ns
    assert sum(profile.backward_us) == pytest.approx((ready.max() - begin) / 1e3)
    assert len(profile.backward_us) == ready.nunique()


def test_a_profile_of_kineto_takes_the_phases_where_no_layers_are() -> None:
    profile = profile_of_trace(FOREIGN / "kineto-cpu")
    assert "the phases" in profile.source
    assert len(profile.forward_us) == len(profile.backward_us) == 1
    assert profile.forward_us[0] > 0


def test_a_profile_of_a_gpu_trace_takes_its_kernels(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []

    def event(name: str, category: str, ts: float, dur: float, **args: Any) -> None:
        of_device = category == "kernel"
        events.append(
            {"ph": "X", "name": name, "cat": category, "ts": ts, "dur": dur, "args": args}
            | {"pid": 0 if of_device else 1, "tid": 7 if of_device else 1}
        )

    for step in range(3):
        at = 1000.0 * step
        event(f"ProfilerStep#{step}", "user_annotation", at, 999)
        event("DistributedDataParallel.forward", "user_annotation", at + 10, 100)
        for number, (ts, dur) in enumerate([(20, 30), (30, 50), (150, 70), (160, 90)]):
            launched = {"correlation": 10 * step + number}
            event("cudaLaunchKernel", "cuda_runtime", at + ts, 2, **launched)
            event(f"gemm{number}", "kernel", at + ts + 100, dur, stream=7, **launched)
        event("autograd::engine::evaluate_function: AddmmBackward0", "cpu_op", at + 145, 60)
        event("Optimizer.step#SGD.step", "user_annotation", at + 400, 10)
    path = tmp_path / "rank0.json"
    meta = {"distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 1}}
    path.write_text(json.dumps({"traceEvents": events, "schemaVersion": 1, **meta}))
    profile = profile_of_trace(path)
    assert "kernels" in profile.source
    assert profile.forward_us == pytest.approx((30, 50))
    assert profile.backward_us == pytest.approx((70, 90))


def test_what_has_no_passes_gives_no_profile() -> None:
    with pytest.raises(TraceError, match="nothing to pace by"):
        profile_of_trace(FOREIGN / "flight-recorder")


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.Linear(5, 1))


def test_layers_sleep_their_times_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(paced_layers._Sleeper, "sleep", lambda self, s: slept.append(s))
    paced = model()
    # Large enough that the layers' own computation is nothing beside them.
    PacedLayers(paced, PaceProfile("x", "y", (100e6, 200e6, 300e6), (4e8, 5e8, 6e8)))
    with torch.no_grad():
        paced(torch.ones(2, 3))
    assert not slept
    output = paced(torch.ones(2, 3))
    assert slept == pytest.approx([100, 200, 300], abs=5)
    output.sum().backward()
    assert slept[3:] == pytest.approx([400, 500, 600], abs=10)


def test_pacing_changes_no_gradient() -> None:
    plain, paced = model(), model()
    PacedLayers(paced, PaceProfile("x", "y", (10.0,), (10.0,)))
    for network in (plain, paced):
        network(torch.ones(2, 3)).sum().backward()
    for left, right in zip(plain.parameters(), paced.parameters(), strict=True):
        assert left.grad is not None
        assert torch.equal(left.grad, right.grad)  # type: ignore[arg-type]


def test_a_sleep_that_was_too_long_shortens_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    asked: list[float] = []

    def sleep(seconds: float) -> None:
        asked.append(seconds)
        clock[0] += seconds + 0.4

    monkeypatch.setattr(paced_layers.time, "sleep", sleep)
    monkeypatch.setattr(paced_layers.time, "perf_counter", lambda: clock[0])
    sleeper = paced_layers._Sleeper()
    for _ in range(5):
        sleeper.sleep(1.0)
    sleeper.sleep(0.1)
    assert asked == pytest.approx([1.0, 0.6, 0.6, 0.6, 0.6])
    assert all(later <= earlier for earlier, later in pairwise(asked))
    assert clock[0] == pytest.approx(5.4)


def test_slowdowns_of_a_rank_multiply_in_their_steps() -> None:
    slow = [
        read_slowdown("rank=1,factor=2", 2),
        read_slowdown("rank=1,factor=3,burst=1,every=4", None),
    ]
    assert [factor_of(slow, step) for step in range(5)] == [2, 2, 2, 6, 2]


@pytest.mark.parametrize("text", ["rank=2,factor=2", "rank=-1,factor=2", "factor=2", "rank=0"])
def test_a_wrong_slowdown_is_one_line(text: str) -> None:
    with pytest.raises(UsageError, match="--slow"):
        read_slowdown(text, 2)
