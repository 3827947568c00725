# SPDX-License-Identifier: Apache-2.0
"""Which ranks ``comm=`` selects for an optimizer, a sharded module and a scaler."""

import gc
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ringcomm
from ringcomm import zero
from ringcomm.c10d import comm_argument
from ringcomm.c10d.comm_argument import find_communicator, find_device_type
from ringcomm.c10d.communicators import Communicators
from ringcomm.errors import ArgumentError
from ringcomm.optim import AdamW, GradScaler
from ringcomm.rendezvous import handles
from tests.support.rank_pool import default_group, same


def weights() -> list[torch.Tensor]:
    return [torch.arange(8.0).requires_grad_(), torch.ones(3).requires_grad_()]


def stepped(params, rank, **arguments) -> AdamW:
    """Returns an optimizer after one step with gradients that differ between ranks."""
    optimizer = AdamW(params, lr=0.25, weight_decay=0.0, **arguments)
    for param in params:
        param.grad = torch.arange(param.numel(), dtype=torch.float32) * (rank + 1)
    optimizer.step()
    return optimizer


def first_moments(optimizer) -> list[torch.Tensor]:
    return [each["exp_avg"] for each in optimizer.full_state_dict()["state"].values()]


def of_mean(world_size) -> list[torch.Tensor]:
    """Returns the moments after a step with the mean of the ranks' gradients."""
    params = weights()
    for param in params:
        param.grad = torch.arange(param.numel(), dtype=torch.float32) * ((world_size + 1) / 2)
    optimizer = torch.optim.AdamW(params)
    optimizer.step()
    return [optimizer.state[param]["exp_avg"] for param in params]


# The following functions run in processes of a RankPool.


def together_by_default(rank, world_size):
    """By default the ranks of torch's default group work together, with any backend."""
    optimizer = stepped(weights(), rank)
    assert optimizer.communicator.world_size == world_size
    assert optimizer.communicator.rank == rank
    same(first_moments(optimizer), of_mean(world_size))
    module = zero.shard(nn.Linear(4, 2), 2)
    of_module = AdamW(module.parameters())
    assert of_module.communicator is optimizer.communicator
    for comm in (default_group(), init_device_mesh("cpu", (world_size,)), optimizer.communicator):
        assert AdamW(weights(), comm=comm).communicator is optimizer.communicator
        assert AdamW(module.parameters(), comm=comm).communicator is optimizer.communicator
    with pytest.raises(ArgumentError, match="sharded over another communicator"):
        AdamW(module.parameters(), comm="alone")
    ours = getattr(default_group(), "communicator", None)
    assert ours in (None, optimizer.communicator)
    alone = stepped(weights(), rank, comm="alone")
    assert alone.communicator is None
    same(first_moments(alone), of_mean(2 * rank + 1))


def some_of_the_ranks(rank, world_size):
    """A group's communicator is built by its members; other ranks are refused at once."""
    group = dist.new_group([1])
    if rank == 1:
        assert find_communicator(group, "test", None) in (None, getattr(group, "communicator", 0))
    else:
        with pytest.raises(ArgumentError, match=rf"test on rank {rank}: .* got GroupMember"):
            find_communicator(group, "test", None)
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("replica", "shard"))
    for comm, operation in ((mesh, AdamW), (mesh["replica", "shard"], AdamW)):
        with pytest.raises(
            ArgumentError, match=r"2 dimensions \('replica', 'shard'\); .*'replica'"
        ):
            operation(weights(), comm=comm)
    found = AdamW(weights(), comm=mesh["shard"]).communicator
    assert (found.rank, found.world_size) == (rank % 2, 2)
    assert found is find_communicator(mesh.get_group("shard"), "test", None)
    across = AdamW(weights(), comm=mesh["replica"]).communicator
    assert across is not found and (across.rank, across.world_size) == (rank // 2, world_size // 2)
    total = torch.tensor([float(rank)])
    found.all_reduce(total)
    assert total.item() == 4 * (rank // 2) + 1
    outside = DeviceMesh("cpu", [0, 1])
    if rank > 1:
        with pytest.raises(ArgumentError, match=rf"on rank {rank}: .*Mesh of ranks \[0, 1\]"):
            zero.shard(nn.Linear(2, 2), comm=outside)
    else:
        assert find_communicator(outside, "test", None).world_size == 2


def forgotten(rank, world_size):
    """A communicator ends with its group; the next group has a new communicator."""
    first = find_communicator(None, "test", None)
    group = dist.new_group(list(range(world_size)))
    find_communicator(group, "test", None)
    assert len(comm_argument._built) == 2
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert len(comm_argument._built) == 1
    assert find_communicator(None, "test", None) is first


def forgotten_before(rank, world_size):
    """No communicator of a default group that this process has destroyed is left."""
    gc.collect()
    assert len(comm_argument._built) == 0
    assert find_communicator(None, "test", None).world_size == world_size


def under_ddp(rank, world_size):
    """DDP has averaged the gradients; a second mean over the two ranks does not change them."""
    seen = []
    for comm in (None, "alone"):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(4, 2))
        optimizer = AdamW(model.parameters(), lr=0.1, comm=comm)
        numbers = torch.Generator().manual_seed(rank)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(3, 4, generator=numbers)).square().mean().backward()
            optimizer.step()
        seen.append([param.detach().clone() for param in model.parameters()])
        with pytest.raises(ArgumentError, match=r"rank . of 2: module: .*DistributedDataParallel"):
            zero.shard(model)
    same(*seen)
    with ringcomm.local_world(1) as world:
        zero.remove_sharding(zero.shard(model, comm=world[0]))
    zero.shard(model, comm="alone")


def replaced(rank, world_size):
    """Parameters that the user has replaced may differ between ranks, and stay unchanged."""
    optimizer = AdamW(weights())
    mine = torch.full((3,), float(rank)).requires_grad_()
    optimizer.param_groups[0]["params"] = [mine]
    mine.grad = torch.ones(3)
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r'group 0, parameter 0: .*comm="alone"'):
            optimizer.step()
    assert torch.equal(mine, torch.full((3,), float(rank)))
    for arguments in ({"comm": "alone"}, {"comm": default_group()}):
        asked = AdamW(weights(), **arguments)
        asked.param_groups[0]["params"] = [torch.ones(3).requires_grad_()]
        asked.prepare()
    optimizer = AdamW(weights())
    optimizer.add_param_group({"params": [torch.ones(3).requires_grad_()]})
    optimizer.prepare()


def of_fsdp2(rank, world_size):
    """A DTensor's data differs between ranks, so no rank may use another rank's data."""
    module = nn.Linear(4, 2)
    fully_shard(module, mesh=init_device_mesh("cpu", (world_size,)))
    for comm in (None, "alone"):
        with pytest.raises(ArgumentError, match=r"group 0, parameter 0: .* got a DTensor"):
            AdamW(module.parameters(), comm=comm)
        with pytest.raises(ArgumentError, match=r"is sharded by fully_shard\(\) \(FSDP2\) already"):
            zero.shard(module, comm=comm)


def ringcomms_own_first(rank, world_size):
    """ringcomm's default group takes precedence over torch's."""
    with ringcomm.local_world(1) as world:
        assert world.run(lambda comm: find_communicator(None, "test", None) is comm) == [True]
    assert find_communicator(None, "test", None).world_size == world_size


def on_several_machines(rank, world_size):
    host, boot, namespace = handles.machine_identity()
    elsewhere = (host, f"{boot}-{rank}", namespace)
    with mock.patch("ringcomm.comm.host.rendezvous.machine_identity", lambda: elsewhere):
        optimizer = AdamW(weights())
    comm = optimizer.sharded_step().setting.comm
    assert comm is not None and comm.num_nodes == world_size


@pytest.mark.parametrize("backend", ["ringcomm", "gloo"])
def test_a_torch_group_is_the_default(two_ranks, four_ranks, backend):
    two_ranks.run(together_by_default, backend)
    four_ranks.run(some_of_the_ranks, backend)


def test_a_communicator_goes_with_its_group(two_ranks):
    two_ranks.run(forgotten, "gloo")
    # A RankPool keeps a group until the next group exists.
    two_ranks.run(forgotten_before, "gloo")


@pytest.mark.parametrize(
    "check", [under_ddp, replaced, of_fsdp2, ringcomms_own_first, on_several_machines]
)
def test_on_gloo(two_ranks, check):
    two_ranks.run(check, "gloo")


# In this process.


@pytest.fixture
def launched(monkeypatch):
    """Sets the variables of a process that a launcher has started, without a group."""

    def as_started(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return as_started


LAUNCHES = {
    "torchrun": {"RANK": "1", "WORLD_SIZE": "4"},
    "Open MPI": {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"},
    "MPICH": {"PMI_RANK": "1", "PMI_SIZE": "4"},
    "Slurm": {"SLURM_PROCID": "1", "SLURM_NTASKS": "4"},
}


@pytest.mark.parametrize("launcher", LAUNCHES)
def test_ranks_of_a_launcher_without_a_group_are_told(launched, launcher):
    launched(**LAUNCHES[launcher])
    said = (
        f"on rank 1 of 4: comm: {launcher} has .* call ringcomm.init_process_group\\(\\) or torch"
    )
    with pytest.raises(ArgumentError, match="AdamW " + said):
        AdamW(weights())
    with pytest.raises(ArgumentError, match="shard " + said):
        zero.shard(nn.Linear(2, 2))
    scaler, param = GradScaler(init_scale=1.0), torch.ones(2).requires_grad_()
    scaler.scale(param.sum()).backward()
    with pytest.raises(ArgumentError, match="GradScaler " + said):
        scaler.step(torch.optim.SGD([param], lr=1.0))
    assert AdamW(weights(), comm="alone").communicator is None
    zero.shard(nn.Linear(2, 2), comm="alone")


def test_alone_in_a_world_of_one(launched):
    launched(RANK="0", WORLD_SIZE="1")
    module = zero.shard(nn.Linear(2, 2))
    AdamW(module.parameters(), comm="alone").prepare()
    assert AdamW(weights()).communicator is None


@pytest.mark.parametrize("comm", [3, "all", object, dist.GroupMember])
def test_other_arguments_are_refused(comm):
    for made in (lambda: AdamW(weights(), comm=comm), lambda: GradScaler(comm=comm)):
        with pytest.raises(ArgumentError, match=r'comm: expected None, "alone", a .*Mesh, got'):
            made()


class StandIn(dist.ProcessGroup):
    """A torch group without a backend, so that threads can be its ranks."""

    def __init__(self, store=None, rank=0, world_size=2, types=("cuda",), bound=None):
        super().__init__(rank, world_size)  # type: ignore[call-arg]
        self.store, self.kinds, self.bound = store, types, bound

    group_name = "stand-in"  # type: ignore[assignment]

    def get_group_store(self):
        return self.store

    @property
    def _device_types(self):
        return [torch.device(kind) for kind in self.kinds]

    @property  # type: ignore[misc]
    def bound_device_id(self):
        return self.bound


def test_a_group_has_one_communicator_as_long_as_it_lives():
    store = dist.HashStore()

    def work(rank):
        group = StandIn(store, rank, types=("cuda", "cpu"))
        found = find_communicator(group, "test", torch.device("cpu"))
        assert find_communicator(group, "test", torch.device("meta")) is found
        assert find_device_type(group, "test") == "cpu"
        total = torch.tensor([rank + 1.0])
        found.all_reduce(total)
        return total.item(), found

    before = len(comm_argument._built)
    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(work, range(2)))
    assert [total for total, _ in ends] == [3.0, 3.0]
    gc.collect()
    assert len(comm_argument._built) == before  # the groups no longer exist
    for _, found in ends:
        found.close()


def test_a_group_of_one_rank_is_alone():
    assert find_communicator(StandIn(world_size=1), "test", None) is None


def mesh_of(group):
    """A mesh of one dimension for GPUs; this process needs no GPU."""
    mesh = mock.create_autospec(DeviceMesh, instance=True, device_type="cuda", ndim=1)
    mesh.get_group.return_value = group
    return mesh


@pytest.mark.parametrize(
    ("group", "device", "wanted"),
    [
        (mesh_of(StandIn(types=("cuda", "cpu"))), "meta", 1),
        (mesh_of(StandIn(types=("cuda", "cpu"))), "cuda:0", 0),
        (mesh_of(StandIn(types=("cuda", "cpu"))), None, 1),
        (StandIn(), None, 1),
        (StandIn(), "meta", 1),
        (StandIn(), "cuda:0", 0),
        (StandIn(), "cpu", None),
        (StandIn(types=("cuda", "cpu")), None, None),
        (StandIn(types=("cuda", "cpu")), "cuda:1", 1),
        (StandIn(types=("cuda", "cpu"), bound=torch.device("cuda", 0)), None, 0),
        (StandIn(types=("cuda", "cpu"), bound=torch.device("cuda", 0)), "cuda:1", 1),
    ],
)
def test_the_device_is_that_of_the_tensors_or_the_group(group, device, wanted):
    built = mock.Mock(spec=Communicators, host=None)
    built.on_device = lambda index, operation: index
    runtime = SimpleNamespace(current_device=lambda: 1, device_count=lambda: 2)
    with (
        mock.patch.object(Communicators, "over", return_value=built),
        mock.patch("ringcomm.cuda.current", return_value=runtime),
    ):
        assert (
            find_communicator(group, "test", None if device is None else torch.device(device))
            == wanted
        )
        if device is None:
            assert find_device_type(group, "test") == ("cpu" if wanted is None else "cuda")
