# SPDX-License-Identifier: Apache-2.0
"""The ``ringcomm`` backend of ``torch.distributed``; start with ``process_group.py``.

``register`` is the entry point of the group ``torch.backends``: torch calls it at the end of
every ``import torch``, so this module loads neither the native module nor the process group. So
programs need not import ringcomm for ``torch.distributed.init_process_group("ringcomm")``.
"""

from __future__ import annotations

import warnings
from typing import Any

__all__ = ["register"]

# Equals BACKEND_NAME in process_group.py; this module must not load that module.
_NAME = "ringcomm"


def register() -> None:
    """Registers ``"ringcomm"`` with ``torch.distributed``; calling it again changes nothing.

    Never raises: an exception here would make ``import torch`` fail for programs that never
    use ringcomm. A failure becomes a warning.
    """
    try:
        import torch.distributed as dist

        if dist.is_available():
            dist.Backend.register_backend(
                _NAME, _create_process_group, extended_api=True, devices=["cpu", "cuda"]
            )
            _keep_flight_recorder_off(dist.distributed_c10d)
    except Exception as error:
        warnings.warn(
            f'ringcomm could not register with torch.distributed, so init_process_group("ringcomm")'
            f" will not work: {type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=2,
        )


def _keep_flight_recorder_off(c10d: Any) -> None:
    """Keeps torch 2.15's flight recorder (pytorch/pytorch#192233) off ringcomm's groups.

    The recorder hooks the C++ methods of a group, which a Python group does not use, and attaching
    it to such a group fails because it has no C++ backend. torch skips the backends in this set.
    """
    without_recorder = getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if without_recorder is not None:
        without_recorder.add(_NAME)


def _create_process_group(group: Any, pg_options: Any) -> Any:
    """Creates a group's object; ``torch.distributed`` calls it on every member of a new group."""
    from ringcomm.c10d.process_group import create_process_group

    return create_process_group(group, pg_options)
