# SPDX-License-Identifier: Apache-2.0
"""Values and gradients with communicators of devices."""

from __future__ import annotations

import pytest
import torch

from ringcomm import ArgumentError
from ringcomm import functional as F
from tests.functional.cases import CASES, expected, inputs_of
from tests.support.covering import covering
from tests.support.device_worlds import on_host
from tests.support.exact import equal


@covering(strength=1, world_size=[2, 3], case=CASES)
def test_every_function(devices, world_size, case):
    inputs = inputs_of(case, world_size, torch.float32)
    outputs, fed, gradients = expected(case.reference, inputs)

    def body(comm):
        # Otherwise the ranks of one process would share autograd's device thread, and wait for each
        # other there.
        with torch.autograd.set_multithreading_enabled(False):
            mine = inputs[comm.rank].to(comm.device).clone().requires_grad_()
            output = case.call(comm, mine)
            assert output.device == comm.device
            output.backward(fed[comm.rank].to(comm.device))
            return on_host(output.detach()), on_host(mine.grad)

    got_outputs, got_gradients = zip(*devices.run(devices.world(world_size), body), strict=True)
    assert all(map(equal, got_outputs, outputs))
    assert all(map(equal, got_gradients, gradients))


def test_a_tensor_from_elsewhere(devices):
    if devices.emulated is not None:
        pytest.skip("emulated devices take torch's tensors of the host for theirs")

    def body(comm):
        with pytest.raises(ArgumentError, match=r"functional\.all_gather on rank"):
            F.all_gather(torch.ones(2), comm)

    devices.run(devices.world(2), body)
