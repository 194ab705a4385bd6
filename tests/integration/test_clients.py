"""The libraries that people train with, each running one small traced job.

`dev.py test` installs them (the extra ``clients``). The jobs train on the CPU, need no network,
and no compiler.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from support.jobs import JOBS, at_once, free_port, ray_environment, run, torchrun, traced
from support.sampling import sampled
from support.traces import Recorded
from torch import nn

OFFLINE = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
GPT2_LAYER = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
GPT2 = {
    *("transformer.wte.weight", "transformer.wpe.weight"),
    *("transformer.ln_f.weight", "transformer.ln_f.bias"),
    *(f"transformer.h.{n}.{p}.{w}" for n in "01" for p in GPT2_LAYER for w in ("weight", "bias")),
}
PERCEPTRON = {"0.weight", "0.bias", "2.weight", "2.bias"}
PERCEPTRON_BYTES = 1048


def client(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        importlib.util.find_spec(name) is None,
        reason=f"{name} is not installed: pip install 'ddltrace[clients]'",
    )


def command_of(job: str, launch: str) -> list[str]:
    script = str(JOBS / job)
    return {
        "accelerate": [
            # Its launcher for CPUs leaves more than one process to MPI.
            *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"),
            *("--num_processes=2", "--num_machines=1"),
            *("--mixed_precision=no", "--dynamo_backend=no"),
            *("--main_process_port", str(free_port()), script),
        ],
        "python": [sys.executable, script],
        "torchrun": torchrun(script),
    }[launch]


ON_DDP = [
    pytest.param(
        *("with_accelerate.py", PERCEPTRON, PERCEPTRON_BYTES, "accelerate"),
        marks=client("accelerate"),
    ),
    pytest.param(
        *("with_lightning.py", {f"net.{name}" for name in PERCEPTRON}, PERCEPTRON_BYTES),
        "python",
        marks=client("lightning"),
    ),
    pytest.param(
        *("with_transformers.py", GPT2, 112_128, "torchrun"), marks=client("transformers")
    ),
]


@pytest.mark.parametrize(
    ("job", "names", "gradient_bytes", "launch"),
    [ON_DDP[number] for number in sampled(range(len(ON_DDP)), 2)],
)
@pytest.mark.long
def test_clients_on_ddp(
    tmp_path: Path, job: str, names: set[str], gradient_bytes: int, launch: str
) -> None:
    """Each takes four steps; the gradients of all parameters go out in each of them."""
    trace = tmp_path / "trace"
    plain, done = at_once(
        lambda: run(command_of(job, launch), cwd=tmp_path, timeout=240, **OFFLINE),
        lambda: run(traced(trace, command_of(job, launch)), cwd=tmp_path, timeout=240, **OFFLINE),
    )
    assert done.status == 0, done.stderr
    assert len(done.losses()) >= 4
    assert done.losses() == plain.losses()
    recorded = Recorded(trace)
    assert [(rank.rank, rank.status) for rank in recorded.info.ranks] == [
        (0, "complete"),
        (1, "complete"),
    ]
    assert recorded.info.notes == []
    for rank, frame in recorded.frames.items():
        assert recorded.ranks[rank].errors == []
        assert {tensor.name for tensor in recorded.ranks[rank].tensors} == names
        assert sum(tensor.bytes for tensor in recorded.ranks[rank].tensors) == gradient_bytes
        assert frame[frame.kind == "step"].step.tolist() == [0, 1, 2, 3]
        buckets = frame[(frame.op == "all_reduce") & frame.tensors.notna()]
        assert buckets.groupby("step").bytes.sum().to_dict() == dict.fromkeys(
            range(4), gradient_bytes
        )
        for _, sent in buckets.groupby("step"):
            assert recorded.carried(rank, sent) == sorted(names)


@client("deepspeed")
@pytest.mark.long
def test_deepspeed_zero(tmp_path: Path) -> None:
    """ZeRO stage 1: gradients are averaged, then each rank updates and sends its shard."""
    command = traced(tmp_path / "trace", torchrun("with_deepspeed.py"))
    done = run(command, cwd=tmp_path, timeout=240, **OFFLINE)
    assert done.status == 0, done.stderr
    assert done.losses() == averaged_training()
    recorded = Recorded(tmp_path / "trace")
    assert recorded.info.notes == []
    for rank, frame in recorded.frames.items():
        assert recorded.ranks[rank].errors == []
        assert "deepspeed" in recorded.ranks[rank].versions
        assert {f"module.{name}" for name in PERCEPTRON} <= {
            tensor.name for tensor in recorded.ranks[rank].tensors
        }
        assert frame[frame.kind == "step"].step.tolist() == [0, 1, 2, 3]
        gradients = frame[(frame.op == "all_reduce") & (frame.bytes == PERCEPTRON_BYTES)]
        assert gradients.step.tolist() == [0, 1, 2, 3]
        # The shard is half of the parameters, padded to DeepSpeed's alignment.
        shards = frame[frame.op == "all_gather"]
        assert len(shards) == 4
        assert set(shards.bytes) == {528}


@pytest.mark.long
@client("ray")
def test_ray_train(tmp_path: Path) -> None:
    """Ray starts the ranks itself, destroys their process group, and then kills them."""
    command = traced(tmp_path / "trace", [sys.executable, str(JOBS / "with_ray.py")])
    ray = {**OFFLINE, **ray_environment(tmp_path)}
    done = run(command, cwd=tmp_path, timeout=280, **ray)
    assert done.status == 0, done.stderr
    assert done.losses() == averaged_training()
    recorded = Recorded(tmp_path / "trace")
    assert sorted(recorded.frames) == [0, 1]
    for rank, frame in recorded.frames.items():
        assert recorded.ranks[rank].errors == []
        assert {tensor.name for tensor in recorded.ranks[rank].tensors} == PERCEPTRON
        buckets = frame[frame.name == "bucket 0"]
        assert buckets.step.tolist() == [0, 1, 2, 3]
        assert set(buckets.bytes) == {PERCEPTRON_BYTES}


def averaged_training() -> list[str]:
    """The losses that two ranks print when the mean of their gradients is applied each step."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generators = [torch.Generator().manual_seed(rank) for rank in (0, 1)]
    lines = []
    for _ in range(4):
        optimizer.zero_grad()
        for rank, generator in enumerate(generators):
            x = torch.randn(8, 10, generator=generator)
            y = torch.randint(0, 2, (8,), generator=generator)
            loss = nn.functional.cross_entropy(model(x), y)
            (loss / 2).backward()
            lines.append(f"rank {rank} loss {loss.item().hex()}")
        optimizer.step()
    torch.set_num_threads(threads)
    return sorted(lines)
