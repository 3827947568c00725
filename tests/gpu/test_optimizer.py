# SPDX-License-Identifier: Apache-2.0
"""The sharded optimizer on a GPU: equality with the host, graphs, loss scaling, processes."""

import math
from contextlib import nullcontext

import pytest
import torch

import ringcomm
from ringcomm.optim import AdamW, AdamWOptions, GradScaler, LossScaleOptions, LossScaler
from tests.gpu.device import DEVICE, PLAIN, REAL, on_host
from tests.gpu.worlds import connect, run_ranks
from tests.support.covering import covering

SHAPES = ((700,), (3, 5), (40, 41), ())
STEPS = 4
# More blocks than one launch has, and a remainder.
LARGE = (3_000_017 if REAL else 20_003,)
LIMIT_S = 100.0
ONE_SHOT = AdamWOptions(algorithm="one_shot")


def values(dtype, seed, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def leaves(dtype, device, shapes=SHAPES):
    """Returns parameters with the same values on every device."""
    plain = PLAIN if device == DEVICE else device
    return [torch.nn.Parameter(each.to(plain)) for each in values(dtype, 99, shapes)]


def using(device):
    """Inside, plain tensors belong to ``device``."""
    return nullcontext() if device == DEVICE else on_host()


def give(params, turn, rank=0):
    """Sets gradients as a backward would: it writes into ``p.grad`` if there is a tensor."""
    shapes = [tuple(param.shape) for param in params]
    for param, grad in zip(
        params, values(params[0].dtype, 1000 * turn + rank, shapes), strict=True
    ):
        if param.grad is None:
            param.grad = grad.to(param.device)
        else:
            param.grad.copy_(grad)


def train(device, dtype, options=None, clip=None, comm=None, shapes=SHAPES):
    """Returns the parameters after some steps, and the norms before clipping."""
    with using(device):
        params, norms = train_here(leaves(dtype, device, shapes), options, clip, comm)
    return [param.detach().cpu() for param in params], [norm.cpu() for norm in norms]


def train_here(params, options, clip, comm):
    groups = [{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.0}]
    optimizer = AdamW(
        [each for each in groups if each["params"]], lr=1e-2, comm=comm, options=options
    )
    norms = []
    for turn in range(STEPS):
        give(params, turn, 0 if comm is None else comm.rank)
        if clip is not None:
            norms.append(optimizer.clip_grad_norm_(0.5, clip).clone())
        optimizer.step()
        optimizer.zero_grad()
    return params, norms


def same(ours, others):
    return all(torch.equal(one, other) for one, other in zip(ours, others, strict=True))


OPTIONS = {
    "usual": AdamWOptions(),
    "checked": AdamWOptions(check_finite=True),
    "stochastic": AdamWOptions(master="none", rounding="stochastic", seed=7),
    "remainder": AdamWOptions(master="remainder"),
}


# tests/comm/device tests small parameters.
@covering(
    strength=1,
    valid=lambda case: (case.get("dtype"), case.get("name")) != (torch.float16, "remainder"),
    dtype=(torch.float32, torch.bfloat16, torch.float16),
    name=tuple(OPTIONS),
)
def test_a_large_parameter_gets_the_bits_of_the_host(dtype, name):
    options, shapes = OPTIONS[name], (LARGE,)
    assert same(
        train(DEVICE, dtype, options, shapes=shapes)[0],
        train("cpu", dtype, options, shapes=shapes)[0],
    )


@covering(strength=1, dtype=[torch.float32, torch.bfloat16], kind=[2.0, 1.0, math.inf])
def test_norms_have_the_bits_of_the_host(dtype, kind):
    params, norms = train(DEVICE, dtype, clip=kind)
    host_params, host_norms = train("cpu", dtype, clip=kind)
    # The words of the norm are exact. torch's double-precision result of them may differ between
    # devices, by far less than the rounding to FP32.
    assert same(norms, host_norms) and same(params, host_params)


def step_once(optimizer, clip):
    if clip:
        optimizer.clip_grad_norm_(0.5)
    optimizer.step()


@covering(
    dtype=[torch.float32, torch.bfloat16],
    clip={"one pass": False, "two passes": True},
    scaled={"plain": False, "loss scale": True},
)
def test_a_graph_replays_steps_as_eager_ones(dtype, clip, scaled):
    """A step never waits for the device nor reads the host: step, lr and scale are on the device.

    Two captured steps are replayed three times with other gradients and learning rates.
    """

    def build():
        params = leaves(dtype, DEVICE)
        scaler = LossScaler(LossScaleOptions(growth_interval=2), PLAIN) if scaled else None
        lr = torch.tensor(1e-2, device=PLAIN)
        optimizer = AdamW(params, lr=lr, loss_scaler=scaler)
        give(params, 0)
        step_once(optimizer, clip)  # a first step allocates memory, which a capture must not do
        return params, lr, optimizer

    eager_params, eager_lr, eager = build()
    params, lr, optimizer = build()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step_once(optimizer, clip)
        step_once(optimizer, clip)
    torch.cuda.synchronize()
    for turn in range(1, 4):
        for each in (eager_lr, lr):
            each.fill_(1e-2 / turn)
        give(eager_params, turn)
        give(params, turn)
        graph.replay()
        for _ in range(2):
            step_once(eager, clip)
    torch.cuda.synchronize()
    assert optimizer.steps_taken.item() == 7.0 == eager.steps_taken.item()
    assert same(params, eager_params)
    optimizer.communicator.close()  # otherwise the communicator keeps its memory for the graph


def test_a_step_does_not_wait_for_the_device():
    params = leaves(torch.bfloat16, DEVICE)
    optimizer = AdamW(params, options=AdamWOptions(check_finite=True))
    give(params, 0)
    step_once(optimizer, True)
    give(params, 1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # torch raises an error instead of waiting
    try:
        torch.cuda._sleep(400_000_000)
        step_once(optimizer, True)
        optimizer.zero_grad(set_to_none=False)
        ahead = not torch.cuda.current_stream().query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert ahead


# tests/comm/device has torch's.
@pytest.mark.parametrize("unscale", [False, True], ids=["fused", "unscaled first"])
def test_a_grad_scaler_skips_what_overflows(unscale):
    params, reference_params = leaves(torch.float32, DEVICE), leaves(torch.float32, DEVICE)
    optimizer, reference = AdamW(params, lr=1e-2), AdamW(reference_params, lr=1e-2)
    scaler = GradScaler(torch.device(PLAIN).type, init_scale=256.0, growth_interval=100)
    for turn in range(4):
        factor = math.inf if turn == 1 else float(turn + 1)
        optimizer.zero_grad()
        scaler.scale(sum((param.float() * factor).sum() for param in params)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if turn != 1:
            reference.zero_grad()
            sum((param.float() * factor).sum() for param in reference_params).backward()
            reference.step()
    assert scaler.get_scale() == 128.0
    assert same(params, reference_params)


def test_a_loss_scaler_skips_and_counts():
    params = leaves(torch.float16, DEVICE)
    before = [param.detach().clone() for param in params]
    scaler = LossScaler(LossScaleOptions(init_scale=1024.0), PLAIN)
    optimizer = AdamW(params, loss_scaler=scaler)
    for factor in (math.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale(sum((param.float() * factor).sum() for param in params)).backward()
        optimizer.step()
        if math.isinf(factor):
            assert same(params, before)
    assert scaler.current.item() == 512.0
    assert (optimizer.skipped_steps.item(), optimizer.steps_taken.item()) == (1.0, 1.0)
    assert not same(params, before)


def test_state_goes_to_the_host_and_back():
    def half(device, state):
        with using(device):
            params = leaves(torch.bfloat16, device)
            optimizer = AdamW(params, lr=1e-2)
            if state is not None:
                optimizer.load_torch_state_dict(state)
            give(params, 1)
            optimizer.step()
            return [param.detach().cpu() for param in params], optimizer.full_state_dict()

    _, of_host = half("cpu", None)
    _, of_device = half(DEVICE, None)
    results = [
        half(device, state)[0] for device in ("cpu", DEVICE) for state in (of_host, of_device)
    ]
    assert all(same(result, results[0]) for result in results)


def in_one_pass_and_two(comm, device):
    """Returns the bytes of parameters and norms after training in one pass and in two."""
    found = []
    for clip in (None, 2.0):
        params, norms = train(device, torch.bfloat16, ONE_SHOT, clip, comm)
        found += [each.float().numpy().tobytes() for each in [*params, *norms]]
    return found


def in_processes(store, rank, world):
    with connect(store, rank, world) as comm:
        assert comm.world_size == world
        return in_one_pass_and_two(comm, DEVICE)


@pytest.mark.timeout(LIMIT_S)
def test_processes_train_as_threads_on_the_host():
    """Trains without DDP on 2 ranks that share the GPU by CUDA IPC."""
    with ringcomm.local_world(2) as world:
        wanted, _ = world.run(lambda comm: in_one_pass_and_two(comm, "cpu"))
    for found in run_ranks(in_processes, 2, timeout_s=LIMIT_S - 10):
        assert found == wanted
