"""Advice fits the job: what it recommends is possible, not done yet, and pays."""

from __future__ import annotations

import ast
import inspect
from types import SimpleNamespace

import pytest

from ddltrace.analyzer.findings import advice
from ddltrace.analyzer.formatting.units import printable_words
from ddltrace.experiments.strategy import advised
from ddltrace.experiments.strategy.spec import parse
from ddltrace.tracer.trace.run_info import GroupInfo

STEPS = 6
COMMAND = ["torchrun", "--nproc-per-node", "2", "train.py"]


def _trained(
    built,
    messages,
    *,
    update=100,
    compute=1000,
    launch_early=False,
    elements=4,
    bucket="bucket 0",
    op_bytes=lambda op, size: {"bytes": size, "out_bytes": size},
):
    """Steps of two ranks: compute, messages one by one (op, bytes, transfer), update, us."""
    for rank in (0, 1):
        one = built[rank]
        at = 0.0
        seq = 0
        for number in range(STEPS):
            one.step = number
            begin = at
            one.add("phase", at, at + compute, name="backward", phase="backward")
            at += compute
            for op, size, transfer, *tensors in messages:
                sent = at - compute / 2 if launch_early else at
                named = {"name": bucket} if tensors and bucket else {}
                message = one.message(
                    op, sent, at + transfer, seq=seq, tensors=tensors, **op_bytes(op, size), **named
                )
                one.wait(at, at + transfer, message)
                at += transfer
                seq += 1
            one.add("phase", at, at + update, name="optimizer", phase="optimizer")
            at += update
            one.whole_step(number, begin, at)
    return built.trace().analyze()


def _findings(analysis):
    return {finding.kind: finding for finding in analysis.findings}


def test_a_job_that_shards_its_gradients_is_not_told_to_shard_its_update(build):
    built = build(2)
    scattered = ("reduce_scatter", 1 << 20, 200, built.tensor("net.weight", 1 << 20))
    analysis = _trained(built, [("all_gather", 1 << 20, 200), scattered], update=900, bucket=None)
    proposed = _findings(analysis)["update"].advice
    assert "ZeRO" not in proposed
    assert "ZeroRedundancy" not in proposed
    assert "fused" in proposed
    for finding in analysis.findings:
        assert "bucket_cap_mb" not in finding.advice, "there are no buckets"


def test_fsdp_that_gathers_twice_may_keep_what_it_gathered(build):
    built = build(2)
    tensor = built.tensor("net.weight", 1 << 20)
    gathers = [("all_gather", 1 << 20, 400, tensor), ("all_gather", 1 << 20, 400, tensor)]
    scatter = ("reduce_scatter", 1 << 20, 100, tensor)
    analysis = _trained(built, [*gathers, scatter], bucket=None)
    finding = _findings(analysis)["communication"]
    assert "prefetch" in finding.advice or "reshard_after_forward" in finding.advice
    assert finding.saves_us <= analysis.savings.transfer_us


def test_one_small_bucket_is_latency_and_no_bucket_size_helps(build):
    built = build(2)
    tensor = built.tensor("net.weight", 10_000)
    finding = _findings(_trained(built, [("all_reduce", 10_000, 500, tensor)]))["communication"]
    assert "smaller buckets" not in finding.advice
    assert "merge" not in finding.advice
    assert "exchange gradients less often" in finding.advice
    assert "is latency is not known" in finding.advice, "one size fits no latency"
    assert "% is latency" not in finding.advice
    assert finding.command is not None
    assert "--strategy localsgd:period=4 --strategy ddp -- test" in finding.command


def test_without_the_package_of_experiments_nothing_tests_the_advice(build, monkeypatch):
    def found(name):
        built = build(2, name)
        messages = [("all_reduce", 10_000, 100, built.tensor(f"t{i}", 10_000)) for i in range(8)]
        return _findings(_trained(built, messages))["communication"]

    tested = found("with")
    assert tested.strategies == ("best_buckets", "fusion", "ddp")
    monkeypatch.setattr(advice, "extension", lambda _: None)
    finding = found("without")
    assert finding.advice == tested.advice
    assert finding.strategies == ()
    assert finding.command.startswith("ddltrace run -o after -- test && ddltrace compare")


def test_many_small_messages_are_merged(build):
    built = build(2)
    messages = [("all_reduce", 10_000, 100, built.tensor(f"t{i}", 10_000)) for i in range(8)]
    finding = _findings(_trained(built, messages))["communication"]
    assert "merge messages" in finding.advice
    # Seven of eight latencies.
    assert finding.saves_us == pytest.approx(700, rel=0.02)
    assert finding.command.startswith(
        "ddltrace experiment run --strategy best_buckets --strategy fusion"
    )
    assert finding.command.endswith("-- test")


@pytest.mark.parametrize(
    ("messages", "option"),
    [
        ([("all_reduce", 10_000, 100)] * 8, "DeepSpeed: a larger reduce_bucket_size"),
        ([("all_reduce", 64 << 20, 2000)], "DeepSpeed: overlap_comm and a smaller"),
        ([("all_reduce", 10_000, 500)], "DeepSpeed: gradient_accumulation_steps"),
        (
            [("all_gather", 1 << 20, 400)] * 2 + [("reduce_scatter", 1 << 20, 200)],
            "DeepSpeed: overlap_comm and a larger stage3_prefetch_bucket_size",
        ),
    ],
    ids=["merge", "split", "latency", "gather"],
)
def test_a_job_of_deepspeed_gets_its_options(build, messages, option):
    built = build(2)
    for rank in (0, 1):
        built[rank].info_changes["versions"] = {"deepspeed": "0.18"}
    finding = _findings(_trained(built, messages))["communication"]
    assert option in finding.advice
    assert "DDP" not in finding.advice
    assert "FSDP" not in finding.advice
    # Strategies take the place of DDP's communication; DeepSpeed's they cannot replace.
    assert "--strategy" not in (finding.command or "")


def test_a_large_bucket_after_the_backward_pass_is_split(build):
    built = build(2)
    tensor = built.tensor("net.weight", 64 << 20)
    finding = _findings(_trained(built, [("all_reduce", 64 << 20, 2000, tensor)]))["communication"]
    assert "smaller buckets" in finding.advice
    assert finding.saves_us < 2000
    assert "--strategy ddp:bucket_mb=" in finding.command


def test_a_job_that_sends_half_precision_is_not_told_to(build):
    built = build(2)
    tensor = built.tensor("net.weight", 64 << 20)
    half = [("all_reduce", 32 << 20, 2000, tensor)]
    analysis = _trained(built, half, launch_early=True, compute=6000)
    assert all("half precision" not in finding.advice for finding in analysis.findings)
    full = build(2, "full")
    tensor = full.tensor("net.weight", 64 << 20)
    analysis = _trained(
        full, [("all_reduce", 64 << 20, 2000, tensor)], launch_early=True, compute=6000
    )
    assert "half precision" in _findings(analysis)["communication"].advice


def _advice_of(analysis):
    return " ".join(finding.advice for finding in analysis.findings)


def test_a_bucket_is_not_counted_with_averages_of_the_loss(build):
    """Four all_reduces, of which one carries gradients: there is nothing to merge."""
    built = build(2)
    tensor = built.tensor("net.weight", 29_000)
    averages = [("all_reduce", 4, 50)] * 3
    proposed = _advice_of(_trained(built, [("all_reduce", 29_000, 500, tensor), *averages]))
    assert "merge" not in proposed
    assert "7.2" not in proposed, "no mean over unlike messages"
    assert "1 all_reduce a step (29.0 kB in total)" in proposed


@pytest.mark.parametrize("size", [10_000, 64 << 20])
@pytest.mark.parametrize("count", [1, 8])
def test_messages_that_are_not_known_to_carry_gradients_get_no_advice_on_them(build, size, count):
    """Activations of tensor parallelism, or averages of copies of the parameters."""
    analysis = _trained(build(2), [("all_reduce", size, 500)] * count)
    assert "communication" in _findings(analysis)
    for word in ("DDP", "bucket", "gradient", "local SGD", "no_sync"):
        assert word not in _advice_of(analysis)
    assert all(not finding.strategies for finding in analysis.findings)


def test_averages_of_parameters_are_not_gradients(build):
    """Local SGD averages the parameters themselves, before the step's gradients are ready."""
    built = build(2)
    tensor = built.tensor("net.weight", 64 << 20)
    for rank in (0, 1):
        for number in range(STEPS):
            one = built[rank]
            at = number * 4000.0
            one.step = number
            message = one.message("all_reduce", at, at + 2000, seq=number, tensors=[tensor],
                                  bytes=64 << 20, out_bytes=64 << 20)  # fmt: skip
            one.wait(at, at + 2000, message)
            one.add("phase", at + 2000, at + 3000, name="backward", phase="backward")
            one.add("gradient", at + 3000, at + 3000, tensors=[tensor])
            one.add("phase", at + 3000, at + 4000, name="optimizer", phase="optimizer")
            one.whole_step(number, at, at + 4000)
    analysis = built.trace().analyze()
    assert "communication" in _findings(analysis)
    for word in ("DDP", "bucket", "gradient", "local SGD"):
        assert word not in _advice_of(analysis)


def test_a_long_command_is_tested_like_any_other():
    words = ["torchrun", "train.py", *(f"--option_{i}=value" for i in range(100))]
    trace = SimpleNamespace(source="ddltrace", command=tuple(words))
    command = advice.experiment_command(SimpleNamespace(trace=trace), ("ddp",))
    assert command is not None
    assert command.endswith(" ".join(words))
    assert printable_words(command) == command, "no report cuts it"


@pytest.mark.parametrize(("size", "count"), [(10_000, 8), (10_000, 1), (64 << 20, 1)])
def test_gradients_that_the_job_reduces_itself_are_in_no_buckets(build, size, count):
    """A loop over the parameters that calls all_reduce on each gradient, without DDP."""
    built = build(2)
    messages = [("all_reduce", size, 400, built.tensor(f"t{i}", size)) for i in range(count)]
    analysis = _trained(built, messages, bucket=None)
    assert "communication" in _findings(analysis)
    for word in ("DDP", "bucket_cap_mb", "no_sync", "bf16_compress_hook", "local SGD", "()", "(;"):
        assert word not in _advice_of(analysis)
    assert all(not finding.strategies for finding in analysis.findings)


@pytest.mark.parametrize("launch_early", [False, True])
def test_reduce_scatters_of_activations_are_no_fsdp(build, launch_early):
    """Sequence parallelism gathers and scatters activations."""
    messages = [("all_gather", 1 << 20, 400)] * 4 + [("reduce_scatter", 1 << 20, 400)] * 2
    analysis = _trained(build(2), messages, launch_early=launch_early)
    assert "communication" in _findings(analysis)
    for word in ("FSDP", "reshard", "gathered parameters", "gather parameters", "gradients in"):
        assert word not in _advice_of(analysis)


def test_gathered_parameters_of_fsdp_are_not_merged_as_gradients(build):
    """They are gathered again in the backward pass, when gradients are ready already."""
    built = build(2)
    tensors = [built.tensor(f"layers.{i}", 8_000) for i in range(4)]
    gathers = [("all_gather", 8_000, 300, tensor) for tensor in tensors]
    scatters = [("reduce_scatter", 8_000, 20, tensor) for tensor in tensors]
    analysis = _trained(built, [*gathers, *gathers, *scatters], bucket=None)
    proposed = _findings(analysis)["communication"].advice
    assert "all_gather in each step" not in proposed
    assert "DDP" not in proposed


def _two_dimensional(built, *, transfer=(300, 600)):
    """Four ranks: tensor parallelism in pairs, DDP over the two ranks with the same shard."""
    built.groups = [
        GroupInfo("tp", "mesh_tp", "gloo", (0, 1)),
        GroupInfo("tp2", "mesh_tp", "gloo", (2, 3)),
        GroupInfo("dp", "mesh_dp", "gloo", (0, 2)),
        GroupInfo("dp2", "mesh_dp", "gloo", (1, 3)),
    ]
    tensor = built.tensor("net.weight", 64 << 20)
    for rank in range(4):
        one, at = built[rank], 0.0
        for number in range(STEPS):
            one.step, begin = number, at
            one.add("phase", at, at + 1000, name="backward", phase="backward")
            at += 1000
            for group, size, length, more in (
                ("tp" if rank < 2 else "tp2", 1 << 20, transfer[0], {}),
                (
                    "dp" if rank % 2 == 0 else "dp2",
                    64 << 20,
                    transfer[1],
                    {"name": "bucket 0", "tensors": [tensor]},
                ),
            ):
                message = one.message(
                    "all_reduce", at, at + length, seq=number, group=group,
                    bytes=size, out_bytes=size, **more,
                )  # fmt: skip
                one.wait(at, at + length, message)
                at += length
            one.add("phase", at, at + 100, name="optimizer", phase="optimizer")
            at += 100
            one.whole_step(number, begin, at)
    return built.trace().analyze()


@pytest.mark.parametrize("transfer", [(300, 600), (600, 300)])
def test_tensor_and_data_parallel_jobs_get_advice_on_their_gradients_only(build, transfer):
    analysis = _two_dimensional(build(4), transfer=transfer)
    finding = _findings(analysis)["communication"]
    assert "1.05 MB" not in finding.advice, "activations are in no bucket"
    assert all(not each.strategies for each in analysis.findings), "they need DDP over all ranks"
    assert all("--strategy" not in (each.command or "") for each in analysis.findings)


def test_pipelines_are_told_of_microbatches_and_not_of_buckets(build):
    """Two stages: activations forward, gradients of activations back, four microbatches."""
    built = build(2)
    for number in range(STEPS):
        begin = number * 12_000.0
        for rank in (0, 1):
            built[rank].step = number
        for part in range(4):
            first = begin + part * 1000
            for rank, at in ((0, first), (1, first + 1100)):
                name = "forward"
                built[rank].add("phase", at, at + 1000, name=name, phase=name)
            back = begin + 5200 + part * 1000
            for rank, at in ((1, back), (0, back + 1100)):
                name = "backward"
                built[rank].add("phase", at, at + 1000, name=name, phase=name)
            for source, op, start, end in (
                (0, "send", first + 1000, first + 1100),
                (1, "recv", first + 1000, first + 1100),
                (1, "send", back + 1000, back + 1100),
                (0, "recv", back + 1000, back + 1100),
            ):
                sizes = {"bytes": 4096} if op == "send" else {"out_bytes": 4096}
                built[source].message(op, start, end, peer=1 - source, **sizes)
        for rank in (0, 1):
            at = begin + 10_400
            built[rank].add("phase", at, at + 100, name="optimizer", phase="optimizer")
            built[rank].whole_step(number, begin, at + 100)
    analysis = built.trace().analyze()
    assert analysis.findings
    for word in ("DDP", "bucket", "FSDP", "local SGD", "no_sync", "accumulating"):
        assert word not in _advice_of(analysis)


def test_findings_are_in_the_order_of_what_they_save_and_unknown_ones_last(build):
    for compute, transfer in ((5000, 500), (500, 5000)):
        built = build(2, f"{compute}")
        tensor = built.tensor("net.weight", 64 << 20)
        analysis = _trained(built, [("all_reduce", 64 << 20, transfer, tensor)], compute=compute)
        saves = [finding.saves_us for finding in analysis.findings]
        assert saves == sorted(saves, reverse=True)
        largest = "compute" if compute > transfer else "communication"
        assert analysis.findings[0].kind == largest


def test_an_expensive_update_of_ddp_may_be_shared(build):
    built = build(2)
    tensor = built.tensor("net.weight", 10_000)
    analysis = _trained(built, [("all_reduce", 10_000, 100, tensor)], update=2000)
    finding = _findings(analysis)["update"]
    assert "ZeroRedundancyOptimizer" in finding.advice
    few = _trained(
        (other := build(2, "dear")),
        [("all_reduce", 64 << 20, 6000, other.tensor("net.weight", 64 << 20))],
        update=2000,
    )
    assert "ZeroRedundancyOptimizer" not in _findings(few)["update"].advice, "gathering costs more"


@pytest.mark.parametrize("op", ["broadcast", "all_gather"])
def test_an_update_that_is_shared_already_is_not_to_be_shared(build, op):
    built = build(2)
    tensor = built.tensor("net.weight", 10_000)
    messages = [("all_reduce", 10_000, 100, tensor), (op, 5_000, 50)]
    finding = _findings(_trained(built, messages, update=2000))["update"]
    assert "ZeroRedundancyOptimizer" not in finding.advice


def test_a_slow_first_step_of_a_short_job_is_in_no_number(build):
    """The first steps of a short job may take many times as long as the others."""
    built = build(1)
    one, at = built[0], 0.0
    for number, length in enumerate([90_000, 60_000, 1000, 1000, 1000, 1000]):
        one.step = number
        one.add("phase", at, at + length * 0.9, name="forward", phase="forward")
        one.whole_step(number, at, at + length)
        at += length
    analysis = built.trace().analyze()
    assert analysis.summary.warmup_steps == 2
    assert analysis.summary.step_us.mean == 1000
    assert max(finding.saves_us for finding in analysis.findings) <= 1000


def test_every_change_is_tested_by_strategies_that_exist():
    kinds = {
        ast.literal_eval(node.args[0])
        for node in ast.walk(ast.parse(inspect.getsource(advice)))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Change"
    }
    assert kinds == {"merge", "split", "halve", "accumulate"}
    for kind in kinds:
        specs = advised.strategies(kind, 4, wrapper="ddp", all_ranks=True)
        assert "ddp" in specs
        assert all(map(parse, specs))
