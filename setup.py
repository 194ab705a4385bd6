"""Compiles NCCL's profiler plugin into wheels; everything else is in `pyproject.toml`.

The plugin is a plain shared library without Python's interface, so a wheel with it fits every
Python of its platform. Without a C compiler the wheel has no plugin, and the plugin is compiled on
the user's machine.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

_PLACE = Path("ddltrace", "tracer", "nccl")


def _compile_plugin() -> Any:
    path = Path(__file__).resolve().parent / "tracer" / "nccl" / "compile_plugin.py"
    spec = importlib.util.spec_from_file_location("compile_plugin", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildWithPlugin(build_py):
    """Copies the modules, and compiles the plugin beside them."""

    def run(self) -> None:
        """Builds; an editable install compiles the plugin when it is needed."""
        super().run()
        plugin = _compile_plugin()
        compiler = plugin.compiler()
        if self.editable_mode or compiler is None or sys.platform != "linux":
            return
        library = Path(self.build_lib) / _PLACE / plugin.LIBRARY
        if (reason := plugin.compile_plugin(compiler, library)) is not None:
            print(f"without NCCL's profiler plugin: {reason}", file=sys.stderr)


class WheelOfPlatform(bdist_wheel):
    """Tags a wheel that contains the plugin as one of this platform."""

    def get_tag(self) -> tuple[str, str, str]:
        """The tag for any Python, of this platform if the plugin was compiled."""
        if not any((Path(self.bdist_dir) / _PLACE).glob("*.so")):
            return "py3", "none", "any"
        platform = self.plat_name or sysconfig.get_platform()
        return "py3", "none", platform.replace("-", "_").replace(".", "_")


setup(cmdclass={"build_py": BuildWithPlugin, "bdist_wheel": WheelOfPlatform})
