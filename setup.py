"""Builds the native module with CMake and maps the source tree onto the installed packages.

Everything else about the package stands in pyproject.toml.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import cmake
import nanobind
import ninja
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent

# The tools that the build requirements installed: they are found although the environment's
# bin folder need not be on PATH.
CMAKE = str(Path(cmake.CMAKE_BIN_DIR, "cmake"))
NINJA = str(Path(ninja.BIN_DIR, "ninja"))

# nanobind keeps to the stable ABI from CPython 3.12 on, so one wheel serves all later versions.
STABLE_ABI = sys.version_info >= (3, 12) and not sysconfig.get_config_var("Py_GIL_DISABLED")

# Packages that live outside ringcomm/ in the source tree.
MAPPED = {"ringcomm._bench": "bench"}


def all_packages() -> list[str]:
    """Dotted names of all packages to install."""
    names = find_packages(str(ROOT), include=["ringcomm", "ringcomm.*"])
    for package, folder in MAPPED.items():
        names.append(package)
        names += [f"{package}.{name}" for name in find_packages(str(ROOT / folder))]
    return names


class CMakeBuild(build_ext):
    """Configures, builds and installs the CMake project at the root of the source tree."""

    def build_extension(self, ext: Extension) -> None:
        # The prefix is the folder that holds ringcomm/: the source tree for an editable
        # install, the staging folder for a wheel.
        prefix = Path(self.get_ext_fullpath(ext.name)).resolve().parent.parent
        # One build folder per interpreter, kept between calls, so that a second build compiles
        # only what changed.
        build_dir = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
        configure = [
            *(CMAKE, "-S", str(ROOT), "-B", str(build_dir), "-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={NINJA}",
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dnanobind_DIR={nanobind.cmake_dir()}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        build = [CMAKE, "--build", str(build_dir)]
        if self.parallel:
            build += ["--parallel", str(self.parallel)]
        self.call(configure)
        self.call(build)
        self.call([CMAKE, "--install", str(build_dir), "--prefix", str(prefix)])

    def call(self, command: list[str]) -> None:
        subprocess.run(command, check=True)


setup(
    packages=all_packages(),
    package_dir={"ringcomm": "ringcomm", **MAPPED},
    ext_modules=[Extension("ringcomm._native", sources=[], py_limited_api=STABLE_ABI)],
    options={"bdist_wheel": {"py_limited_api": "cp312"}} if STABLE_ABI else {},
    cmdclass={"build_ext": CMakeBuild},
)
