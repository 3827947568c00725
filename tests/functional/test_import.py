# SPDX-License-Identifier: Apache-2.0
"""``import ringcomm`` makes ``ringcomm.functional`` available, and loads no compiler."""

from tests.packaging.test_import import run

CODE = """
import sys, ringcomm
assert "torch" not in sys.modules and "functional" in dir(ringcomm)
assert "ringcomm.functional" not in sys.modules
import torch
with ringcomm.local_world(2) as world:
    parts = world.run(lambda comm: ringcomm.functional.all_gather(torch.ones(1) * comm.rank))
assert all(part.tolist() == [0.0, 1.0] for part in parts)
assert not {"torch._dynamo", "torch._inductor"} & sys.modules.keys()
module = ringcomm.zero.shard(torch.nn.Sequential(torch.nn.Linear(2, 2)), 3)
module(torch.ones(1, 2)).sum().backward()  # torch's optimizers import it by themselves
assert not {"torch._dynamo", "torch._inductor", "safetensors"} & sys.modules.keys()
"""


def test_it_is_loaded_at_first_use_and_nothing_loads_the_compiler():
    run(CODE)
