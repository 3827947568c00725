"""``ringcomm.functional`` is there after ``import ringcomm``, and loaded when it is used."""

from tests.packaging.test_import import run

CODE = """
import sys, ringcomm
assert "torch" not in sys.modules and "functional" in dir(ringcomm)
assert "ringcomm.functional" not in sys.modules
import torch
with ringcomm.local_world(2) as world:
    parts = world.run(lambda comm: ringcomm.functional.all_gather(torch.ones(1) * comm.rank))
assert all(part.tolist() == [0.0, 1.0] for part in parts)
assert "torch._dynamo" not in sys.modules and "torch._inductor" not in sys.modules
"""


def test_it_is_loaded_at_first_use_and_does_not_load_the_compiler():
    run(CODE)
