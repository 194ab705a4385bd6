"""Ray Train: its workers are processes of a local cluster that Ray starts."""

import os
import sys
import tempfile

import ray
import ray.train.torch
import torch
from torch import nn


def train():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = ray.train.get_context().get_world_rank()
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 2))
    model = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        x = torch.randn(8, 10, generator=generator)
        y = torch.randint(0, 2, (8,), generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        with open(os.environ["LOSSES"], "a") as file:  # one short write: lines stay whole
            file.write(f"rank {rank} loss {loss.item().hex()}\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # socket paths must be short
        os.environ["LOSSES"] = os.path.join(folder, "losses")
        ray.init(
            num_cpus=3,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=os.path.join(folder, "ray"),
            runtime_env={"env_vars": {"LOSSES": os.environ["LOSSES"]}},
        )
        trainer = ray.train.torch.TorchTrainer(
            train,
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(storage_path=os.path.join(folder, "results")),
        )
        trainer.fit()
        ray.shutdown()
        with open(os.environ["LOSSES"]) as file:
            sys.stdout.write(file.read())
