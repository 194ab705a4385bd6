"""`pip install ddltrace` without extras: what works, and the message for each missing extra."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.jobs import JOBS, Done, run
from support.slim_environment import ROOT, make_slim_environment, project

from ddltrace.tracer.optional_packages import EXTRAS, NOT_IN_ALL, USES

SAMPLE = str(ROOT / "sample_traces" / "straggler")
OPTIONAL = ("pandas", "plotly", "dash", "duckdb", "sklearn", "perfetto")


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the core dependencies only: no PyTorch either."""
    return make_slim_environment(tmp_path_factory.mktemp("core") / "venv", core_dependencies())


@pytest.fixture(scope="module")
def with_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter of a training environment: PyTorch and the core dependencies."""
    folder = tmp_path_factory.mktemp("with-torch") / "venv"
    return make_slim_environment(folder, [*core_dependencies(), "torch"])


def core_dependencies() -> list[str]:
    dependencies: list[str] = project()["dependencies"]
    return dependencies


def ddltrace(python: Path, *arguments: str, cwd: Path) -> Done:
    return run([str(python), "-m", "ddltrace", *arguments], cwd=cwd)


def test_core_dependencies_are_few_and_have_no_torch(core: Path, tmp_path: Path) -> None:
    names = {line.split(">")[0] for line in core_dependencies()}
    assert names == {"click", "isal", "msgspec", "numpy", "psutil", "pyarrow"}
    program = (
        "import importlib.util, json\n"
        f"names = {[*OPTIONAL, 'torch', 'jinja2']!r}\n"
        "print(json.dumps([n for n in names if importlib.util.find_spec(n)]))"
    )
    done = run([str(core), "-c", program], cwd=tmp_path)
    assert json.loads(done.stdout) == [], "the environment is not slim: the tests prove nothing"


def test_analyze_works_without_extras(core: Path, tmp_path: Path) -> None:
    text = ddltrace(core, "analyze", SAMPLE, cwd=tmp_path)
    assert (text.status, text.stderr) == (0, "")
    assert "Rank 1" in text.stdout
    document = ddltrace(core, "analyze", SAMPLE, "--json", cwd=tmp_path)
    assert json.loads(document.stdout)["schema"] == "ddltrace.analysis/1"


@pytest.mark.parametrize(
    "arguments",
    [
        ("compare", SAMPLE, SAMPLE),
        ("export", SAMPLE, "--to", "chrome", "-o", "trace.json"),
        ("export", SAMPLE, "--to", "parquet", "-o", "trace.parquet"),
        ("experiment", "list"),
    ],
    ids=lambda arguments: " ".join(arguments[:1]),
)
def test_other_commands_work_without_extras(
    core: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    done = ddltrace(core, *arguments, cwd=tmp_path)
    assert done.status == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "extra", "packages"),
    [
        (("analyze", SAMPLE, "--html", "report.html"), "report", "jinja2, plotly"),
        (("query", SAMPLE, "FROM steps"), "query", "duckdb"),
        (("dashboard", SAMPLE, "--no-browser"), "dashboard", "dash, dash-ag-grid, plotly, jinja2"),
        (("export", SAMPLE, "--to", "perfetto", "-o", "t.pftrace"), "perfetto", "perfetto"),
        (("export", SAMPLE, "--to", "chakra", "-o", "et"), "chakra", "protobuf"),
        (("watch", SAMPLE, "--metrics", ":9464"), "metrics", "prometheus-client"),
        (
            ("watch", SAMPLE, "--metrics", "otlp"),
            "otlp",
            "opentelemetry-sdk, opentelemetry-exporter-otlp-proto-http",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_missing_extra_is_named_in_one_line(
    core: Path, tmp_path: Path, arguments: tuple[str, ...], extra: str, packages: str
) -> None:
    done = ddltrace(core, *arguments, cwd=tmp_path)
    assert done.status == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.endswith(f"needs {packages}: pip install 'ddltrace[{extra}]'")
    assert list(tmp_path.iterdir()) == []


def test_a_frame_names_its_extra(core: Path, tmp_path: Path) -> None:
    program = f"import ddltrace; ddltrace.open({SAMPLE!r}).analyze().ranks_frame()"
    done = run([str(core), "-c", program], cwd=tmp_path)
    assert done.stderr.strip().endswith("pip install 'ddltrace[frames]'")


def test_without_torch(core: Path, tmp_path: Path) -> None:
    experiment = ddltrace(core, "experiment", "run", cwd=tmp_path)
    assert (experiment.status, experiment.stdout) == (1, "")
    (line,) = experiment.stderr.splitlines()
    assert "needs PyTorch 2.6 or newer" in line
    doctor = ddltrace(core, "doctor", cwd=tmp_path)
    assert doctor.status == 1
    (line,) = [line for line in doctor.stdout.splitlines() if " torch: " in line]
    assert line.startswith("MISSING")
    for extra in EXTRAS:
        assert f"pip install 'ddltrace[{extra}]'" in doctor.stdout
    # The job's exit status is its own; why nothing was recorded names PyTorch.
    job = [str(core), "-c", "print('ran')"]
    traced = ddltrace(core, "run", "-o", "trace", "--", *job, cwd=tmp_path)
    assert traced.stdout == "ran\n"
    assert traced.status == 1
    assert "PyTorch is not installed" in traced.stderr
    assert "compil" not in traced.stderr


def test_a_job_is_traced_and_analyzed_without_extras(with_torch: Path, tmp_path: Path) -> None:
    job = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = str(JOBS / "ddp_cnn.py")
    done = ddltrace(with_torch, "run", "-o", "trace", "--", str(with_torch), *job, script,
                    cwd=tmp_path)  # fmt: skip
    assert done.status == 0, done.stderr
    assert "trace of 2 ranks in trace" in done.stderr
    document = json.loads(ddltrace(with_torch, "analyze", "trace", "--json", cwd=tmp_path).stdout)
    assert document["trace"]["world_size"] == 2
    assert document["collectives"]
    experiment = ddltrace(with_torch, "experiment", "run", cwd=tmp_path)
    assert experiment.status == 1
    assert experiment.stderr.strip().endswith("pip install 'ddltrace[experiments]'")


def test_extras_are_those_of_the_project() -> None:
    """`EXTRAS` and pyproject.toml name the same packages."""
    declared = {
        extra: {line.split(">")[0] for line in lines if not line.startswith("ddltrace[")}
        for extra, lines in project()["optional-dependencies"].items()
    }
    declared["dashboard"] |= declared["report"]
    assert {extra: set(packages) for extra, packages in EXTRAS.items()} == {
        extra: declared[extra] for extra in EXTRAS
    }
    assert set(USES) == set(EXTRAS)
    (everything,) = project()["optional-dependencies"]["all"]
    assert set(everything.removeprefix("ddltrace[").removesuffix("]").split(",")) == set(
        EXTRAS
    ) - set(NOT_IN_ALL)
