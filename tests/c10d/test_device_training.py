# SPDX-License-Identifier: Apache-2.0
"""DDP, FSDP and pipelines on an emulated device train with the same bits as on Gloo.

For torch these are CPU tensors. Its special code for GPUs (additional streams, futures with events)
runs only in tests/gpu/test_training.py, on a GPU.
"""

from functools import partial

import pytest

from tests.c10d import test_ddp, test_fsdp, test_parallelism
from tests.c10d.test_devices import on_the_device


@pytest.mark.parametrize(
    "check",
    [
        test_ddp.buckets,
        test_ddp.no_sync,
        test_ddp.unused_parameters,
        test_ddp.half_precision_hooks,
        test_fsdp.one_axis,
        test_fsdp.mixed_precision,
        test_fsdp.fsdp1_mixed_precision,
        test_parallelism.sequence_parallel,
        test_parallelism.functional_collectives,
        test_parallelism.differentiable_collectives,
    ],
)
def test_as_on_gloo(two_devices, check):
    two_devices.compare(partial(on_the_device, check))


def test_a_divide_factor(two_devices):
    two_devices.run(partial(on_the_device, test_fsdp.divide_factor))
