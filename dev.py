#!/usr/bin/env python3
"""Creates the development environment and runs the project's tasks in it.

Requires Python 3.10 or newer and a package index. The environment is `.venv`, with the versions
of `constraints.txt`. The first task creates it; a change of `pyproject.toml` or
`constraints.txt` refreshes it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import itertools
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / "bin"
STAMP = VENV / "ddltrace.stamp"
CLIENTS_STAMP = VENV / "ddltrace-clients.stamp"
CONSTRAINTS = ROOT / "constraints.txt"
PACKAGES = ("tracer", "analyzer", "dashboard", "experiments")
NATIVE_COVERAGE = ROOT / ".coverage-native"
NATIVE_COUNTERS = NATIVE_COVERAGE / "counters"
GENERATORS = (
    "docs/generate_cli_reference.py",
    "docs/generate_report_reference.py",
    "docs/generate_sql_reference.py",
    "docs/generate_api_reference.py",
    "docs/generate_module_list.py",
)
# Sphinx, with every warning an error: a link that leads nowhere, a page that no other leads to.
SITE = ("-m", "sphinx", "-q", "-W", "--keep-going", "-E", "-b", "html", "-c", "docs")
BUILT_SITE = ROOT / "build" / "site"
SCRIPTS = {
    "compare-outputs": ("-m", "support.compare_outputs"),
    "gpu-kit": ("benchmarks/make_gpu_kit.py",),
    "imports": ("-m", "support.import_graph"),
}

# Constraints for older Pythons pin older stubs, which declare other types.
TYPES_SINCE = (3, 11)

# Programs that some tests need -> the Debian package that provides them. Without a program its
# tests are skipped with the reason.
SYSTEM_TOOLS = {
    ("chromium", "chromium-browser", "google-chrome"): "chromium",
    ("node",): "nodejs",
    ("ip",): "iproute2",
    ("tc",): "iproute2",
    ("faketime",): "faketime",
    ("c++", "g++", "clang++"): "g++",
}


class SetupError(Exception):
    """The environment cannot be created; the message names the fix."""


def main() -> int:
    """Runs one task and returns its exit status."""
    arguments = parser().parse_args()
    # A shell's background job ignores Ctrl-C, and so would the jobs that the tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        make_environment()
        if arguments.task == "demo":
            return demo(serve=not arguments.no_dashboard)
        if arguments.task == "test":
            return test(
                without_separator(arguments.pytest_args),
                quick=arguments.quick,
                all_cases=arguments.all_cases,
                coverage=arguments.coverage,
            )
        if arguments.task in SCRIPTS:
            script = [*SCRIPTS[arguments.task], *getattr(arguments, "options", ())]
            return run([python(), *script], env={"PYTHONPATH": str(ROOT / "tests")})
        if arguments.task == "docs":
            return docs()
        say(f"ready: . {BIN.relative_to(ROOT) / 'activate'}")
        return 0
    except SetupError as error:
        print(f"dev.py: {error}", file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tasks = top.add_subparsers(dest="task", required=True)
    task = tasks.add_parser("demo", help="trace a two-rank training, show its report and dashboard")
    task.add_argument(
        "--no-dashboard", action="store_true", help="end after the report, without the dashboard"
    )
    task = tasks.add_parser("test", help="check format, lint and types, run the tests")
    task.add_argument(
        "--quick", action="store_true", help="format, lint and the unit tests only, on all cores"
    )
    task.add_argument(
        "--all",
        dest="all_cases",
        action="store_true",
        help="run every case of the long matrices instead of a random sample",
    )
    task.add_argument(
        "--coverage", action="store_true", help="print line coverage of Python and of C++"
    )
    task.add_argument(
        "pytest_args", nargs=argparse.REMAINDER, help="passed to pytest, as in: test -- -k clocks"
    )
    task = tasks.add_parser(
        "compare-outputs",
        help="show what differs between the outputs of a revision and those of the working tree",
        add_help=False,
    )
    task.add_argument("options", nargs=argparse.REMAINDER)
    task = tasks.add_parser(
        "gpu-kit",
        help="write a folder that installs, tests and measures ddltrace without network",
        add_help=False,
    )
    task.add_argument("options", nargs=argparse.REMAINDER)
    tasks.add_parser("setup", help="create or update the environment only")
    tasks.add_parser("docs", help="write the reference pages of docs/ and build the site from it")
    tasks.add_parser(
        "imports", help="print the longest chain of imports, circles, and what each command reaches"
    )
    return top


def without_separator(arguments: Sequence[str]) -> list[str]:
    """The arguments for pytest, without the `--` that precedes them."""
    return list(arguments[1:] if arguments[:1] == ["--"] else arguments)


# --- the environment -----------------------------------------------------------------------


def make_environment() -> None:
    """Creates `.venv` with the pinned versions, or updates it; does nothing if it is up to date.

    Raises:
        SetupError: Python is too old or lacks `venv`, or the installation failed.
    """
    wanted = fingerprint()
    if STAMP.is_file() and STAMP.read_text(encoding="utf-8") == wanted:
        return
    if not works([python(), "-m", "pip", "--version"]):
        say("creating the environment in .venv")
        require_ensurepip()
        if run([sys.executable, "-m", "venv", "--clear", VENV.name]) != 0:
            raise SetupError("the environment could not be created, see above")
    say("installing ddltrace and its dependencies (some minutes the first time)")
    STAMP.unlink(missing_ok=True)
    command = [python(), "-m", "pip", "install", "--disable-pip-version-check"]
    if not sys.stderr.isatty():
        command += ["--quiet", "--progress-bar", "off"]
    command += ["--constraint", CONSTRAINTS.name, "--editable", ".[all,test]"]
    if run(command) != 0:
        raise SetupError("the installation failed, see above; run the command again to continue")
    # pip compiles what it copies, but not an editable package, and Python may be told not to.
    run([python(), "-m", "compileall", "-q", "package-root", *PACKAGES])
    STAMP.write_text(wanted, encoding="utf-8")


def fingerprint() -> str:
    """A fingerprint of the environment's sources; if it differs, the environment is created
    again."""
    digest = hashlib.sha256()
    for part in (ROOT / "pyproject.toml", CONSTRAINTS):
        digest.update(part.read_bytes())
    # The console scripts hold the environment's path: a moved clone needs a new one.
    return f"{digest.hexdigest()} {sys.implementation.cache_tag} {ROOT}\n"


def require_ensurepip() -> None:
    """Makes `python -m venv` available, which Debian has in a separate package.

    Raises:
        SetupError: It is not available and cannot be installed by this process.
    """
    if importlib.util.find_spec("ensurepip") is not None:
        return
    package = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
    if not apt_install([package]):
        raise SetupError(
            f"this Python cannot make environments; as root: apt-get install {package}"
        )


def apt_install(packages: Sequence[str]) -> bool:
    """Installs Debian packages if possible: as root, with apt-get.

    Returns:
        Whether they are installed now.
    """
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0:
        return False
    options = ["-q", "-y", "-o", "Acquire::http::Timeout=20", "-o", "DPkg::Lock::Timeout=120"]
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    if run([apt, "update", *options], env=quiet) != 0:
        say("apt-get update failed, using the existing lists")
    return run([apt, "install", *options, "--no-install-recommends", *packages], env=quiet) == 0


# --- the tasks -----------------------------------------------------------------------------


def demo(*, serve: bool) -> int:
    """Traces a real training job of two ranks, prints the report, and serves the dashboard.

    Args:
        serve: Whether to end in the dashboard, which runs until it is interrupted.
    """
    trace = new_directory(ROOT / "ddltrace-trace-demo").relative_to(ROOT)
    ddltrace = str(BIN / "ddltrace")
    job = ["torchrun", "--nproc-per-node", "2", "docs/examples/train_digits.py"]
    say("1/3 tracing a two-rank DistributedDataParallel training on the CPU")
    # torchrun would set the same, with a warning of four lines.
    one_thread = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    status = run([ddltrace, "run", "-o", str(trace), "--", *job], env=one_thread)
    if status != 0:
        return status
    say("2/3 analyzing the trace")
    status = run([ddltrace, "analyze", str(trace), "--html", str(trace / "report.html")])
    if status != 0 or not serve:
        return status
    say("3/3 serving the dashboard, until Ctrl-C")
    command = [ddltrace, "dashboard", str(trace)]
    announce(command)
    # Replaces this process, so that signals reach the dashboard and its status is returned.
    os.chdir(ROOT)
    os.execve(ddltrace, command, environment())


def test(
    pytest_args: Sequence[str],
    *,
    quick: bool,
    all_cases: bool,
    coverage: bool,
) -> int:
    """Checks format, lint and types, then runs the tests; pytest's summary is the last line.

    All tests run in one pytest on all cores, each file on one of them, in the order that
    tests/conftest.py gives.

    Args:
        pytest_args: Passed to pytest.
        quick: Run format, lint and the unit tests only.
        all_cases: Run every case of the matrices that are sampled otherwise.
        coverage: Also print the line coverage of Python and of C++.

    Returns:
        0 if everything passed, 1 or pytest's own status otherwise.
    """
    ruff = str(BIN / "ruff")
    checks = {
        "format": [ruff, "format", "--check", "."],
        "lint": [ruff, "check", "."],
    }
    failed = [name for name, command in checks.items() if step(name, command) != 0]
    if not quick:
        install_system_tools()
        if not install_clients():
            failed.append("installation of the clients")
        if lint_javascript() != 0:
            failed.append("JavaScript lint")
        if check_all_types() != 0:
            failed.append("types")
    say("tests")
    options = ["-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder"]
    if quick:
        options += ["tests/unit"]
    if all_cases:
        options += ["--all-cases"]
    elif not pytest_args:  # of what was asked for, everything
        options += ["--some-long"]
    if coverage:
        options += ["--cov", "--cov-report=term"]
    env = instrumented() if coverage else {}
    status = run([python(), "-m", "pytest", *options, *pytest_args], env=env)
    if coverage:
        report_native_coverage()
    if failed:  # last, where it is visible
        say(f"failed: {', '.join(failed)}, see above the tests")
    return status or int(bool(failed))


def docs() -> int:
    """Writes the reference pages of ``docs/``, then builds the site; a warning is an error.

    Returns:
        0 if everything was written, the status of what failed otherwise.
    """
    for script in GENERATORS:
        if (status := run([python(), script])) != 0:
            return status
    status = run([python(), *SITE, str(ROOT), str(BUILT_SITE)])
    if status == 0:
        say(f"the site: {BUILT_SITE.relative_to(ROOT) / 'index.html'}")
    return status


def instrumented() -> dict[str, str]:
    """Environment variables under which the tests compile the C++ sources with line counters.

    A compiler of the same name, first in PATH, adds the flags. A process that ends adds its
    counters to the files; one that is killed writes none.
    """
    shutil.rmtree(NATIVE_COVERAGE, ignore_errors=True)
    compiler = shutil.which("c++")
    if compiler is None:
        return {}
    programs, cache = NATIVE_COVERAGE / "bin", NATIVE_COVERAGE / "cache"
    for folder in (programs, cache, NATIVE_COUNTERS):
        folder.mkdir(parents=True)
    wrapper = programs / "c++"
    flags = f"-O0 --coverage -dumpdir {shlex.quote(str(NATIVE_COUNTERS))}/"
    wrapper.write_text(f'#!/bin/sh\nexec {compiler} "$@" {flags}\n', encoding="utf-8")
    wrapper.chmod(0o755)
    path = os.pathsep.join([str(BIN), str(programs), os.environ.get("PATH", os.defpath)])
    return {"PATH": path, "XDG_CACHE_HOME": str(cache)}


def report_native_coverage() -> None:
    """Prints the share of C++ lines that the tests ran, by source file."""
    gcov = shutil.which("gcov")
    counters = sorted(map(str, NATIVE_COUNTERS.glob("*.gcda")))
    if gcov is None or not counters:
        say(f"coverage of C++: {'gcov is not installed' if gcov is None else 'no process ran it'}")
        return
    done = subprocess.run(
        [gcov, "--no-output", *counters], capture_output=True, text=True, check=False
    )
    say("coverage of C++")
    lines = done.stdout.splitlines()
    for name, covered in itertools.pairwise(lines):
        source = Path(name.removeprefix("File ").strip("'"))
        if source.parent.name == "native":
            print(f"{source.name:24} {covered}")


def install_clients() -> bool:
    """Installs the libraries of the extra `clients`, and HTA, each of which one test runs.

    Returns:
        Whether they are installed.
    """
    wanted = fingerprint()
    if CLIENTS_STAMP.is_file() and CLIENTS_STAMP.read_text(encoding="utf-8") == wanted:
        return True
    say("installing the libraries whose jobs the tests trace (the first time only)")
    command = [python(), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    command += ["--progress-bar", "off", "--constraint", CONSTRAINTS.name]
    # DeepSpeed is built from source: without its compiled operations, for the CPU.
    env = {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
    if run([*command, "--editable", ".[all,test,clients]"], env=env) != 0:
        return False
    # HTA declares JupyterLab, which its analyses do not import; what they import is installed.
    if run([*command, "--no-deps", "HolisticTraceAnalysis"]) != 0:
        return False
    CLIENTS_STAMP.write_text(wanted, encoding="utf-8")
    return True


def lint_javascript() -> int:
    """Runs Biome over the JavaScript; it comes from npm, pinned in package.json."""
    say("JavaScript lint")
    npm = shutil.which("npm")
    if npm is None:
        print("skipped: npm is not installed")
        return 0
    biome = ROOT / "node_modules" / ".bin" / "biome"
    pins, installed = ROOT / "package.json", ROOT / "node_modules" / ".package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < pins.stat().st_mtime:
        # Without a lock file: one made here lacks Biome's binaries for other platforms.
        options = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-package-lock"]
        if run([npm, "install", *options]) != 0:
            print("skipped: Biome could not be installed")
            return 0
        installed.touch()
    return run([str(biome), "lint", "--error-on-warnings"])


def install_system_tools() -> None:
    """Installs the programs that some tests need, where this process may do so."""
    search = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    missing = {
        package
        for names, package in SYSTEM_TOOLS.items()
        if not any(shutil.which(name, path=search) for name in names)
    }
    if missing and not apt_install(sorted(missing)):
        say(
            f"missing: {', '.join(sorted(missing))}; the tests that need it will skip "
            f"(as root: apt-get install {' '.join(sorted(missing))})"
        )


def check_all_types() -> int:
    """Runs mypy over everything: two processes at the same time, each of which uses one core."""
    with ThreadPoolExecutor(2) as pool:
        checks = [pool.submit(check) for check in (check_types, check_test_types)]
    return max(check.result() for check in checks)


def check_types() -> int:
    """Runs mypy over the package and the scripts, under the strict rules of pyproject.toml."""
    return run_mypy("types", ROOT / "pyproject.toml")


def check_test_types() -> int:
    """Runs mypy over the tests and the benchmarks, under the rules of tests/mypy.ini."""
    return run_mypy("types of tests and benchmarks", ROOT / "tests" / "mypy.ini")


def run_mypy(name: str, config: Path) -> int:
    """Runs mypy over the files that its configuration names; returns its exit status."""
    if sys.version_info[:2] < TYPES_SINCE:
        say(f"{name}: skipped; the libraries for this Python are too old, take a newer one")
        return 0
    cache = ROOT / ".mypy_cache" / config.parent.name
    command = [str(BIN / "mypy"), "--config-file", str(config), "--cache-dir", str(cache)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), check=False, capture_output=True, text=True
    )
    # At once: another check may be running.
    shown = f"$ mypy --config-file {config.relative_to(ROOT)}"
    say(f"{name}\n{shown}\n{done.stdout}{done.stderr}".rstrip())
    return done.returncode


def new_directory(wanted: Path) -> Path:
    """The first of NAME, NAME-2, NAME-3, ... that does not exist."""
    number, candidate = 1, wanted
    while candidate.exists():
        number += 1
        candidate = wanted.with_name(f"{wanted.name}-{number}")
    return candidate


# --- running things ------------------------------------------------------------------------


def python() -> str:
    """The environment's interpreter."""
    return str(BIN / "python")


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment variables, with the environment's programs found first."""
    path = os.pathsep.join([str(BIN), os.environ.get("PATH", os.defpath)])
    return {**os.environ, "PATH": path, "VIRTUAL_ENV": str(VENV), **(extra or {})}


def works(command: Sequence[str]) -> bool:
    """Whether a command exists and succeeds; its output is not shown."""
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def step(name: str, command: Sequence[str], *, cwd: Path = ROOT) -> int:
    """Runs one check under its name."""
    say(name)
    return run(command, cwd=cwd)


def run(command: Sequence[str], *, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> int:
    """Runs a command to its end and returns its exit status; 128 + n when signal n killed it."""
    announce(command)
    with subprocess.Popen(command, cwd=cwd, env=environment(env)) as process:
        former = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            while True:
                try:
                    status = process.wait()
                    break
                except KeyboardInterrupt:
                    # Ctrl-C has reached the child, too: wait for its end.
                    continue
        finally:
            signal.signal(signal.SIGTERM, former)
    return status if status >= 0 else 128 - status


def announce(command: Sequence[str]) -> None:
    """Shows a command as it could be typed at the top level of the repository."""
    shown = [part.replace(f"{BIN}{os.sep}", ".venv/bin/") for part in command]
    print(f"$ {shlex.join(shown)}", flush=True)


def say(text: str) -> None:
    """Prints one line of progress."""
    print(f"\n== {text}", flush=True)


if __name__ == "__main__":
    if sys.version_info < (3, 10):  # noqa: UP036 - run by whatever python3 is
        sys.exit(f"dev.py needs Python 3.10 or newer, this is {platform.python_version()}")
    sys.exit(main())
