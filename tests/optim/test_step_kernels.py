# SPDX-License-Identifier: Apache-2.0
"""The optimizer's native kernels: instruction sets, forms and worlds agree bit for bit; faults."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import pytest
import torch

import ringcomm
from ringcomm import _native
from ringcomm.comm.host.engine import Call
from ringcomm.errors import MismatchError
from tests.optim.problems import TorchLion
from tests.support.covering import covering
from tests.support.heap_use import settled_heap_bytes

ALGORITHMS = ("one_shot", "ring")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TILE = _native.ADAMW_TILE_ELEMS


def code(dtype: torch.dtype) -> int:
    return _native.DTYPES[str(dtype).removeprefix("torch.")]


FLAGS = _native.ADAMW_FLAGS
# Hyper-parameters of two groups: lr, beta1 or dampening, beta2 or momentum, eps, decay, flags.
RULES = {
    "adamw": [
        [1e-2, 0.9, 0.999, 1e-8, 1e-2, 0],
        [1e-3, 0.4, 0.9, 1e-8, 1e-1, FLAGS["l2"] | FLAGS["amsgrad"]],
    ],
    "sgd": [
        [1e-2, 0, 0, 0, 0, FLAGS["sgd"] | FLAGS["l2"]],
        [1e-1, 0, 0, 0, 1e-1, FLAGS["sgd"] | FLAGS["l2"] | FLAGS["maximize"]],
    ],
    "momentum": [
        [1e-2, 0.1, 0.9, 0, 0, FLAGS["sgd"] | FLAGS["l2"] | FLAGS["momentum"]],
        [1e-2, 0, 0.8, 0, 1e-2, FLAGS["sgd"] | FLAGS["l2"] | FLAGS["momentum"] | FLAGS["nesterov"]],
    ],
    "lion": [
        [1e-2, 0.9, 0.99, 0, 0, FLAGS["lion"]],
        [1e-3, 0.4, 0.7, 0, 1e-1, FLAGS["lion"] | FLAGS["maximize"]],
    ],
    "adamw8bit": [
        [1e-2, 0.9, 0.999, 1e-8, 1e-2, FLAGS["quantized_state"]],
        [1e-3, 0.4, 0.9, 1e-8, 1e-1, FLAGS["quantized_state"] | FLAGS["l2"]],
    ],
}
# Number of moments that each rule updates; it must not change the others.
MOMENTS = {"adamw": 3, "sgd": 0, "momentum": 1, "lion": 1, "adamw8bit": 2}


@dataclass
class Shard:
    """One rank's shard of a bucket of ``elems`` in two groups, and the tables of its steps."""

    elems: int
    dtype: torch.dtype
    rank: int = 0
    world: int = 1
    kind: str = "master"  # or "remainder", "stochastic"
    in_heap: bool = False
    elems_before: int = 0  # elements before it in the parameters' memory
    rule: str = "adamw"

    def __post_init__(self) -> None:
        cut = max(self.elems // 3, 1)
        # With 8-bit moments, parameters begin at multiples of a quantization block.
        after = -(-cut // 64) * 64 if self.rule == "adamw8bit" else cut + 7
        rows = [[0, cut, 0], [min(after, self.elems), self.elems, 1]]
        self.segments = torch.tensor([row for row in rows if row[0] < row[1]], dtype=torch.int64)
        self.factors = torch.zeros(2, 48, dtype=torch.uint8)
        self.hypers = torch.tensor(RULES[self.rule], dtype=torch.float64)
        self.control = torch.tensor([0.5, 0.75, 0, 0, 0], dtype=torch.float64)
        self.group, self.active = torch.arange(2), torch.ones(2, dtype=torch.float64)
        self.step = torch.zeros(2, dtype=torch.float64)
        chunk = _native.chunk_elems(self.elems, self.world)
        self.begin = min(self.rank * chunk, self.elems)
        self.own = min(chunk, self.elems - self.begin)
        values = torch.randn(self.elems, generator=torch.Generator().manual_seed(1)).to(self.dtype)
        make = ringcomm.empty if self.in_heap else torch.empty
        whole = make(self.elems_before + self.elems, dtype=self.dtype)
        self.params = whole[self.elems_before :]
        self.params.copy_(values)
        self.state = torch.zeros(3, max(self.own, 1))
        self.master = values[self.begin : self.begin + self.own].float()
        self.low = torch.zeros(max(self.own, 1), dtype=torch.int16)
        moments = MOMENTS[self.rule]
        state = [self.state[k].data_ptr() if k < moments else 0 for k in range(3)]
        has_master = self.kind == "master" and self.dtype != torch.float32
        self.native = _native.AdamWShard(
            segments=self.segments.data_ptr(),
            segment_count=len(self.segments),
            factors=self.factors.data_ptr(),
            bucket_elems=self.elems,
            begin=self.begin,
            elems=self.own,
            master=self.master.data_ptr() if has_master else 0,
            remainder=self.low.data_ptr() if self.kind == "remainder" else 0,
            exp_avg=state[0],
            exp_avg_sq=state[1],
            max_exp_avg_sq=state[2],
            params=self.params.data_ptr(),
            param_dtype=code(self.dtype),
            stochastic=self.kind == "stochastic",
            seed=11,
            bucket=3,
        )

    def prepare(self) -> None:
        _native.prepare_adamw(
            control=self.control.data_ptr(),
            hyper=self.hypers.data_ptr(),
            group=self.group.data_ptr(),
            active=self.active.data_ptr(),
            step=self.step.data_ptr(),
            factors=self.factors.data_ptr(),
            params=2,
        )


def gradient(elems: int, dtype: torch.dtype, rank: int, turn: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * turn + rank)
    # Some are so small that their squares are subnormal or zero.
    return (torch.randn(elems, generator=generator) * 10.0 ** (-(turn * 8))).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.fixture
def isa():
    yield _native.force_isa
    _native.force_isa("")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["master", "remainder", "stochastic"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_instruction_set_gives_the_same_bits(isa, dtype, kind, rule):
    if kind == "remainder" and dtype != torch.bfloat16:
        kind = "master"
    results = []
    for name in ("avx512", "avx2", "baseline"):
        if not isa(name):
            continue
        shard = Shard(5003, dtype, kind=kind, rule=rule)
        words = torch.empty(_native.GRAD_NORM_WORDS, dtype=torch.int64)
        for turn in range(3):
            grad = gradient(5003, dtype, 0, turn)
            shard.prepare()
            _native.adamw_shard(shard.native, grad.data_ptr(), code(dtype))
        _native.grad_norm(grad.data_ptr(), code(dtype), 5003, 0, words.data_ptr())
        results.append([bits(each) for each in (shard.params, shard.state, shard.master, words)])
    assert all(
        torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True)
    )
    assert len(results) > 1 or _native.isa() == "baseline"


def in_torch(rule: str, row: list[float], param: torch.Tensor) -> torch.optim.Optimizer:
    """Makes torch's optimizer for a group of ``RULES``."""
    lr, beta1, beta2, _, decay, flags = row
    maximize = bool(int(flags) & FLAGS["maximize"])
    if rule == "lion":
        return TorchLion([param], lr, (beta1, beta2), decay, maximize=maximize)
    assert rule in ("sgd", "momentum"), f"make torch's optimizer of {rule} here"
    nesterov = bool(int(flags) & FLAGS["nesterov"])
    return torch.optim.SGD(
        [param], lr, beta2, beta1, decay, nesterov, maximize=maximize, foreach=False
    )


@pytest.mark.parametrize("rule", [rule for rule in RULES if MOMENTS[rule] <= 1])
def test_updates_with_one_moment_have_the_bits_of_torch(rule):
    shard = Shard(5003, torch.float32, rule=rule)
    cuts = [slice(*row[:2]) for row in shard.segments.tolist()]
    params = [torch.nn.Parameter(shard.params[cut].clone()) for cut in cuts]
    optimizers = [
        in_torch(rule, row, param) for row, param in zip(RULES[rule], params, strict=True)
    ]
    for turn in range(4):
        grad = gradient(5003, torch.float32, 0, turn % 2)
        grad[:3] = torch.tensor([float("nan"), -0.0, float("inf")]) if turn == 2 else -0.0
        shard.active[1] = float(turn != 0)  # parameter 1 begins later
        shard.prepare()
        _native.adamw_shard(shard.native, grad.data_ptr(), code(torch.float32))
        for number, (optimizer, param, cut) in enumerate(
            zip(optimizers, params, cuts, strict=True)
        ):
            if shard.active[number]:
                param.grad = grad[cut] * 0.5 * 0.75
                optimizer.step()
                assert torch.equal(bits(param.detach()), bits(shard.params[cut])), (turn, number)
                for moment in optimizer.state[param].values():
                    if isinstance(moment, torch.Tensor):
                        assert torch.equal(bits(moment), bits(shard.state[0][cut]))


class Step:
    """A step of one rank in one of its forms; ``step_bytes`` is the size of all buckets."""

    def __init__(
        self, comm, shard: Shard, grads: torch.Tensor, algorithm: str, step_bytes: int = 0
    ) -> None:
        self.step_bytes = step_bytes
        self.core, self.comm, self.shard, self.grads = comm.engine.core, comm, shard, grads
        self.grad_code = code(grads.dtype)
        self.algorithm = _native.ALGORITHMS[algorithm]
        self.reduced = torch.zeros(max(shard.own, 1))
        self.words = torch.empty(_native.GRAD_NORM_WORDS, dtype=torch.int64)

    def one_pass(self) -> None:
        status = self.core.reduce_scatter_adamw_all_gather(
            self.shard.native,
            self.grads.data_ptr(),
            self.grad_code,
            _native.OPS["AVG"],
            self.algorithm,
            self.step_bytes,
            0,
        )
        assert status == 0, self.core.fault()

    def reduce(self, accumulate: bool = False, sums: bool = True) -> None:
        status = self.core.reduce_scatter_norm(
            self.grads.data_ptr(),
            self.shard.elems,
            self.grad_code,
            _native.OPS["AVG"],
            self.reduced.data_ptr(),
            accumulate,
            0,
            self.words.data_ptr() if sums else 0,
            self.algorithm,
            self.step_bytes,
            0,
        )
        assert status == 0, self.core.fault()

    def two_passes(self) -> None:
        self.reduce()
        status = self.core.adamw_all_gather(
            self.shard.native,
            self.reduced.data_ptr(),
            code(torch.float32),
            self.algorithm,
            self.step_bytes,
        )
        assert status == 0, self.core.fault()

    def separate(self) -> None:
        self.reduce()
        shard, params = self.shard, self.shard.params
        _native.adamw_shard(shard.native, self.reduced.data_ptr(), code(torch.float32))
        chunk = _native.chunk_elems(shard.elems, shard.world)
        outputs = list(params.split(chunk))
        outputs += [params[:0] for _ in range(shard.world - len(outputs))]
        self.comm.all_gather(outputs, params[shard.begin : shard.begin + shard.own].clone())


def train(
    comm, form: str, elems: int, dtypes, algorithm: str, step_bytes: int = 0, rule: str = "adamw"
):
    grad_dtype, dtype = dtypes
    shard = Shard(elems, dtype, comm.rank, comm.world_size, in_heap=True, rule=rule)
    grads = ringcomm.empty(elems, dtype=grad_dtype)
    step = Step(comm, shard, grads, algorithm, step_bytes)
    for turn in range(3):
        grads.copy_(gradient(elems, grad_dtype, comm.rank, turn))
        shard.active[1] = float(turn != 1)
        shard.prepare()
        getattr(step, form)()
    if form != "one_pass":
        comm.all_reduce(step.words)
    return bits(shard.params).clone(), step.words.tolist() if form != "one_pass" else None


MIXES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.float32),
]


@covering(strength=1, world_size=[1, 2, 3, 8], algorithm=ALGORITHMS, dtypes=MIXES)
def test_one_pass_two_passes_and_separate_kernels_give_the_same_bits(world_size, algorithm, dtypes):
    with ringcomm.local_world(world_size, timeout=60) as world:
        for elems in (1, TILE + 88, 9 * TILE + 3):
            results = {}
            for form in ("one_pass", "two_passes", "separate"):
                ranks = world.run(train, form, elems, dtypes, algorithm)
                params, words = ranks[0]
                assert all(torch.equal(each, params) for each, _ in ranks)
                assert all(found == words for _, found in ranks)
                results[form] = params
            assert torch.equal(results["one_pass"], results["two_passes"])
            assert torch.equal(results["one_pass"], results["separate"])


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "adamw"])
def test_forms_of_other_updates_give_the_same_bits(rule):
    """The forms do not depend on the update rule, so one world and one mix of dtypes are enough."""
    with ringcomm.local_world(3, timeout=60) as world:
        results = [
            params
            for form in ("one_pass", "two_passes", "separate")
            for params, _ in world.run(train, form, 9 * TILE + 3, MIXES[2], "one_shot", 0, rule)
        ]
        assert all(torch.equal(each, results[0]) for each in results)


@covering(form=["one_pass", "two_passes"], algorithm=ALGORITHMS, dtypes=MIXES)
def test_stores_past_the_caches_give_the_same_bits(form, algorithm, dtypes):
    """A bucket of a large step, whose first and last elements do not fill a vector."""
    with ringcomm.local_world(3, timeout=60) as world:
        for elems in (1, 9 * TILE + 3):
            (small, words), *_ = world.run(train, form, elems, dtypes, algorithm)
            for found, others in world.run(train, form, elems, dtypes, algorithm, 1 << 40):
                assert torch.equal(found, small)
                assert others == words


@pytest.mark.parametrize("step_bytes", [0, 1 << 40])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sums_are_the_same_with_and_without_a_norm(algorithm, step_bytes):
    def body(comm):
        elems = 3 * TILE + 7
        shard = Shard(elems, torch.float32, comm.rank, comm.world_size, in_heap=True)
        grads = ringcomm.empty(elems)
        found = []
        for sums in (True, False):
            step = Step(comm, shard, grads, algorithm, step_bytes)
            step.words.fill_(-7)
            for turn in range(2):
                grads.copy_(gradient(elems, torch.float32, comm.rank, turn))
                step.reduce(accumulate=turn > 0, sums=sums)
            assert bool((step.words == -7).all()) != sums
            found.append(step.reduced)
        return torch.equal(*found)

    with ringcomm.local_world(2, timeout=60) as world:
        assert world.run(body) == [True, True]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_rank_alone_in_a_step_names_the_other(algorithm):
    """The bucket's memory stays allocated until the other rank can no longer store into it."""
    world = ringcomm.local_world(2, timeout=0.5)
    used_bytes = settled_heap_bytes()
    shard = Shard(4 * TILE, torch.float32, 0, 2, in_heap=True)
    grads = ringcomm.zeros(4 * TILE)
    step = Step(world[0], shard, grads, algorithm)
    shard.prepare()
    with pytest.raises(AssertionError, match="timeout"):
        step.one_pass()
    del shard, step, grads
    gc.collect()
    held = ringcomm.heap_stats()["used_bytes"] - used_bytes
    assert (held > 0) == (algorithm == "one_shot")  # the ring's peers do not store into buckets
    world.close()
    assert ringcomm.heap_stats()["used_bytes"] < used_bytes


def test_different_forms_are_a_mismatch():
    def body(comm):
        shard = Shard(4 * TILE, torch.float32, comm.rank, 2, in_heap=True)
        grads = ringcomm.zeros(4 * TILE)
        step = Step(comm, shard, grads, "one_shot")
        shard.prepare()
        one_pass = comm.rank == 0

        def run(native):
            if one_pass:
                return native.reduce_scatter_adamw_all_gather(
                    shard.native, grads.data_ptr(), step.grad_code, 0, step.algorithm, 0, 0
                )
            return native.adamw_all_gather(
                shard.native, step.reduced.data_ptr(), step.grad_code, step.algorithm, 0
            )

        name = "reduce_scatter_adamw_all_gather" if one_pass else "adamw_all_gather"
        before = bits(shard.params).clone()
        with pytest.raises(MismatchError) as caught:
            comm.engine.start_call(Call(name, run, []))
        assert torch.equal(bits(shard.params), before)
        return str(caught.value)

    world = ringcomm.local_world(2, timeout=5)
    for text in world.run(body):
        assert "reduce_scatter_adamw_all_gather" in text
        assert "adamw_all_gather" in text.replace("reduce_scatter_adamw_all_gather", "")
    world.close()


def test_memory_that_peers_cannot_reach_is_refused():
    with ringcomm.local_world(2, timeout=5) as world:
        shard = Shard(TILE, torch.float32, 0, 2, in_heap=True)
        step = Step(world[0], shard, torch.zeros(TILE), "one_shot")
        with pytest.raises(ValueError, match="gradients must lie in the heap"):
            step.one_pass()
        with pytest.raises(ValueError, match="gradients must lie in the heap"):
            step.reduce()
        plain = Shard(TILE, torch.float32, 0, 2)
        with pytest.raises(ValueError, match="parameters must lie in the heap"):
            Step(world[0], plain, ringcomm.zeros(TILE), "one_shot").one_pass()


def test_parameters_that_peers_cannot_store_by_vectors_are_refused():
    with ringcomm.local_world(2, timeout=5) as world:
        shard = Shard(TILE, torch.float32, 0, 2, in_heap=True, elems_before=1)
        with pytest.raises(ValueError, match="parameters must begin at a multiple of 16 bytes"):
            Step(world[0], shard, ringcomm.zeros(TILE), "one_shot").one_pass()
