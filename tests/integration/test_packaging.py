"""What is installed: a wheel and an editable install, each in an environment of its own.

Nothing is fetched: the build uses the setuptools that is here, and the new environments see
the dependencies of this one.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("tracer", "analyzer", "dashboard", "experiments")
# Neither a bytecode cache nor what an earlier build left behind.
LITTER = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads, so that building leaves no litter in the checkout."""
    copy = tmp_path_factory.mktemp("sources")
    for folder in ("package-root", *PACKAGES):
        shutil.copytree(ROOT / folder, copy / folder, ignore=LITTER)
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy2(ROOT / file, copy / file)
    return copy


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-build-isolation", "--no-deps", "-w", str(target), str(sources))
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module", params=["wheel", "editable"])
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment with ddltrace installed in it."""
    python = make_environment(tmp_path_factory.mktemp(request.param) / "venv")
    if request.param == "wheel":
        arguments = [str(request.getfixturevalue("wheel"))]
    else:
        arguments = ["--no-build-isolation", "-e", str(request.getfixturevalue("sources"))]
    pip("--python", str(python), "install", "--no-deps", *arguments)
    return python


def make_environment(path: Path) -> Path:
    """A new environment that sees the packages of this one, less this one's ddltrace."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(path)], check=True, timeout=120
    )
    purelib = sysconfig.get_path("purelib", "venv", vars={"base": str(path), "platbase": str(path)})
    # A path in a .pth file comes after the environment's own packages, and .pth files in it
    # (our editable install) are not run.
    Path(purelib, "dependencies.pth").write_text(
        sysconfig.get_path("purelib") + "\n", encoding="utf-8"
    )
    return path / "bin" / "python"


def pip(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def run(python: Path, *arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [str(python), *arguments], cwd=cwd, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_installs_and_runs(installed: Path, tmp_path: Path) -> None:
    version = subprocess.run(
        [str(installed.with_name("ddltrace")), "--version"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    assert version == run(installed, "-m", "ddltrace", "--version", cwd=tmp_path)
    assert version.startswith("ddltrace, version ")


@pytest.mark.long
def test_traces_a_job(installed: Path, tmp_path: Path) -> None:
    """What is injected into jobs was installed, and finds its way into one."""
    said = run(installed, "-m", "ddltrace", "doctor", cwd=tmp_path)
    (capture,) = [line for line in said.splitlines() if "capture:" in line]
    assert capture.startswith("ok")
    assert "message" in capture


def test_rooms_are_inside_the_package_only(installed: Path, tmp_path: Path) -> None:
    """Jobs have modules named `tracer`: an installed ddltrace must not add another one."""
    program = (
        "import importlib, importlib.util, json, ddltrace\n"
        f"packages = {PACKAGES!r}\n"
        "inside = {r: importlib.import_module('ddltrace.' + r).__file__ for r in packages}\n"
        "outside = [r for r in packages if importlib.util.find_spec(r) is not None]\n"
        "print(json.dumps({'inside': inside, 'outside': outside}))\n"
    )
    found = json.loads(run(installed, "-c", program, cwd=tmp_path))
    assert found["outside"] == []
    for file in found["inside"].values():
        assert not Path(file).is_relative_to(ROOT), "this is the checkout, not what was installed"


def test_nothing_in_a_clone_shadows_the_package(installed: Path) -> None:
    """Python started in the clone's folder has that folder first on its path."""
    program = (
        "import json, sys\n"
        "import ddltrace, ddltrace.analyzer.open_trace, ddltrace.tracer.config\n"
        "ours = {n: m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'ddltrace'}\n"
        "print(json.dumps({'path': sys.path[0], 'ours': ours}))\n"
    )
    found = json.loads(run(installed, "-B", "-c", program, cwd=ROOT))
    assert found["path"] == ""
    assert len(found["ours"]) > 10
    for name, file in found["ours"].items():
        assert not Path(file).is_relative_to(ROOT), f"{name} is the clone's: {file}"


def test_every_module_imports(installed: Path, sources: Path, tmp_path: Path) -> None:
    """Also those of the packages that pyproject.toml has to list one by one."""
    modules = sorted(
        ".".join(("ddltrace", *path.relative_to(sources).with_suffix("").parts))
        for package in PACKAGES
        for path in (sources / package).rglob("*.py")
        if (path.parent / "__init__.py").exists() and path.stem not in {"__init__", "__main__"}
    )
    program = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    run(installed, "-c", program, *modules, cwd=tmp_path)


def test_wheel_holds_every_file(wheel: Path, sources: Path) -> None:
    """The code, the type marker, the dashboard's assets, what is injected into jobs."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    wanted = {
        "ddltrace/" + path.relative_to(sources / "package-root").as_posix()
        for path in (sources / "package-root").rglob("*")
        if path.is_file()
    } | {
        "ddltrace/" + path.relative_to(sources).as_posix()
        for package in PACKAGES
        for path in (sources / package).rglob("*")
        if path.is_file()
    }
    assert "ddltrace/py.typed" in wanted
    assert sorted(wanted - names) == []
    extra = {name for name in names - wanted if ".dist-info/" not in name}
    plugin = {"ddltrace/tracer/nccl/libnccl-profiler-ddltrace.so"} if shutil.which("cc") else set()
    assert extra == plugin
    # For any Python: the plugin does not use its interface.
    assert "-py3-none-" in wheel.name
    assert wheel.name.endswith("-none-any.whl") == (not plugin)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"ddltrace"}
