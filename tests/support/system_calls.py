# SPDX-License-Identifier: Apache-2.0
"""Makes the kernel refuse system calls of this process, as a container's seccomp(2) filter does."""

import ctypes
import errno
import os
import platform

# By machine type, the number of each call.
NUMBERS = {
    "x86_64": {"mbind": 237, "set_mempolicy": 238, "process_vm_readv": 310},
    "aarch64": {"mbind": 235, "set_mempolicy": 237, "process_vm_readv": 270},
}.get(platform.machine(), {})
LIBC = ctypes.CDLL(None, use_errno=True)


class _Filter(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_ushort),
        ("jump_true", ctypes.c_ubyte),
        ("jump_false", ctypes.c_ubyte),
        ("k", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.POINTER(_Filter)))


def forbid(name: str, error: int = errno.EPERM, first_argument: int | None = None) -> None:
    """From now on the kernel refuses this process a system call.

    Args:
        name: of the call, one of ``NUMBERS``.
        error: the errno of refused calls.
        first_argument: only calls with this first argument are refused; None: all.
    """
    load, equal, answer = 0x20, 0x15, 0x06  # BPF_LD | BPF_W | BPF_ABS and so on
    argument = 0 if first_argument is None else first_argument
    steps = [
        (load, 0, 0, 0),  # loads the number of the call
        (equal, 0, 3, NUMBERS[name]),
        (load, 0, 0, 16),  # its first argument
        (equal, 0, 1 if first_argument is not None else 0, argument),
        (answer, 0, 0, 0x00050000 | error),  # SECCOMP_RET_ERRNO
        (answer, 0, 0, 0x7FFF0000),  # SECCOMP_RET_ALLOW
    ]
    filters = (_Filter * len(steps))(*(_Filter(*step) for step in steps))
    program = _Program(len(steps), filters)
    assert LIBC.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert LIBC.prctl(22, 2, ctypes.byref(program), 0, 0) == 0, os.strerror(ctypes.get_errno())
