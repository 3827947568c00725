# SPDX-License-Identifier: Apache-2.0
"""Compiles, finds and loads the C++ backend of ``torch.distributed``.

A process group in Python can only serve a whole group of torch. A ``c10d::Backend`` serves some of
a group's devices while other backends serve the other devices, but only C++ can subclass it. Unlike
the native module, the C++ backend depends on the versions of Python and torch, so a command builds
it for the user. The library's name has a hash of versions and sources; no other library is loaded.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ringcomm.cuda.build import KernelCache, default_folder
from ringcomm.cuda.units import source_root
from ringcomm.errors import ArgumentError, UnsupportedError

__all__ = ["BACKEND_VARIABLE", "build", "describe", "find", "is_asked_for", "load"]

COMMAND = "ringcomm build-backend"
BACKEND_VARIABLE = "RINGCOMM_BACKEND"

_MODULE = "_backend"  # the library exports PyInit_<this name>
_SOURCE = "kernels/c10d/backend.cpp"
_SOURCES = (_SOURCE, "kernels/c10d/direct_calls.h")
_OPTIONS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")
_LIBRARIES = ("-lc10", "-ltorch_cpu", "-ltorch_python")
_LOG_LINES = 30


def is_asked_for() -> bool:
    """True if groups that only ringcomm serves must also use the C++ backend.

    Raises:
        ArgumentError: ``RINGCOMM_BACKEND`` has another value than ``native`` or ``python``.
    """
    asked = os.environ.get(BACKEND_VARIABLE, "") or "python"
    if asked not in ("native", "python"):
        raise ArgumentError(f"{BACKEND_VARIABLE}: expected native or python, got {asked!r}")
    return asked == "native"


def _file_name() -> str:
    """Returns the library's file name for this Python, this torch and these sources."""
    root = source_root()
    torch_of = (torch.__version__, str(torch.version.git_version))
    python_of = f"{sys.implementation.cache_tag}{getattr(sys, 'abiflags', '')}"
    digest = hashlib.sha256("\0".join([*torch_of, python_of, *_OPTIONS]).encode())
    for name in _SOURCES:
        digest.update((root / name).read_bytes())
    return f"{_MODULE}.torch{torch.__version__}.{python_of}.{digest.hexdigest()[:16]}.so"


def _package() -> Path:
    return Path(__file__).resolve().parent.parent


def find() -> Path | None:
    """Returns the built library for this Python, torch and these sources, or None."""
    try:
        name = _file_name()
    except (OSError, UnsupportedError):
        return None  # the package was installed without its sources
    beside = _package() / name
    if beside.is_file():
        return beside
    cached = default_folder()
    if cached is None or not (cached / name).is_file() or KernelCache(cached).why_unusable():
        return None
    return cached / name


def describe() -> str:
    """Returns a text: where the library is, and which groups use it.

    Raises:
        ArgumentError: ``RINGCOMM_BACKEND`` has no valid value.
        UnsupportedError: ``RINGCOMM_BACKEND`` requires the library, which is not built.
    """
    is_native = is_asked_for()
    path = find()
    if path is None and is_native:
        load(f"{BACKEND_VARIABLE}=native")
    if path is None:
        return f"not built; a group that ringcomm shares with another backend needs `{COMMAND}`"
    users = "all groups" if is_native else "groups that ringcomm shares with another backend"
    return f"{path}, for {users}"


@cache
def _loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"ringcomm.{_MODULE}", path)
    assert spec is not None and spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise UnsupportedError(
            f"{path}: this build of the C++ backend cannot be loaded: {error}. Build it again with "
            f"`{COMMAND} --force`"
        ) from error
    return module


def load(what: str, instead: str = "or leave that variable unset") -> Any:
    """Returns the class of the C++ backend.

    Args:
        what: the feature that needs the backend, for the error's beginning.
        instead: an alternative for the user, for the error's end.

    Raises:
        UnsupportedError: the backend is not built for this Python, this torch and these sources.
    """
    path = find()
    if path is None:
        raise UnsupportedError(
            f"{what} needs the C++ backend of ringcomm, which is not built for torch "
            f"{torch.__version__} in this Python: run `{COMMAND}`, {instead}"
        )
    return _loaded(path).Backend


def build(force: bool = False) -> Path:
    """Compiles the backend if it is not built yet, and returns the path of the library.

    The library goes into the package, or into the user's cache if the package is not writable.

    Args:
        force: compile even if it is built.

    Raises:
        UnsupportedError: there is no compiler, a header or a folder is missing, or compilation
            fails (with the beginning of the compiler's log).
    """
    found = find()
    if found is not None and not force:
        return found
    compiler = os.environ.get("CXX") or next(
        (path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None
    )
    if compiler is None:
        raise UnsupportedError(
            "the C++ backend: expected a C++20 compiler, found none: install g++ or clang++, or "
            "set CXX"
        )
    headers = _headers()
    folder = _folder()
    name = _file_name()
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several ranks may build at the same time
        if force or not (folder / name).is_file():
            _compile(compiler, headers, folder / name)
    finally:
        os.close(lock)
    return folder / name


def _headers() -> list[Path]:
    """Returns the header folders of Python and torch."""
    python = Path(sysconfig.get_path("include"))
    of_torch = Path(torch.__file__).resolve().parent / "include"
    for folder, header, remedy in (
        (python, "Python.h", "install the headers of this Python (python3-dev)"),
        (of_torch, "torch/csrc/distributed/c10d/Backend.hpp", "install a torch that has them"),
    ):
        if not (folder / header).is_file():
            raise UnsupportedError(
                f"the C++ backend: expected {header} in {folder}, found none: {remedy}"
            )
    return [of_torch, python]


def _folder() -> Path:
    """Returns a writable folder for the library; makes it if necessary."""
    package = _package()
    if os.access(package, os.W_OK):
        return package
    cached = default_folder()
    reason = KernelCache(cached).why_unusable()
    if cached is None or reason:
        raise UnsupportedError(
            f"the C++ backend: expected a folder for it, but {package} is not writable and "
            f"{cached} cannot be used: {reason}. Set RINGCOMM_CACHE_DIR to a folder of yours"
        )
    return cached


def _compile(compiler: str, headers: list[Path], target: Path) -> None:
    root = source_root()
    unfinished = target.with_suffix(f".{os.getpid()}")
    libraries = Path(torch.__file__).resolve().parent / "lib"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    command = [
        *(compiler, *_OPTIONS, abi, f"-I{root}", *(f"-isystem{folder}" for folder in headers)),
        *(str(root / _SOURCE), "-o", str(unfinished), f"-L{libraries}", *_LIBRARIES),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise UnsupportedError(
                "\n".join(
                    [
                        f"the C++ backend does not compile with {compiler}:",
                        *done.stderr.splitlines()[:_LOG_LINES],
                    ]
                )
            )
        unfinished.rename(target)
    except OSError as error:
        raise UnsupportedError(f"the C++ backend: {compiler} does not run: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)
    of_others = target.name.rpartition(".")[0].rpartition(".")[0]
    for older in target.parent.glob(f"{of_others}.*.so"):
        if older != target:
            older.unlink()  # an earlier library; processes that have loaded it are unaffected
