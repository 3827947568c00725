# SPDX-License-Identifier: Apache-2.0
"""Parameters on a disk at stage 3: bits equal to memory, constant buffers, and failing disks."""

from __future__ import annotations

import gc
import os
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ringcomm
from ringcomm import Disk, DiskError, RingcommError, zero
from ringcomm.errors import ArgumentError, MismatchError
from ringcomm.examples.train_gpt import GPT, ModelConfig
from ringcomm.offload import scratch
from ringcomm.offload.scratch import PAGE_BYTES, DiskChunk, DiskChunks, ScratchFile
from ringcomm.optim import AdamW, AdamW8bit, AdamWOptions, Muon, state_offload
from ringcomm.zero.stages.buckets import DiskBucket
from ringcomm.zero.stages.sharding import engine_of
from tests.memory.disk_folder import skip_unless_disk
from tests.optim.test_state_offload import Broken
from tests.support.covering import in_test_all
from tests.support.heap_use import settled_heap_bytes
from tests.zero.checkpoint.states import files_below
from tests.zero.checkpoint.test_pretrained import (
    PRECISIONS,
    meta_net,
    new_net,
    two_steps,
    weights_of,
)
from tests.zero.job import BF16, Job
from tests.zero.models import MODELS, assert_same_bits, new_model

Tensor = torch.Tensor
REMAINDER = replace(BF16, master="remainder")
# Optimizers and precisions; every second one keeps its state on a disk as well.
RUNS: dict[str, tuple[Any, Any, bool]] = {
    "AdamW, remainders, all on a disk": (AdamW, REMAINDER, True),
    "AdamW8bit": (AdamW8bit, BF16, False),
    "Muon, masters, all on a disk": (Muon, BF16, True),
}


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    """Buffers of a few chunks of the tests' buckets, on a disk."""
    return Disk(skip_unless_disk(tmp_path), buffer_bytes=16 << 10, resident_bytes=4 << 10)


def job_of(comm: Any, base: Any, run: tuple[Any, Any, bool], disk: Disk | None) -> Job:
    kind, precision, state_too = run
    small = state_offload.LEAST_BUFFERS * state_offload.LARGEST_ELEM_BYTES * 512
    state = None if disk is None or not state_too else Disk(disk.path, small)
    options = {"offload_params": disk}
    return Job(
        comm,
        base,
        3,
        precision,
        AdamWOptions(offload_state=state),
        scaled=True,
        kind=kind,
        zero_options=options,
    )


@pytest.mark.parametrize("name", RUNS)
def test_bits_and_files_are_those_of_memory(worlds, disk, tmp_path, name):
    """Bits equal those in memory, with clipping and a skipped step; checkpoints load in both."""
    base, run = new_model("narrow gpt"), RUNS[name]
    world = 1 + list(RUNS).index(name) % 3
    media = {"memory": None, "disk": disk}

    def first(comm):
        states = []
        for medium, kept_on in media.items():
            job = job_of(comm, base, run, kept_on)
            job.train("narrow gpt", 2)
            job.save(tmp_path / f"to {medium}")
            states.append(job.state())
        return states

    def second(comm):
        states = []
        for medium, kept_on in (("memory", disk), ("disk", None)):
            job = job_of(comm, base, run, kept_on)
            job.load(tmp_path / f"to {medium}")
            job.train("narrow gpt", 1)
            states.append(job.state())
        return states

    for states in worlds(world).run(first):
        assert_same_bits(*states)
    memory, on_disk = (files_below(tmp_path / f"to {medium}") for medium in media)
    assert memory.keys() == on_disk.keys() and len(memory) > world
    for file, content in memory.items():
        assert content == on_disk[file], file
    for states in worlds(world % 3 + 1).run(second):
        assert_same_bits(*states)


def test_what_is_no_disk_is_refused():
    with pytest.raises(
        ArgumentError, match=r"offload_params: expected a ringcomm\.Disk or None, got '/nvme'"
    ):
        zero.ZeroOptions(offload_params="/nvme")  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", [None, BF16, *in_test_all(REMAINDER)])
def test_access_reads_and_writes_what_is_on_the_disk(worlds, disk, precision):
    """Masters, shards, unsharded parameters, swapped-in values and whole states match memory."""
    base = new_model("narrow gpt")
    name = "blocks.0.attention.project_in.weight"

    def work(comm):
        found = []
        for kept_on in (None, disk):
            job = job_of(comm, base, (AdamW, precision, kept_on is not None), kept_on)
            module = job.module
            job.train("narrow gpt", 2)
            param = module.get_parameter(name)
            zero.set_master(param, zero.get_master(param) + 0.3)
            average = zero.get_state(param, "exp_avg")
            assert average is not None
            zero.set_state(param, "exp_avg", average * 2)
            seen = {"local": zero.get_master(param, local=True)}
            with zero.writing_shards(module) as shards:
                for shard in shards.values():
                    shard.values.mul_(1.5)
            with zero.unsharded(module, write_from=0), torch.no_grad():
                param.add_(comm.rank + 1.0)
            with zero.unsharded(param, write_from=1), torch.no_grad():
                param.mul_(0.5)
            zeros = {
                key: torch.zeros_like(shard.values)
                for key, shard in zero.local_shards(module).items()
            }
            with zero.exchanged(module, zeros):
                seen.update((f"zeros.{k}", v) for k, v in zero.full_state_dict(module).items())
            with torch.no_grad():
                tokens = torch.arange(16).view(1, 16)
                seen["loss"] = module(tokens, tokens)
            shards = zero.local_shards(module)
            seen.update((f"shard.{k}", shard.values.clone()) for k, shard in shards.items())
            job.train("narrow gpt", 1)
            whole = zero.full_state_dict(module)
            with zero.unsharded(module, write_from=0):
                module.load_state_dict({key: value * 0.75 for key, value in whole.items()})
            job.train("narrow gpt", 1)
            found.append({**seen, **job.state()})
        assert_same_bits(*found)

    worlds(2).run(work)


def test_shards_that_were_asked_for_once_follow_what_is_on_the_disk(worlds, disk):
    """Shards requested once stay valid: averages read them and writes reach the disk."""
    base = new_model("narrow gpt")
    written = "blocks.0.attention.project_in.weight"

    def work(comm):
        found = []
        for kept_on in (None, disk):
            job = job_of(comm, base, (AdamW, BF16, True), kept_on)
            shards = zero.local_shards(job.module)
            mean = {name: shard.values.float() for name, shard in shards.items()}
            for _ in range(2):
                job.train("narrow gpt", 1)
                for name, shard in shards.items():
                    mean[name].lerp_(shard.values.float(), 0.25)
            with zero.writing_shards(job.module) as inside:
                shards[written].values.mul_(2.0)
                zero.local_shards(job.module)[written].values.add_(1.0)
                inside[written].values.mul_(2.0)
            with zero.exchanged(job.module, mean):
                mean.update((f"inside.{name}", s.values.clone()) for name, s in shards.items())
            found.append({**mean, **job.state()})
        assert_same_bits(*found)

    worlds(2).run(work)


def test_a_train_state_is_taken_back(worlds, disk):
    base = new_model("narrow gpt")

    def work(comm):
        job = job_of(comm, base, (AdamW, BF16, True), disk)
        job.train("narrow gpt", 2)
        saved = zero.TrainState(job.module, job.optimizer).state_dict()
        wanted = job.state()
        other = job_of(comm, base, (AdamW, BF16, True), disk)
        other.train("narrow gpt", 1)
        zero.TrainState(other.module, other.optimizer).load_state_dict(saved)
        found = other.state()
        kept = {name for name in wanted if not name.startswith("lr.")}
        assert_same_bits({n: found[n] for n in kept}, {n: wanted[n] for n in kept})

    worlds(2).run(work)


@pytest.mark.parametrize("kind", PRECISIONS)
def test_weights_of_files_go_to_the_disk_and_from_there_to_files(worlds, disk, tmp_path, kind):
    """Loads into a meta module and into one that trains, within the same small buffers."""
    precision, adamw = PRECISIONS[kind]
    files = [tmp_path / f"{number}.safetensors" for number in (1, 2)]
    for number, file in enumerate(files):
        save_file(weights_of(new_net(number)), file)
    small_disk = replace(disk, buffer_bytes=PAGE_BYTES, resident_bytes=0)
    modules = [meta_net() for _ in range(4)]

    def work(comm):
        states = []
        for number, (folder, kept) in enumerate((("memory", None), ("disk", small_disk))):
            module: Any = modules[2 * comm.rank + number]
            options = zero.ZeroOptions(precision=precision, bucket_elems=512, offload_params=kept)
            zero.shard(module, 3, comm=comm, options=options, init=zero.pretrained(files[0]))
            found = {f"read.{n}": t for n, t in zero.full_state_dict(module).items()}
            found.update(two_steps(module, comm.rank, adamw))
            zero.load_pretrained(module, files[1])
            zero.save_pretrained(module, tmp_path / folder)
            states.append({**found, **zero.full_state_dict(module)})
            if kept is not None:
                sizes = [chunk.size_bytes for chunk in chunks_of(module)]
                assert store_of(module).most_held_bytes == PAGE_BYTES < sum(sizes)
        assert_same_bits(*states)

    worlds(2).run(work)
    memory, on_disk = (files_below(tmp_path / medium) for medium in ("memory", "disk"))
    assert memory == on_disk


# ---- memory ------------------------------------------------------------------------------------


def store_of(module: Any) -> DiskChunks:
    store = engine_of(module, "test").setup.store
    assert store is not None
    return store


def chunks_of(module: Any) -> list[DiskChunk]:
    engine = engine_of(module, "test")
    buckets = (*engine.stored, *engine.setup.stored_frozen)
    return [bucket.disk_chunk for bucket in buckets if isinstance(bucket, DiskBucket)]


def pages_bytes(chunks: list[DiskChunk]) -> int:
    """Returns the bytes of chunk memory to which the system has given pages."""
    count = 0
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        for chunk in chunks:
            pages = chunk.size_bytes // PAGE_BYTES
            pagemap.seek(chunk.memory.data_ptr() // PAGE_BYTES * 8)
            entries = memoryview(pagemap.read(8 * pages)).cast("Q")
            count += sum(entry >> 63 for entry in entries)
    return count * PAGE_BYTES


def test_chunks_in_memory_are_the_buffers_whatever_the_number_of_layers(worlds, disk):
    """Chunks take only the buffers' memory, and no heap, for any number of layers."""
    torch.manual_seed(1)
    base = GPT(ModelConfig(32, 6, 2, 16))
    disk = replace(disk, buffer_bytes=24 << 10, resident_bytes=12 << 10)
    most = disk.buffer_bytes + disk.resident_bytes

    def work(comm):
        heaps = []
        for kept_on in (None, disk):
            gc.collect()
            comm.barrier()
            before = ringcomm.heap_stats()["used_bytes"]
            comm.barrier()
            job = job_of(comm, base, (AdamW, None, False), kept_on)
            comm.barrier()
            heaps.append(ringcomm.heap_stats()["used_bytes"] - before)
            comm.barrier()
            if kept_on is not None:
                chunks = chunks_of(job.module)
                resident = sum(each.size_bytes for each in chunks if each.is_resident)
                assert 0 < resident <= disk.resident_bytes
                for _ in range(2):
                    job.train("narrow gpt", 1)
                    assert resident <= pages_bytes(chunks) <= most
                store = store_of(job.module)
                assert store.most_held_bytes <= disk.buffer_bytes
                assert sum(each.size_bytes for each in chunks) > 1.5 * most
                sizes = [bucket._kept_elems * 4 for bucket in job.module._ringcomm_engine.stored]
            job.optimizer.prepare()
            zero.remove_sharding(job.module)
        return heaps, sum(sizes)

    settled_heap_bytes()  # the heap's change below must come from the chunks alone
    outcomes = worlds(2).run(work)
    (memory, on_disk), _ = outcomes[0]
    assert memory - on_disk == sum(size for _, size in outcomes)


@pytest.mark.parametrize(
    ("precision", "reads"), [(None, 3), (BF16, 2), *in_test_all((REMAINDER, 3))]
)
def test_a_step_writes_each_chunk_once_and_reads_it_where_it_must(worlds, disk, precision, reads):
    """A step reads what forward and backward need beyond the buffers; a skipped one moves none."""
    base = new_model("narrow gpt")
    disk = Disk(disk.path, PAGE_BYTES * (4 if precision is None else 2))

    def work(comm):
        job = job_of(comm, base, (AdamW, precision, False), disk)
        store, chunks = store_of(job.module), chunks_of(job.module)
        total = sum(each.size_bytes for each in chunks)
        job.train("narrow gpt", 1)
        moved = []
        for _ in range(2):  # the first of these steps is skipped
            store.wait()
            read, written = store.file.bytes_read, store.file.bytes_written
            job.train("narrow gpt", 1)
            store.wait()
            moved.append((store.file.bytes_read - read, store.file.bytes_written - written))
        (_, written_0), (read, written) = moved
        assert (written_0, written) == (0, total)
        assert reads * total - 4 * disk.buffer_bytes <= read <= reads * total

    worlds(2).run(work)


# ---- faults ------------------------------------------------------------------------------------


def small_job(comm: Any, base: Any, disk: Disk) -> Job:
    return job_of(comm, base, (AdamW, None, False), replace(disk, resident_bytes=0))


def outcome_of(comm: Any, base: Any, disk: Disk) -> str:
    """Returns the call in which a rank raised the disk's error, or "nowhere"."""
    doing = "shard"
    try:
        job = small_job(comm, base, disk)
        for turn in range(2):
            doing = f"forward {turn}"
            loss = job.module(*MODELS["mlp"][1](torch.Generator().manual_seed(turn), turn))
            doing = f"backward {turn}"
            loss.backward()
            doing = f"step {turn}"
            job.optimizer.step()
            job.optimizer.zero_grad()
        doing = "end"
        zero.full_state_dict(job.module)
    except DiskError as error:
        assert "an error of the test" in str(error)
        if doing != "shard":
            with pytest.raises(RingcommError):
                job.optimizer.step()
        return doing
    return "nowhere"


def test_all_ranks_learn_of_an_error_at_any_transfer(worlds, disk, monkeypatch):
    """All ranks raise in the same call, without waiting for the rank whose disk has failed."""
    base, broken = new_model("mlp"), Broken(monkeypatch, rank=1)
    disk = replace(disk, buffer_bytes=PAGE_BYTES)
    world = worlds(2)
    assert world.run(outcome_of, base, disk) == ["nowhere", "nowhere"]
    total = broken.count
    seen = set()
    for at in range(total):
        broken.at, broken.count = at, 0
        one, other = world.run(outcome_of, base, disk)
        assert one == other, at
        seen.add(one.split()[0])
    assert seen == {"shard", "forward", "backward", "step", "end"}


def test_without_the_agreement_the_others_would_not_learn_of_it(worlds, disk, monkeypatch):
    """Negative control: without the agreement, a forward continues with lost parameters."""
    base, broken = new_model("mlp"), Broken(monkeypatch, rank=1)
    disk = replace(disk, buffer_bytes=PAGE_BYTES)
    in_forward = None
    while in_forward is None:
        broken.at, broken.count = broken.at + 1, 0
        if worlds(2).run(outcome_of, base, disk)[0].startswith("forward"):
            in_forward = broken.at
    monkeypatch.setattr(DiskBucket, "_agree", lambda self, fault: None)
    broken.count = 0
    outcomes = worlds(2).run(outcome_of, base, disk)
    assert not any(outcome.startswith("forward") for outcome in outcomes)


def test_a_file_that_is_cut_is_found_on_all_ranks(worlds, disk):
    base = new_model("narrow gpt")

    def work(comm):
        job = small_job(comm, base, disk)
        job.train("narrow gpt", 1)
        store = store_of(job.module)
        store.wait()
        comm.barrier()
        if comm.rank == 1:
            os.ftruncate(store.file._file.descriptor, 0)
        with pytest.raises(DiskError, match=r"parameters of rank 1: read of extent \d+ in"):
            job.train("narrow gpt", 1)

    worlds(2).run(work)


def test_ranks_that_unshard_different_parameters_are_told_so(worlds, disk):
    base = new_model("narrow gpt")

    def work(comm):
        module = small_job(comm, base, disk).module
        with zero.unsharded(module):
            param = module.get_parameter(f"blocks.{comm.rank}.attention.project_in.weight")
        own = f'"blocks.{comm.rank}.*"'
        on_0, on_1 = (own, '"another one"') if comm.rank == 0 else ('"another one"', own)
        said = f"Unsharded parameter is {on_0} on rank 0 and {on_1} on rank 1"
        with pytest.raises(MismatchError, match=said), zero.unsharded(param):
            pass

    worlds(2).run(work)


def test_a_chunk_that_is_used_unasked_raises(disk):
    """A caller that forgets to bring the chunk into memory would otherwise read zeros."""
    base = new_model("mlp")
    with ringcomm.local_world(1) as world:

        def work(comm):
            job = small_job(comm, base, disk)
            job.optimizer.prepare()
            bucket = engine_of(job.module, "test").stored[0]
            assert isinstance(bucket, DiskBucket)
            for use in (lambda: bucket.kept, lambda: bucket.own):
                with pytest.raises(AssertionError, match="is on the disk"):
                    use()
            owned = job.optimizer.sharded_step().buckets[0]
            with pytest.raises(AssertionError, match="not in memory"):
                owned.own_params  # noqa: B018
            with bucket.here():
                assert owned.own_params.equal(bucket.kept)

        world.run(work)


def test_a_disk_without_room_leaves_the_module_as_it_was(worlds, disk, monkeypatch):
    add = scratch.ScratchFile.add_extent

    def full(self, size_bytes):
        if "rank 1" in self.what and self.size_bytes > 10_000:
            raise DiskError(f"{self.what}: no room")
        return add(self, size_bytes)

    monkeypatch.setattr(scratch.ScratchFile, "add_extent", full)
    base = new_model("narrow gpt")

    def work(comm):
        module = deepcopy(base)
        with pytest.raises(DiskError, match="no room"):
            zero.shard(module, 3, comm=comm, options=zero.ZeroOptions(offload_params=disk))
        assert_same_bits(module.state_dict(), base.state_dict())

    worlds(2).run(work)


# ---- state on a disk alone --------------------------------------------------------------------

# By stage: the optimizer and the precision of the run.
STATE_RUNS: dict[int, tuple[Any, Any]] = {
    0: (AdamW, REMAINDER),
    2: (torch.optim.Adagrad, None),
}


@pytest.fixture
def on_disk(tmp_path: Path) -> AdamWOptions:
    folder = skip_unless_disk(tmp_path)
    buffer_bytes = state_offload.LEAST_BUFFERS * state_offload.LARGEST_ELEM_BYTES * 512
    return AdamWOptions(offload_state=Disk(folder, buffer_bytes, resident_bytes=16_384))


@pytest.mark.parametrize("stage", STATE_RUNS)
def test_a_checkpoint_is_that_of_memory_and_goes_on_anywhere(worlds, on_disk, tmp_path, stage):
    """Files are equal; each resumes at another stage, in memory or on a disk, and on two ranks."""
    base, (kind, precision) = new_model("narrow gpt"), STATE_RUNS[stage]
    more = {"kind": kind, **({"initial_accumulator_value": 0.5} if stage == 2 else {})}

    def first(comm):
        for name, adamw in (("memory", AdamWOptions()), ("disk", on_disk)):
            job = Job(comm, base, stage, precision, adamw, scaled=True, **more)
            job.train("narrow gpt", 2)
            job.save(tmp_path / name)

    def second(comm):
        jobs = []
        for name, adamw in (("memory", on_disk), ("disk", AdamWOptions())):
            job = Job(comm, base, (stage + 1) % 4, precision, adamw, scaled=True, **more)
            job.load(tmp_path / name)
            job.train("narrow gpt", 1)
            jobs.append(job.state())
        return jobs

    worlds(3).run(first)
    memory, disk = (files_below(tmp_path / name) for name in ("memory", "disk"))
    assert memory.keys() == disk.keys() and len(memory) > 3
    for name, content in memory.items():
        assert content == disk[name], name
    for jobs in worlds(2).run(second):
        assert_same_bits(*jobs)


def test_all_ranks_learn_of_an_error_at_any_read_of_a_preparation(worlds, on_disk, monkeypatch):
    """Preparation reads chunks where masters take over the parameters before they are rounded."""
    base = new_model("narrow gpt")
    read, reads = ScratchFile.read, []

    def fails(self, extent, memory):
        if "rank 1" in self.what:
            reads.append(extent)
            if len(reads) - 1 == failing:
                raise DiskError(f"{self.what}: an error of the test")
        return read(self, extent, memory)

    monkeypatch.setattr(ScratchFile, "read", fails)

    def work(comm):
        job = Job(comm, base, 3, BF16, on_disk)
        try:
            job.optimizer.prepare()
        except DiskError as error:
            return str(error)
        return None

    failing, world = -1, worlds(2)
    assert world.run(work) == [None, None]
    for failing in range(0, len(reads), 5):
        reads.clear()
        assert all("an error of the test" in text for text in world.run(work)), failing
    assert failing > 5
