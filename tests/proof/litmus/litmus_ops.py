# SPDX-License-Identifier: Apache-2.0
"""The operations of litmus tests, named as in kernels/include/ringcomm/core/atomics.h.

Waits block, so no program needs to loop.
"""

from __future__ import annotations

from dataclasses import dataclass

Location = str


@dataclass(frozen=True)
class Op:
    """One operation of a program, made by one of the functions below."""

    kind: str
    location: Location = ""
    value: int = 0
    order: str = "relaxed"
    register: str = ""


def load_acquire_sys(register: str, location: Location) -> Op:
    return Op("load", location, order="acquire", register=register)


def load_relaxed_sys(register: str, location: Location) -> Op:
    return Op("load", location, register=register)


def store_release_sys(location: Location, value: int) -> Op:
    return Op("store", location, value, "release")


def store_relaxed_sys(location: Location, value: int) -> Op:
    return Op("store", location, value)


def exchange_acq_rel_sys(register: str, location: Location, value: int) -> Op:
    return Op("exchange", location, value, "acq_rel", register)


def exchange_relaxed(register: str, location: Location, value: int) -> Op:
    """For mutants: an exchange that no header defines."""
    return Op("exchange", location, value, "relaxed", register)


def fence_seq_cst_sys() -> Op:
    return Op("fence", order="seq_cst")


def fence_acq_rel_sys() -> Op:
    return Op("fence", order="acq_rel")


def await_acquire(location: Location, at_least: int) -> Op:
    """Polls with acquire until the word has reached ``at_least``."""
    return Op("wait", location, at_least, "acquire")


def await_relaxed(location: Location, at_least: int) -> Op:
    """Polls without order until the word has reached ``at_least``."""
    return Op("wait", location, at_least)


def read(register: str, location: Location) -> Op:
    """A non-atomic load of data."""
    return Op("read", location, register=register)


def write(location: Location, value: int) -> Op:
    """A non-atomic store of data."""
    return Op("write", location, value)


def peek(register: str, location: Location) -> Op:
    """A load of data that may change meanwhile, by a reader that checks afterwards."""
    return load_relaxed_sys(register, location)


def futex_wait(location: Location, seen: int) -> Op:
    """Sleeps until woken if the word equals ``seen``, which the kernel checks under a lock."""
    return Op("sleep", location, seen)


def futex_wake(location: Location) -> Op:
    return Op("wake", location)


def only_if(register: str, value: int) -> Op:
    """Ends the program here unless the register holds ``value``."""
    return Op("only_if", value=value, register=register)
