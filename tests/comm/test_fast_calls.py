# SPDX-License-Identifier: Apache-2.0
"""The tensors that the native module reads directly; it reads all others through torch."""

import pytest
import torch
from torch.distributed import ReduceOp
from torch.testing._internal.two_tensor import TwoTensor

import ringcomm
from ringcomm import _native
from ringcomm.comm.host.arguments import DTYPE_CODES, SUM

DENSE = torch.arange(12.0)
TYPES = [dtype for dtype in DTYPE_CODES if not dtype.is_complex]
FAST = {
    "dense": DENSE,
    "one element": torch.ones(1),
    "no dimension": torch.tensor(1.0),
    "a parameter without a gradient": torch.nn.Parameter(torch.ones(3), requires_grad=False),
    "a contiguous view": DENSE[2:5],
    "long strides of single rows": DENSE.as_strided((1, 3), (100, 1)),
    "inference": torch.inference_mode()(lambda: torch.ones(3))(),
}
OTHERS = {
    "no tensor": [1.0],
    "nothing": None,
    "empty": torch.ones(0),
    "transposed": DENSE.view(3, 4).t(),
    "every other": DENSE[::2],
    "expanded": torch.ones(1).expand(3),
    "complex": torch.ones(3, dtype=torch.complex64),
    "negated": torch.ones(3, dtype=torch.complex64).conj().imag,
    "one element, negated": torch.ones(1, dtype=torch.complex64).conj().imag,
    "meta": torch.ones(3, device="meta"),
    "sparse": torch.ones(3).to_sparse(),
    "negated, of a contiguous view": torch._neg_view(torch.ones(3)),
    "packed": torch.zeros(3, dtype=getattr(torch, "uint4")),  # noqa: B009
    "a parameter": torch.nn.Parameter(torch.ones(3)),
    "with a graph": torch.ones(3, requires_grad=True) * 2,
    "a subclass": TwoTensor(torch.ones(3), torch.ones(3)),
}


@pytest.mark.parametrize("name", FAST)
def test_is_read(name):
    assert _native.takes_fast_path(FAST[name])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_each_type_is_moved(worlds, dtype):
    tensor, out = torch.ones(3).to(dtype), torch.zeros(3).to(dtype)
    assert _native.takes_fast_path(tensor), "give dtype_of (kernels/bindings/tensors.cpp) the type"
    assert worlds(1)[0].engine.core.all_gather_fast(out, tensor, "auto") == 0
    assert torch.equal(out.view(torch.uint8), tensor.view(torch.uint8))


def test_a_gradient_counts_whether_autograd_records_or_not():
    parameter = torch.nn.Parameter(torch.ones(3))
    with torch.no_grad():
        assert not _native.takes_fast_path(parameter)
    assert not _native.takes_fast_path(parameter)


@pytest.mark.parametrize("name", OTHERS)
def test_is_not_read(name):
    assert not _native.takes_fast_path(OTHERS[name])


REFUSED = {
    "an op that has a factor": lambda n, x, y: n.all_reduce_fast(x, ringcomm.premul_sum(2), "auto"),
    "no op": lambda n, x, y: n.all_reduce_fast(x, None, "auto"),
    "an op that the type lacks": lambda n, x, y: n.all_reduce_fast(x, ReduceOp.BXOR, "auto"),
    "no algorithm": lambda n, x, y: n.all_reduce_fast(x, SUM, "tree"),
    "an algorithm of devices": lambda n, x, y: n.all_reduce_fast(x, SUM, "copy_engine"),
    "an algorithm of another type": lambda n, x, y: n.all_reduce_fast(x, SUM, []),
    "types that differ": lambda n, x, y: n.reduce_scatter_fast(y.double(), x, SUM, "auto"),
    "counts that differ": lambda n, x, y: n.reduce_scatter_fast(y[:2], x, SUM, "auto"),
    "counts that differ, gathering": lambda n, x, y: n.all_gather_fast(y[:2], x, "auto"),
    "memory that overlaps": lambda n, x, y: n.all_gather_fast(x[1:], x[:-1], "auto"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_left_to_the_careful_path(worlds, name):
    x, y = torch.ones(3), torch.zeros(3)
    assert REFUSED[name](worlds(1)[0].engine.core, x, y) == _native.NOT_FAST
    assert torch.equal(x, torch.ones(3))
    assert torch.equal(y, torch.zeros(3))


def test_an_error_names_the_call_that_was_made():
    with ringcomm.local_world(1) as world:
        world[0].abort("for a test")
        with pytest.raises(ringcomm.AbortedError) as raised:
            world[0].all_reduce(torch.ones(3))
    assert str(raised.value).startswith("all_reduce ")
