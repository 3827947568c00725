# SPDX-License-Identifier: Apache-2.0
"""Builds the native module with CMake.

pyproject.toml has everything else about the package.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
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

# The build requirements install these tools; the full paths work even if the environment's bin
# folder is not on PATH.
CMAKE = str(Path(cmake.CMAKE_BIN_DIR, "cmake"))
NINJA = str(Path(ninja.BIN_DIR, "ninja"))

# From CPython 3.12 on nanobind supports the stable ABI, so one wheel works for all later versions.
STABLE_ABI = sys.version_info >= (3, 12) and not sysconfig.get_config_var("Py_GIL_DISABLED")


class CMakeBuild(build_ext):
    """Configures, builds and installs the CMake project at the root of the source tree."""

    # True if Python will import the source tree: for an editable install, or --inplace.
    in_tree = False

    def run(self) -> None:
        # The base class overwrites `inplace` during the build, which always writes to the staging
        # folder.
        self.in_tree = bool(self.inplace)
        super().run()
        if os.environ.get("RINGCOMM_BUILD_BACKEND", "0") != "0":
            self.build_backend(ROOT if self.in_tree else Path(self.build_lib).resolve())

    def build_backend(self, root: Path) -> None:
        """Compiles the C++ backend of torch.distributed into the package below ``root``."""
        if importlib.util.find_spec("torch") is None:
            raise SystemExit(
                "RINGCOMM_BUILD_BACKEND compiles against the torch of this environment, but torch "
                "is not installed: install it first, and pass --no-build-isolation to pip"
            )
        self.call([sys.executable, "-m", "ringcomm", "build-backend"], root)

    def build_extension(self, ext: Extension) -> None:
        # The prefix is the staging folder that holds ringcomm/: a wheel is built from it, and an
        # editable install copies the module from it.
        prefix = Path(self.get_ext_fullpath(ext.name)).resolve().parent.parent
        # One build folder per interpreter, kept between calls, so that a second build compiles only
        # changed files.
        build_dir = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
        configure = [
            *(CMAKE, "-S", str(ROOT), "-B", str(build_dir), "-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={NINJA}",
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dnanobind_DIR={nanobind.cmake_dir()}",
            # In the source tree the CUDA sources are compiled at first use, only for the GPU of
            # this machine.
            f"-DRINGCOMM_CUDA={'OFF' if self.in_tree else 'native'}",
            f"-DRINGCOMM_BUNDLE_SOURCES={'OFF' if self.in_tree else 'ON'}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        build = [CMAKE, "--build", str(build_dir)]
        if self.parallel:
            build += ["--parallel", str(self.parallel)]
        self.call(configure)
        self.call(build)
        install = [CMAKE, "--install", str(build_dir), "--component"]
        self.call([*install, "native", "--prefix", str(prefix)])
        kernels_prefix = ROOT if self.in_tree else prefix
        # Remove the kernels of an earlier build, which may have had other options.
        shutil.rmtree(kernels_prefix / "ringcomm" / "_kernels", ignore_errors=True)
        self.call([*install, "kernels", "--prefix", str(kernels_prefix)])

    def call(self, command: list[str], folder: Path = ROOT) -> None:
        # Remove MAKEFLAGS: under make, Ninja would try to use make's job server, which pip does not
        # pass on, and would print a warning.
        environment = {name: word for name, word in os.environ.items() if name != "MAKEFLAGS"}
        subprocess.run(command, check=True, env=environment, cwd=folder)


setup(
    # ringcomm/_tl and ringcomm/bench are links to kernels/tl and bench; find_packages follows
    # links.
    packages=find_packages(str(ROOT), include=["ringcomm", "ringcomm.*"]),
    ext_modules=[Extension("ringcomm._native", sources=[], py_limited_api=STABLE_ABI)],
    options={"bdist_wheel": {"py_limited_api": "cp312"}} if STABLE_ABI else {},
    cmdclass={"build_ext": CMakeBuild},
)
