"""Virtual environments that hold ddltrace and only some of the installed packages.

Nothing is downloaded: the environment links to packages that are installed here, chosen by
walking their requirements as pip does.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]


def project() -> dict[str, Any]:
    """The table ``project`` of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def make_slim_environment(path: Path, requirements: Iterable[str]) -> Path:
    """Makes an environment with ddltrace and the closure of some requirements.

    Args:
        path: The folder to make.
        requirements: As in pyproject.toml, such as ``click>=8.1``.

    Returns:
        The environment's interpreter.
    """
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(path)], check=True, timeout=120
    )
    variables = {"base": str(path), "platbase": str(path)}
    packages = Path(sysconfig.get_path("purelib", "venv", vars=variables))
    for name in {"ddltrace", *_closure(requirements)}:
        distribution = _installed(name)
        tops = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
        for top in tops:
            link = packages / top
            if not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(top))))
    return path / "bin" / "python"


def _installed(name: str) -> metadata.Distribution:
    """An installed distribution; metadata that a build left in the working directory is not."""
    installed = [path for path in sys.path if path.endswith("-packages")]
    return next(iter(metadata.distributions(name=name, path=installed)))


def _closure(requirements: Iterable[str]) -> set[str]:
    """The names of all distributions that some requirements bring along here."""
    found: set[str] = set()
    waiting = [Requirement(line) for line in requirements]
    while waiting:
        requirement = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = canonicalize_name(requirement.name)
        if name not in found:
            found.add(name)
            waiting += [Requirement(line) for line in _installed(name).requires or ()]
    return found
