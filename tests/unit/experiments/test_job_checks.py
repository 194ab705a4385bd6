"""What a job refuses is refused before it starts, as far as it can be known."""

from __future__ import annotations

from typing import Any

import pytest

from ddltrace.experiments.strategy.job_checks import refused_optimizer, refused_ranks
from ddltrace.experiments.strategy.spec import names, parse
from ddltrace.experiments.workloads import WORKLOADS, create
from ddltrace.experiments.workloads.sizes import EXPERTS, HEADS, LAYERS
from ddltrace.tracer.errors import UsageError


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_optimizer_of_each_workload_is_known_without_torch(name: str) -> None:
    if WORKLOADS[name].needs_sklearn:
        pytest.importorskip("sklearn")
    workload = create(name, width=4, batch_size=2, seed=0)
    assert type(workload.optimizer(0.1)).__name__ == WORKLOADS[name].optimizer


def test_the_sizes_of_models_are_known_without_torch() -> None:
    from ddltrace.experiments.workloads.gpt import GptModel
    from ddltrace.experiments.workloads.moe import MoeModel

    assert len(GptModel(4 * HEADS).units()) == LAYERS + 2
    block: Any = MoeModel(4 * HEADS).blocks[0]
    assert block.gate.out_features == EXPERTS


@pytest.mark.parametrize("ranks", range(2, 9))
def test_ranks_that_cannot_run_a_strategy_are_refused(ranks: int) -> None:
    for servers in range(1, 9):
        sharded = parse(f"ps:servers={servers},sharded=true")
        assert (refused_ranks(sharded, ranks) is not None) == (servers > ranks)
        assert refused_ranks(parse(f"ps:servers={servers}"), ranks) is None
        backup = parse(f"backup:workers={servers}")
        assert (refused_ranks(backup, ranks) is not None) == (servers >= ranks)
        for groups in ("+mpi", "+ucx"):
            grouped = parse(f"grouped:size={servers}{groups}")
            assert (refused_ranks(grouped, ranks) is not None) == (servers < ranks)
    assert (refused_ranks(parse("tensor"), ranks) is not None) == (ranks not in (2, 4))
    assert (refused_ranks(parse("expert"), ranks) is not None) == (ranks not in (2, 4))
    assert (refused_ranks(parse("gpipe"), ranks, 8 * ranks) is not None) == (ranks > 4)
    assert refused_ranks(parse("1f1b:microbatches=3"), 2, 16) is not None
    assert refused_ranks(parse("1f1b:microbatches=3"), 2, 15) is None


def test_only_strategies_that_take_the_place_of_sgds_momentum_need_sgd() -> None:
    refused = {
        name
        for name in set(names()) - {"feedback", "doublesqueeze"}
        if refused_optimizer(parse(name), ["AdamW", "Optimizer"])
    }
    assert refused == {"odsgd", "dgc"}
    assert refused_optimizer(parse("odsgd"), ["Mine", "SGD", "Optimizer"]) is None


@pytest.mark.parametrize("spec", ["ps:servers=1+mpi", "asp+ucx", "ps+ssp+mpi"])
def test_transports_of_whole_jobs_carry_no_servers(spec: str) -> None:
    with pytest.raises(UsageError, match="no process but the job's ranks"):
        parse(spec)
