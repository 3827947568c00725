# SPDX-License-Identifier: Apache-2.0
"""A bucket for optimizer steps, and steps by native and Triton kernels on equal copies of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import ringcomm
from ringcomm import _native
from ringcomm.comm.host.arguments import DTYPE_CODES, DTYPE_NAMES
from ringcomm.comm.host.engine import Call

Tensor = torch.Tensor
PARAMS = 6
ACTIVE = (1.0, 1.0, 0.0, 1.0, 1.0, 1.0)
STEPS = (0.0, 5.0, 3.0, 100.0, 1e6, 0.0)
L2, AMSGRAD, MAXIMIZE = (_native.ADAMW_FLAGS[name] for name in ("l2", "amsgrad", "maximize"))
# lr, betas, eps, weight decay, flags: every path of the update, with beta1 below and above 1/2.
HYPER = (
    (1e-2, 0.9, 0.999, 1e-8, 0.1, 0),
    (1e-2, 0.5, 0.99, 1e-8, 0.1, L2 | AMSGRAD),
    (1e-1, 0.3, 0.9, 1e-3, 0.1, MAXIMIZE | AMSGRAD),
    (1e-1, 0.9, 0.9, 1e-3, 0.1, L2),
)


@dataclass(frozen=True)
class Case:
    """The form of a bucket and its kernels."""

    elems: int
    grad: torch.dtype
    param: torch.dtype
    master: str
    amsgrad: bool = False
    stochastic: bool = False
    op: str = "SUM"


def make_factors(amsgrad: bool) -> Tensor:
    """Returns prepare_adamw()'s factors for six parameters; one parameter takes no step."""
    known = L2 | MAXIMIZE | (AMSGRAD if amsgrad else 0)
    hyper = [[*row[:-1], row[-1] & known] for row in HYPER]

    def table(*numbers: Any, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.tensor(numbers, dtype=dtype)

    factors = torch.zeros(PARAMS, _native.OPTIMIZER_STRUCTURES["factors"], dtype=torch.uint8)
    tensors = {
        "control": table(1 / 64, 0.7, 0.0, 0.0, 0.0),
        "hyper": torch.tensor(hyper, dtype=torch.float64),
        "group": table(0, 1, 2, 3, 1, 2, dtype=torch.int64),
        "active": table(*ACTIVE),
        "step": table(*STEPS),
        "factors": factors,
    }
    pointers = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    _native.prepare_adamw(**pointers, params=PARAMS)
    return factors


def make_segments(elems: int) -> Tensor:
    """Returns six parameters of random sizes, in order, with padding between and behind them."""
    cuts, _ = torch.randint(0, elems + 1, (2 * PARAMS,)).sort()
    return torch.cat([cuts.view(PARAMS, 2), torch.arange(PARAMS)[:, None]], dim=1).contiguous()


def wide_range(elems: int, most: int = 5) -> Tensor:
    """Returns FP32 numbers of many magnitudes."""
    return torch.randn(elems) * 10.0 ** torch.randint(-most, most, (elems,))


class Memory:
    """One rank's copy of all data that a step reads and writes.

    Args:
        case: the form of the bucket and of its kernels.
        rank: the rank.
        world: the number of ranks that share the bucket.
        hostile: gradients and state hold NaN, infinities, zeros and subnormal numbers too.
        device: whose heap has the bucket, as ``ringcomm.empty`` names it.
    """

    def __init__(
        self, case: Case, rank: int, world: int, hostile: bool = False, device: str = "cpu"
    ) -> None:
        torch.manual_seed(case.elems)  # equal on all ranks, except for the gradients
        n = case.elems
        self.case, self.factors = case, make_factors(case.amsgrad)
        self.segments = make_segments(n)
        chunk = _native.chunk_elems(n, world)
        self.begin = min(rank * chunk, n)
        self.elems = min(chunk, n - self.begin)
        here = slice(self.begin, self.begin + self.elems)
        params = torch.randn(n).to(case.param)
        state = [wide_range(n), wide_range(n).abs(), wide_range(n).abs()]
        if hostile:
            state[0][100:110], state[1][100:110] = 1e-40, 1e-42
            state[0][500:700], state[1][500:700] = 0.0, 0.0
        low = torch.randint(-(2**15), 2**15, (n,), dtype=torch.int16)
        torch.manual_seed(1 + rank)
        grads = wide_range(n, 20 if hostile else 2).to(case.grad)
        if hostile:
            grads[3], grads[400], grads[20:30] = float("nan"), float("inf"), 0.0
        # An empty tensor has no address, but an empty bucket has one.
        room = partial(ringcomm.empty, max(n, 1), device=device)
        self.params = room(dtype=case.param)[:n].copy_(params)
        self.grads = room(dtype=case.grad)[:n].copy_(grads)
        self.grads_ptr = self.grads.untyped_storage().data_ptr()
        self.tensors = {
            "exp_avg": state[0][here].clone(),
            "exp_avg_sq": state[1][here].clone(),
            "out": torch.ones(self.elems),
            "words": torch.zeros(_native.GRAD_NORM_WORDS, dtype=torch.int64),
            "params": self.params,
        }
        if case.amsgrad:
            self.tensors["max_exp_avg_sq"] = state[2][here].clone()
        if case.master == "fp32":
            self.tensors["master"] = params[here].float()
        if case.master == "remainder":
            self.tensors["remainder"] = low[here].clone()
        self.shard = self._shard()
        shard = bytearray(_native.adamw_shard_bytes(self.shard))
        self.descriptor = torch.frombuffer(shard, dtype=torch.int64).clone()
        self.results = torch.tensor([self.ptr("out"), self.ptr("words")])

    def ptr(self, name: str) -> int:
        """Returns a tensor's address, or 0 without such a tensor."""
        return self.tensors[name].data_ptr() if name in self.tensors else 0

    def _shard(self) -> _native.AdamWShard:
        return _native.AdamWShard(
            segments=self.segments.data_ptr(),
            segment_count=PARAMS,
            factors=self.factors.data_ptr(),
            bucket_elems=self.case.elems,
            begin=self.begin,
            elems=self.elems,
            master=self.ptr("master"),
            remainder=self.ptr("remainder"),
            exp_avg=self.ptr("exp_avg"),
            exp_avg_sq=self.ptr("exp_avg_sq"),
            max_exp_avg_sq=self.ptr("max_exp_avg_sq"),
            params=self.params.untyped_storage().data_ptr(),
            param_dtype=DTYPE_CODES[self.case.param],
            stochastic=self.case.stochastic,
            seed=2**64 - 12345,
            bucket=3,
        )

    def kind(self, op: str, world: int) -> Any:
        """Returns the kind of shard for which Triton compiles the kernel."""
        from ringcomm._tl.adamw_launch import shard_kind

        case = self.case
        return shard_kind(
            DTYPE_NAMES[case.grad],
            DTYPE_NAMES[case.param],
            op,
            world,
            master=case.master,
            keeps_max=case.amsgrad,
            stochastic=case.stochastic,
        )


def differences(ours: Memory, native: Memory) -> list[tuple[str, int]]:
    """Returns tensors that differ in a bit, and the number of such elements; all NaN are equal."""
    found = []
    for name, tensor in ours.tensors.items():
        other = native.tensors[name]
        words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
        wrong = tensor.view(words) != other.view(words)
        if tensor.is_floating_point():
            wrong &= ~(tensor.isnan() & other.isnan())
        if wrong.any():
            found.append((name, int(wrong.sum())))
    return found


class Steps:
    """The three collectives of a step, by native and by Triton kernels."""

    def __init__(self, comm: ringcomm.Communicator, algorithm: str) -> None:
        self._comm = comm
        self._code = _native.ALGORITHMS[algorithm]
        self._algorithm = algorithm

    def _end(self, native: Any) -> Any:
        comm = self._comm
        return comm.engine.use_kernels(
            comm.engine.checks("step"), "triton", self._algorithm, torch.float32
        )(native)

    def _run(self, name: str, run: Callable[[Any], int]) -> None:
        self._comm.engine.start_call(Call(name, run, []))

    def norm(self, of: Memory, kernels: str, kind: str, accumulate: bool) -> None:
        """Runs reduce_scatter_norm into ``out`` and ``words``."""
        case, code = of.case, _native.GRAD_NORM_KINDS[kind]
        grads = of.grads_ptr
        if kernels == "native":
            sizes = case.elems, DTYPE_CODES[case.grad], _native.OPS[case.op]
            results = of.ptr("out"), accumulate, code, of.ptr("words")
            self._run(
                "norm",
                lambda end: end.reduce_scatter_norm(grads, *sizes, *results, self._code, 0, 0),
            )
            return
        from ringcomm._tl.adamw_launch import plan_reduce_scatter_norm

        dtype, world = DTYPE_NAMES[case.grad], self._comm.world_size
        of.tensors["words"].zero_()
        plan = plan_reduce_scatter_norm(
            case.elems, dtype, case.op, code, accumulate, self._code, world
        )
        self._run("norm", lambda end: self._end(end).run(plan, grads, of.results.data_ptr()))

    def update(self, of: Memory, kernels: str) -> None:
        """adamw_all_gather from ``out``."""
        grad = of.ptr("out")
        if kernels == "native":
            code = DTYPE_CODES[torch.float32]
            self._run(
                "update", lambda end: end.adamw_all_gather(of.shard, grad, code, self._code, 0)
            )
            return
        from dataclasses import replace

        import triton.language as tl

        from ringcomm._tl.adamw_launch import plan_adamw_all_gather

        kind = replace(of.kind("SUM", self._comm.world_size), grad=tl.float32)
        plan = plan_adamw_all_gather(of.case.elems, kind, self._code)
        self._run("update", lambda end: self._end(end).run(plan, grad, of.descriptor.data_ptr()))

    def one_pass(self, of: Memory, kernels: str) -> None:
        """reduce_scatter_adamw_all_gather."""
        case, grads = of.case, of.grads_ptr
        if kernels == "native":
            codes = DTYPE_CODES[case.grad], _native.OPS[case.op], self._code, 0, 0
            self._run(
                "step", lambda end: end.reduce_scatter_adamw_all_gather(of.shard, grads, *codes)
            )
            return
        from ringcomm._tl.adamw_launch import plan_one_pass

        kind = of.kind(case.op, self._comm.world_size)
        plan = plan_one_pass(case.elems, kind, case.op, self._code)
        self._run("step", lambda end: self._end(end).run(plan, grads, of.descriptor.data_ptr()))
