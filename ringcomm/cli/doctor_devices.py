"""What ``ringcomm doctor`` says of GPUs. A machine without one is as good as any."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ringcomm.cli.doctor_checks import NOTE, OK, Finding, gib
from ringcomm.errors import RingcommError
from ringcomm.memory import device_runtime
from ringcomm.memory.device_runtime import DeviceRuntime
from ringcomm.memory.kernel_build import describe_source

CONNECTIONS_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
LOADING_VARIABLE = "CUDA_MODULE_LOADING"
# The driver's own number. A communicator has up to three streams, and the program has its own.
DEFAULT_CONNECTIONS = 8


def check_devices() -> Iterator[Finding]:
    """The devices that collectives can use, or why there are none."""
    try:
        runtime = device_runtime.current()
        count = runtime.device_count()
    except RingcommError as error:
        yield Finding("gpu", NOTE, "none that ringcomm can use", str(error))
        return
    for device in range(count):
        yield _check_device(runtime, device)
    yield _check_connections(os.environ.get(CONNECTIONS_VARIABLE, ""))
    yield _check_loading(os.environ.get(LOADING_VARIABLE, ""))


def _check_device(runtime: DeviceRuntime, device: int) -> Finding:
    name = f"gpu {device}"
    try:
        identity = runtime.identity(device)
        free_bytes, total_bytes = runtime.memory_info(device)
        major, minor = identity.capability
        text = (
            f"{identity.name} (sm_{major}{minor}, {identity.multiprocessors} multiprocessors), "
            f"{gib(free_bytes)} free of {gib(total_bytes)}"
        )
    except (RingcommError, RuntimeError) as error:
        return Finding(name, NOTE, "does not answer", str(error))
    try:
        return Finding(name, OK, f"{text}; kernels: {describe_source(identity.capability)}")
    except RingcommError as error:
        return Finding(name, NOTE, f"{text}; no kernels for it", str(error))


def _check_loading(setting: str) -> Finding:
    if setting == "EAGER":
        return Finding("kernel loading", OK, "eager")
    advice = (
        "the first launch of a kernel, of torch or anybody, may load it and wait for all kernels "
        "that run, one of which may wait for a message of this very rank: set "
        f"{LOADING_VARIABLE}=EAGER where messages and collectives are under way during first calls"
    )
    text = setting.lower() if setting else "lazy (the default)"
    return Finding("kernel loading", NOTE, text, advice)


def _check_connections(setting: str) -> Finding:
    count = int(setting) if setting.isdecimal() else DEFAULT_CONNECTIONS
    text = f"{count} ({'set' if setting else 'the default'})"
    if count < DEFAULT_CONNECTIONS:
        advice = (
            "streams that share a queue wait for each other, and communicators on several streams "
            f"can then block each other: leave {CONNECTIONS_VARIABLE} at 8, or raise it to 32"
        )
        return Finding("hardware queues", NOTE, text, advice)
    return Finding("hardware queues", OK, text)
