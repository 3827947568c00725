"""Compiles, finds and loads the C++ backend of ``torch.distributed``.

A process group in Python serves a group of torch as a whole. A ``c10d::Backend`` serves some of its
devices beside other backends, and only C++ can have a subclass of it. The backend binds to one
Python and one torch, unlike the native module, so a command builds it. The name of the library says
for what and of which sources it was built. No other library is loaded.
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

_MODULE = "_backend"  # PyInit_ of the library
_SOURCE = "kernels/c10d/backend.cpp"
_SOURCES = (_SOURCE, "kernels/c10d/direct_calls.h")
_OPTIONS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")
_LIBRARIES = ("-lc10", "-ltorch_cpu", "-ltorch_python")
_LOG_LINES = 30


def is_asked_for() -> bool:
    """True if groups of ringcomm alone are to use the C++ backend, too.

    Raises:
        ArgumentError: ``RINGCOMM_BACKEND`` has another value than ``native`` or ``python``.
    """
    asked = os.environ.get(BACKEND_VARIABLE, "") or "python"
    if asked not in ("native", "python"):
        raise ArgumentError(f"{BACKEND_VARIABLE}: expected native or python, got {asked!r}")
    return asked == "native"


def _file_name() -> str:
    """The name of the library for this Python, this torch and these sources."""
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
    """The built library for this Python, this torch and these sources; None: it is not built."""
    try:
        name = _file_name()
    except (OSError, UnsupportedError):
        return None  # a package without its sources
    beside = _package() / name
    if beside.is_file():
        return beside
    cached = default_folder()
    if cached is None or not (cached / name).is_file() or KernelCache(cached).why_unusable():
        return None
    return cached / name


def describe() -> str:
    """Says where the library is, and which groups use it.

    Raises:
        ArgumentError: ``RINGCOMM_BACKEND`` has no valid value.
        UnsupportedError: ``RINGCOMM_BACKEND`` asks for the library, which is not built.
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
    """The class of the C++ backend.

    Args:
        what: needs it; begins the error.
        instead: what else the user may do; ends the error.

    Raises:
        UnsupportedError: it is not built for this Python, this torch and these sources.
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
        force: compiles in any case.

    Raises:
        UnsupportedError: there is no compiler, a header or a folder is missing, or it does not
            compile; has the beginning of the compiler's log.
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
        fcntl.flock(lock, fcntl.LOCK_EX)  # ranks may start at once
        if force or not (folder / name).is_file():
            _compile(compiler, headers, folder / name)
    finally:
        os.close(lock)
    return folder / name


def _headers() -> list[Path]:
    """The folders of headers of Python and torch."""
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
    """The folder of the library, which exists and is writable."""
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
            older.unlink()  # of earlier sources; whoever has loaded it keeps it
