"""NVRTC, the CUDA compiler that is a library, through CuPy. Compiling needs no driver.

CuPy is imported at first use, never before: ``import ringcomm`` works without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ringcomm.errors import UnsupportedError

_LOG_LINES = 12
_ADVICE = (
    "Install what is missing (pip install ringcomm[cuda13] nvidia-cuda-nvrtc), or install ringcomm "
    "where nvcc is on the PATH, which compiles the kernels beforehand"
)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip()


class Nvrtc:
    """The NVRTC that CuPy finds.

    Attributes:
        identity: version and build; another identity may make other machine code.

    Raises:
        UnsupportedError: there is no CuPy, or it finds no NVRTC; says which, and why.
    """

    def __init__(self) -> None:
        try:
            from cupy_backends.cuda.libs import nvrtc
        except Exception as error:  # A broken installation fails in many ways, all with one remedy.
            raise UnsupportedError(
                "CUDA kernels: none are compiled for this device, and compiling them needs CuPy, "
                f"which cannot be imported: {_words(error)}. {_ADVICE}"
            ) from error
        self._nvrtc: Any = nvrtc
        try:
            version = ".".join(map(str, nvrtc.getVersion()))
            # The version has no patch number. What NVRTC writes atop its PTX names the build.
            head = self.compile("", "identity.cu", {}, ("-arch=compute_90",))
        except UnsupportedError:
            raise
        except Exception as error:
            raise UnsupportedError(
                "CUDA kernels: none are compiled for this device, and CuPy finds no NVRTC to "
                f"compile them: {_words(error)}. {_ADVICE}"
            ) from error
        builds = [line[2:].strip() for line in head.decode().splitlines() if "Build ID" in line]
        self.identity = " ".join(["NVRTC", version, *builds])

    def architectures(self) -> Sequence[int]:
        """Those that it makes machine code for: 80, 90, ..."""
        return tuple(self._nvrtc.getSupportedArchs())

    def compile(
        self, text: str, name: str, headers: Mapping[str, str], options: Sequence[str]
    ) -> bytes:
        """Machine code, or PTX where ``options`` name a ``compute_`` architecture.

        Args:
            text: the source.
            name: what the compiler calls it in messages.
            headers: texts by the names that ``#include`` gives them; no others are found.
            options: of the compiler, with one ``-arch=``.

        Raises:
            UnsupportedError: it does not compile; has the beginning of the compiler's log.
        """
        nvrtc = self._nvrtc
        texts = tuple(header.encode() for header in headers.values())
        program = nvrtc.createProgram(text, name, texts, tuple(map(str.encode, headers)))
        try:
            try:
                nvrtc.compileProgram(program, tuple(options))
            except nvrtc.NVRTCError as error:
                log = nvrtc.getProgramLog(program).rstrip("\0\n").splitlines()
                head = f"CUDA kernels: {name} does not compile with {' '.join(options)}: {error}"
                raise UnsupportedError("\n".join([head, *log[:_LOG_LINES]])) from error
            as_ptx = any(option.startswith("-arch=compute_") for option in options)
            result: bytes = nvrtc.getPTX(program) if as_ptx else nvrtc.getCUBIN(program)
            return result
        finally:
            nvrtc.destroyProgram(program)
