"""Every way to train: the same losses to the bit, and what the trace holds of each."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.jobs import Done, on_ranks, run, traced
from support.traces import Recorded

STEPS = 4
NET_BYTES = 1860 * 4
SCENARIOS = [
    "ddp",
    "bucket_view",
    "static_graph",
    "unused_parameters",
    "fp16_hook",
    "power_sgd",
    "python_hook",
    "gan",
    "grad_scaler",
    "checkpointed",
    "reentrant",
    "thawed",
    "copies",
    "scripted",
    "workers",
    "no_optimizer",
    "sparse_embedding",
    "fsdp2",
    "fsdp1",
    "zero1",
    "tensor_parallel",
    "pipeline",
    "compiled",
    "compiled_in_place",
    "compiled_functional",
]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Done, Done, Path]:
    cwd = tmp_path_factory.mktemp("train")
    command = on_ranks("every_training.py", *SCENARIOS)
    plain = run(command, cwd=cwd, timeout=240)
    assert plain.status == 0, plain.stderr
    done = run(traced(cwd / "trace", command), cwd=cwd, timeout=240)
    assert done.status == 0, done.stderr
    return plain, done, cwd / "trace"


@pytest.fixture(scope="module")
def job(jobs: tuple[Done, Done, Path]) -> Recorded:
    return Recorded(jobs[2])


def net(name: str) -> list[str]:
    """The parameters of the jobs' network, sorted."""
    layers = ("in", "mid", "out")
    return sorted(f"{name}_{layer}.{kind}" for layer in layers for kind in ("bias", "weight"))


@pytest.mark.parametrize("name", SCENARIOS)
def test_losses_are_identical_to_the_last_bit(jobs: tuple[Done, Done, Path], name: str) -> None:
    # Of compiled models the numbers of graphs and graph breaks are compared, too.
    plain, done, _ = jobs
    expected = [line for line in plain.losses() if f" {name} loss" in line]
    assert expected
    assert [line for line in done.losses() if f" {name} loss" in line] == expected


def test_nothing_failed(job: Recorded) -> None:
    assert job.info.notes == []
    for rank in (0, 1):
        assert job.ranks[rank].errors == []
        frame = job.frames[rank]
        assert (frame[frame.kind == "message"].status == "ok").all()


def steps_of(job: Recorded, name: str) -> list[int]:
    return sorted(job.section(0, name, "phase").step.dropna().astype(int).unique())


@pytest.mark.parametrize(
    "name",
    [
        "ddp",
        "bucket_view",
        "static_graph",
        "checkpointed",
        "reentrant",
        "workers",
        "zero1",
    ],
)
def test_buckets_hold_every_gradient_once_a_step(job: Recorded, name: str) -> None:
    for rank in (0, 1):
        messages = job.messages(rank, name)
        buckets = messages[messages.name.str.startswith("bucket")]
        assert buckets.step.nunique() == STEPS
        for _, of_step in buckets.groupby("step"):
            assert of_step.bytes.sum() == NET_BYTES
            assert job.carried(rank, of_step) == net(name)


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "fsdp1", "python_hook"])
def test_a_tensor_lives_in_order(job: Recorded, name: str) -> None:
    """Ready, enqueued, complete, updated; the wait lies in between."""
    gradients = job.section(0, name, "gradient")
    ready = {(int(row.step), int(row.tensors[0])): row.start_ns for row in gradients.itertuples()}
    optimizer = job.section(0, name, "phase").query("name == 'optimizer'").set_index("step")
    messages = job.messages(0, name)
    sent = messages[(messages.phase == "backward") & messages.tensors.notna()]
    sent = sent[(sent.op != "all_gather") | (name == "python_hook")]
    assert len(sent) >= STEPS
    for message in sent.itertuples():
        for tensor in message.tensors:
            assert ready[int(message.step), int(tensor)] <= message.enqueue_ns
        assert message.enqueue_ns <= message.end_ns
        assert message.end_ns <= optimizer.loc[message.step].start_ns


def test_a_compressing_hook_halves_the_bytes(job: Recorded) -> None:
    messages = job.messages(0, "fp16_hook")
    buckets = messages[messages.name.str.startswith("bucket")]
    assert buckets.bytes.tolist() == [NET_BYTES // 2] * STEPS
    assert set(buckets.dtype) == {"float16"}
    assert job.carried(0, buckets) == sorted(net("fp16_hook") * STEPS)


def test_power_sgd_is_known_by_its_bucket(job: Recorded) -> None:
    messages = job.messages(0, "power_sgd")
    buckets = messages[messages.name == "bucket 0"]
    # Two plain steps; then the uncompressed rest and two factors a step.
    assert buckets.groupby("step").size().tolist() == [1, 1, 3, 3]
    assert all(len(ids) == 6 for ids in buckets.tensors)
    assert buckets.bytes.tolist()[:2] == [NET_BYTES] * 2
    assert buckets.bytes.iloc[2:].sum() < NET_BYTES


def test_a_python_hook_that_gathers(job: Recorded) -> None:
    messages = job.messages(1, "python_hook")
    buckets = messages[messages.name.str.startswith("bucket")]
    assert set(buckets.op) == {"all_gather"}
    for _, of_step in buckets.groupby("step"):
        assert of_step.bytes.sum() == NET_BYTES
        assert of_step.out_bytes.sum() == 2 * NET_BYTES
        assert job.carried(1, of_step) == net("python_hook")


def test_unused_parameters(job: Recorded) -> None:
    messages = job.messages(0, "unused_parameters")
    buckets = messages[messages.name == "bucket 0"]
    assert job.carried(0, buckets) == sorted(
        STEPS
        * [f"unused_{side}.{kind}" for side in ("left", "right") for kind in ("bias", "weight")]
    )
    assert (messages.name == "unused parameters").sum() == STEPS
    ready = job.section(0, "unused_parameters", "gradient").name.unique()
    assert len(ready) == 4


def test_two_optimizers_by_turns(job: Recorded) -> None:
    phases = job.section(0, "gan", "phase")
    assert (phases.name == "optimizer").sum() == 2 * STEPS
    assert phases[phases.name == "optimizer"].step.nunique() == 2 * STEPS
    buckets = job.messages(0, "gan").query("name == 'bucket 0'")
    of_generator = [ids for ids in buckets.tensors if len(ids) == 6]
    # The judge's gradients travel with both losses, the generator's with its own.
    assert (len(of_generator), len(buckets)) == (STEPS, 3 * STEPS)


def test_an_update_skipped_by_the_scaler_ends_no_step(job: Recorded) -> None:
    """The second pass overflows: what it did belongs to the step that the third one ends."""
    phases = job.section(0, "grad_scaler", "phase")
    passes = phases.groupby("step").name.apply(lambda n: (n == "backward").sum())
    assert passes.tolist() == [1, 2, 1]
    assert (phases.name == "optimizer").sum() == STEPS - 1
    buckets = job.messages(0, "grad_scaler").query("op == 'all_reduce'")
    buckets = buckets[buckets.name.str.startswith("bucket")]
    assert buckets.groupby("step").bytes.sum().tolist() == [NET_BYTES, 2 * NET_BYTES, NET_BYTES]


def test_parameters_that_become_trainable_are_seen(job: Recorded) -> None:
    gradients = job.section(0, "thawed", "gradient")
    counts = gradients.groupby("name").size().to_dict()
    assert counts == {name: 2 if "_in." in name else STEPS for name in net("thawed")}
    messages = job.messages(0, "thawed")
    assert messages.name.value_counts().to_dict() == counts


def test_a_copied_model_is_another_model(job: Recorded) -> None:
    messages = job.messages(0, "copies")
    buckets = messages[messages.name == "bucket 0"]
    names = job.tensor_names(0)
    models = [{names[t].partition("#")[2] for t in ids} for ids in buckets.tensors]
    assert [len(m) for m in models] == [1] * 6
    assert models[0] == models[1] == models[4] == models[5] == {""}
    assert models[2] == models[3] != {""}


def test_sparse_gradients(job: Recorded) -> None:
    messages = job.messages(0, "sparse_embedding")
    sparse = messages[(messages.phase == "backward") & messages.out_bytes.isna()]
    # 40 tokens a batch: two indices' worth of 8 bytes less one, and 4 values of 4.
    assert set(sparse.bytes) == {40 * (8 + 16)}
    names = job.tensor_names(0)
    assert {names[ids[0]].partition("#")[0] for ids in sparse.tensors} == {"0.weight"}


def test_fully_sharded(job: Recorded) -> None:
    for name, parameters in (("fsdp2", net("fsdp2")), ("fsdp1", net("fsdp1_True"))):
        messages = job.messages(0, name)
        messages = messages[messages.step.isin(steps_of(job, name)[:STEPS])]
        for _, of_step in messages.groupby("step"):
            gathers = of_step[of_step.op == "all_gather"]
            scatters = of_step[of_step.op == "reduce_scatter"]
            # Gathered forward and backward, reduced once.
            assert gathers.out_bytes.sum() == 2 * NET_BYTES
            assert job.carried(0, gathers) == sorted(2 * parameters)
            assert scatters.bytes.sum() == NET_BYTES
            assert scatters.out_bytes.sum() == NET_BYTES // 2
            assert job.carried(0, scatters) == parameters
    sizes = {t.name: t.bytes for t in job.ranks[0].tensors}
    assert sum(sizes[p] for p in net("fsdp2")) == NET_BYTES
    assert sum(sizes[p] for p in net("fsdp1_True")) == NET_BYTES


def test_flat_parameters_are_named_as_such(job: Recorded) -> None:
    messages = job.messages(0, "fsdp1")
    flat = messages[messages.step.isin(steps_of(job, "fsdp1")[STEPS:])]
    assert set(job.carried(0, flat)) == {
        f"fsdp1_False_{layer}._flat_param" for layer in ("in", "mid", "out")
    }


def test_zero1_spreads_what_it_updated(job: Recorded) -> None:
    messages = job.messages(0, "zero1")
    spread = messages[messages.phase == "optimizer"]
    assert set(spread.op) == {"broadcast"}
    for _, of_step in spread.groupby("step"):
        assert of_step.bytes.sum() == NET_BYTES
        assert job.carried(0, of_step) == net("zero1")
    assert set(spread.peer) == {0, 1}


def test_tensor_parallel(job: Recorded) -> None:
    messages = job.messages(0, "tensor_parallel")
    summed = messages[messages.op == "all_reduce"]
    assert summed.bytes.tolist() == [8 * 32 * 4] * STEPS  # the activations of one layer
    waits = job.section(0, "tensor_parallel", "wait")
    assert set(summed.id) <= set(waits.parent)


def test_pipeline(job: Recorded) -> None:
    messages = job.messages(0, "pipeline")
    activations = messages[(messages.op == "send") & (messages.dtype == "float32")]
    assert activations.bytes.tolist() == [2 * 16 * 4] * (4 * STEPS)  # 2 rows a micro-batch
    gradients = messages[(messages.op == "recv") & (messages.dtype == "float32")]
    assert gradients.out_bytes.tolist() == activations.bytes.tolist()
    assert set(activations.peer) == {1}


def test_compiled_models(job: Recorded) -> None:
    messages = job.messages(0, "compiled")
    buckets = messages[messages.name.str.startswith("bucket")]
    assert buckets.groupby("step").bytes.sum().tolist() == [NET_BYTES] * (2 * STEPS)
    assert all(len(ids) == 6 for ids in buckets.tensors)
    layers = job.section(0, "compiled_in_place", "layer").name.value_counts()
    assert {
        str(name).rpartition("_")[2]: n for name, n in layers.items() if "_aot_" in str(name)
    } == {**{"in": STEPS, "mid": STEPS, "out": STEPS}}
    inside_graph = job.messages(0, "compiled_functional")
    assert inside_graph[["op", "bytes"]].to_numpy().tolist() == [["all_reduce", 20]]
    waits = job.section(0, "compiled_functional", "wait")
    assert inside_graph.id.iloc[0] in set(waits.parent)
