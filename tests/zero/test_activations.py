# SPDX-License-Identifier: Apache-2.0
"""Activations on a disk: values that a graph reads back, tensors never written, and memory use.

Training with them is in ``test_activations_in_training.py``.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ringcomm
from ringcomm import ArgumentError, Disk, UnsupportedError, zero
from ringcomm.examples.train_gpt import GPT, ModelConfig
from ringcomm.offload.scratch import Transfer
from ringcomm.zero.stages.activations import (
    PATIENCE,
    ActivationStore,
    Content,
    Receipt,
    expect_host,
    extent_of,
)
from tests.memory.disk_folder import skip_unless_disk
from tests.support.covering import covering

Tensor = torch.Tensor
PAGE = 4096
KIB = 1 << 10


@pytest.fixture
def folder(tmp_path):
    return skip_unless_disk(tmp_path)


@pytest.fixture
def acts(folder):
    """Writes every tensor of a page or more to the disk at once, through four pages of buffers."""
    return zero.activations_on(Disk(folder, buffer_bytes=4 * PAGE), least_bytes=PAGE)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(*shape, generator=generator)


def leaf(*shape: int, seed: int = 0) -> Tensor:
    return numbers(*shape, seed=seed).requires_grad_()


def gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Returns the gradients of ``function``, computed on fresh leaves with the inputs' values."""
    leaves = [each.detach().clone().requires_grad_(each.requires_grad) for each in inputs]
    function(*leaves).backward()
    return [each.grad for each in leaves if each.grad is not None]


def written(acts: zero.Activations) -> int:
    """Returns how many bytes were written, after all writes have ended."""
    for _, transfer in acts._store._writing:
        transfer.wait()
    return acts.bytes_written


def assert_nothing_left(acts: zero.Activations) -> None:
    """Asserts that no graph has data on the disk, and that only idle buffers hold memory."""
    gc.collect()
    store = acts._store
    assert acts.extents_in_use == 0
    written(acts)
    store._reap()
    assert acts.held_bytes == len(store._idle) * store._piece_bytes
    assert not (store._ahead or store._known or store._resident or store._writing)


def grad_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def assert_equal(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


# ---- what comes back ----------------------------------------------------------------------------


def many_views(x: Tensor) -> Tensor:
    """Saves tensors of many shapes, strides, offsets and dtypes, some of them of one storage."""
    x = x * 2
    first, second = x.chunk(2, dim=1)
    y = first.t().sin() @ (second * second) / 100
    y = y.exp().expand(3, *y.shape).reshape(3, -1) * x.mean()
    picked = y.gather(1, torch.arange(y.size(1)).flip(0).expand(3, -1))
    wide = picked.double().square() * (picked > 0) + picked.to(torch.complex64).abs()
    return (wide.bfloat16() ** 2).sum() + (first.select(0, 1) ** 3).sum()


@covering(strength=1, pages=[1, 5, 1000], resident_bytes=[0, 20 * KIB, 1 << 30])
def test_gradients_are_those_without(folder, pages, resident_bytes):
    x = leaf(24, 160)
    wanted = gradients(many_views, x)
    disk = Disk(folder, buffer_bytes=pages * PAGE, resident_bytes=resident_bytes)
    acts = zero.activations_on(disk, least_bytes=1)
    with acts:
        assert_equal(gradients(many_views, x), wanted)
    # One row of ``many`` is written to the disk even then: keeping the row would keep all rows.
    assert (written(acts) == PAGE) == (resident_bytes == 1 << 30)
    assert_nothing_left(acts)
    forward = zero.activations_on(Disk(folder), least_bytes=1)
    with forward:
        loss = many_views(y := x.detach().clone().requires_grad_())
    loss.backward()
    assert_equal([grad_of(y)], wanted)


def test_a_storage_is_written_once_however_many_tensors_share_it(folder):
    """Five nodes save a 32 KiB storage in four shapes; each node gets its own view of it back."""

    def function(x: Tensor) -> Tensor:
        y = x * 1.5
        rows, columns = y.view(64, 128), y.view(64, 128).t()
        return (y.sin().sum() + (rows**2).sum()) + ((columns**2).sum() + (y[4096:] ** 2).sum())

    x = leaf(8192)
    wanted = gradients(function, x)
    acts = zero.activations_on(Disk(folder, buffer_bytes=1 << 20), least_bytes=PAGE)
    with acts:
        assert_equal(gradients(function, x), wanted)
    assert written(acts) == 8192 * 4
    # The storage is read once, before backward releases it.
    assert acts.bytes_read == 8192 * 4


def test_a_storage_that_is_still_there_is_not_read(acts):
    x = leaf(8192)
    with acts:
        kept = x * 2
        out = kept.sin().sum()
    out.backward()
    assert (written(acts), acts.bytes_read) == (8192 * 4, 0)
    with acts:
        out = (x * 2).sin().sum()
    out.backward()
    assert (written(acts), acts.bytes_read) == (2 * 8192 * 4, 8192 * 4)


def test_new_storages_at_an_old_address_are_written(acts):
    """A new storage at a freed storage's address is not mistaken for the freed storage."""
    x = leaf(2048)
    with acts:
        y = x * 1
        loss, address = y.sin().sum(), y.untyped_storage()._cdata
        assert address in [at for at, _, _ in acts._store._known]
        del y
        # No storage gets this address while the weak reference exists.
        assert address not in [(x * 1).untyped_storage()._cdata for _ in range(100)]
        torch.autograd.grad(loss, x, retain_graph=True)
        assert not acts._store._known


def test_a_few_rows_of_a_data_set_do_not_bring_it_along(acts):
    data, weight = numbers(1000, 1024), leaf(1024, 4)
    with acts:
        loss = (data[500:504] @ weight).square().sum()
    wanted = 2 * data[500:504].t() @ (data[500:504] @ weight.detach())
    loss.backward()
    assert torch.equal(grad_of(weight), wanted)
    assert written(acts) == 4 * 1024 * 4
    assert extent_of(data[500:504]) == (500 * 4096, 504 * 4096)
    assert extent_of(data[:600]) == extent_of(data[:, ::7]) == (0, data.nbytes)


def test_several_backwards_and_gradients_of_gradients(acts):
    def twice(x: Tensor) -> list[Tensor]:
        y = (x * 1.5).sin()
        loss = (y * y).sum()
        first = torch.autograd.grad(loss, x, retain_graph=True)
        again = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad(again[0].square().sum(), x)
        return [*first, again[0].detach(), second]

    x = leaf(40, 100)
    wanted = twice(x)
    with acts:
        assert_equal(twice(x), wanted)
    assert acts.bytes_read >= written(acts) > 0
    del wanted
    assert_nothing_left(acts)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_has_its_inputs_on_the_disk_and_the_rest_in_memory(acts, reentrant):
    def layer(x: Tensor) -> Tensor:
        return (x.sin() * x.exp()).cos()

    def function(x: Tensor) -> Tensor:
        for _ in range(4):
            x = checkpoint(layer, x * 1, use_reentrant=reentrant, preserve_rng_state=False)
        return x.sum()

    x = leaf(2048)
    wanted = gradients(function, x)
    with acts:
        assert_equal(gradients(function, x), wanted)
    assert (written(acts), acts.bytes_read) == (4 * 8192, 4 * 8192)


def test_threads_share_one(acts):
    """Several threads run forwards at once; each graph's backward runs in another thread."""
    xs = [leaf(64, 200, seed=seed) for seed in range(3)]
    wanted = [gradients(many_views, x)[0] for x in xs]
    losses: list[Any] = [None] * 3

    def forward(number: int) -> None:
        with acts:
            losses[number] = many_views(xs[number])

    def in_threads(work: Callable[[int], None]) -> None:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    in_threads(forward)
    in_threads(lambda number: losses[number].backward())
    assert_equal([grad_of(x) for x in xs], wanted)
    losses.clear()
    assert_nothing_left(acts)


# ---- what is never written ----------------------------------------------------------------------


class Layers(nn.Module):
    """Saves whole weights, views of weights, a buffer, a view of the buffer, and one activation."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.register_buffer("mask", numbers(128, 64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.mask[:64]
        weight = self.second.weight
        return (x @ weight).sum() + (weight * weight.flip(0)).sum() + weight.detach().mul(x).sum()


def test_parameters_and_buffers_are_left_alone(folder, monkeypatch):
    torch.manual_seed(0)
    module = Layers()
    acts = zero.activations_on(Disk(folder), module=module, least_bytes=1)
    saved = watch_saved(monkeypatch)
    with acts:
        module(numbers(64, 64)).backward()
    own = {each.data_ptr() for each in (*module.parameters(), *module.buffers())}
    assert not own & {tensor.untyped_storage().data_ptr() for tensor in saved}
    # The two layers' inputs, and the copy of a weight that flip() makes.
    assert written(acts) == 3 * 64 * 64 * 4
    # Parameters may get new memory between forwards, with or without a backward in between.
    for turn in range(2, 4):
        for param in module.parameters():
            param.data = param.data.clone()
        module.mask = module.mask.clone()
        with acts:
            module(numbers(64, 64))
        assert written(acts) == 3 * turn * 64 * 64 * 4


def watch_saved(monkeypatch) -> list[Tensor]:
    saved: list[Tensor] = []
    save = ActivationStore.save

    def watched(self: ActivationStore, tensor: Tensor, watch: Any) -> Any:
        saved.append(tensor)
        return save(self, tensor, watch)

    monkeypatch.setattr(ActivationStore, "save", watched)
    return saved


def test_small_tensors_and_those_of_other_kinds_stay(acts):
    x = leaf(1023)
    sparse = torch.eye(2048).to_sparse().requires_grad_()
    dense = leaf(2048, 2)
    complex_ = leaf(4096).detach().to(torch.complex64).requires_grad_()
    with acts:
        (x * 1).sin().sum().backward()
        torch.sparse.mm(sparse, dense).sum().backward()
        ((complex_ * 1) * (complex_ * 1j).conj()).imag.sum().backward()
        torch.vmap(lambda row: (row * 1).sin())(leaf(8, 4096)).sum().backward()
    assert torch.equal(grad_of(x), x.detach().cos())
    # A tensor saved with a lazy conjugation returns conjugated: the sum is -|z|^2.
    assert torch.equal(grad_of(complex_), -2 * complex_.detach())


def test_expanded_tensors_are_as_large_as_their_memory(acts):
    x, y = leaf(1), leaf(100, 100)
    with acts:
        ((x * 2).expand(100, 100) * y).sum().backward()
    assert written(acts) == 0
    assert torch.equal(grad_of(y), (2 * x.detach()).expand(100, 100))


# ---- changes in place ---------------------------------------------------------------------------


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "the tensor": lambda y: y.add_(1),
    "a view": lambda y: y.view(-1)[3:].add_(1),
    "an alias": lambda y: y.detach().zero_(),
}


@pytest.mark.parametrize("elems", [10, 4096])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_in_place_are_refused_in_torchs_words(acts, change, elems):
    def message(save: Callable[[Tensor], Tensor]) -> str:
        y = (leaf(elems) * 1.5).exp()
        loss = save(y)
        with torch.no_grad():
            CHANGES[change](y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            loss.sum().backward()
        return str(caught.value).replace("ExpBackward0", "Exp").partition("Hint")[0]

    # The changed tensor is saved as its own node's output, and as another node's input.
    for save in (lambda y: y, lambda y: y * y):
        wanted = message(save)
        with acts:
            assert message(save) == wanted
    assert (written(acts) > 0) == (elems == 4096)
    assert_nothing_left(acts)


def test_a_change_after_which_a_tensor_is_saved_anew_is_none(acts):
    """A storage is saved at two versions; only a backward that needs the first version fails."""
    x = leaf(4096)
    with acts:
        y = x * 1.5
        unused = y.sin()
        y.add_(1)
        loss = y.sin().sum()
    loss.backward()
    assert torch.equal(grad_of(x), (x.detach() * 1.5 + 1).cos() * 1.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        unused.sum().backward()
    assert written(acts) == 2 * 4096 * 4


# ---- the file, and memory -----------------------------------------------------------------------


def test_graphs_that_are_dropped_free_their_extents(acts):
    def forward() -> Tensor:
        return many_views(leaf(64, 160))

    with acts:
        loss = forward()
        used, size = acts.extents_in_use, acts.size_bytes
        assert used > 10
        del loss
        assert acts.extents_in_use == 0
        for _ in range(20):
            forward()
        loss = forward()
        assert (acts.extents_in_use, acts.size_bytes) == (used, size)
        assert len(acts._store._receipts) <= used
        loss.register_hook(interrupt)
        for _ in range(2):
            y = forward()
            y.grad_fn.register_hook(lambda *_: interrupt())
            with pytest.raises(KeyError):
                y.backward()
            del y
        del loss
    assert_nothing_left(acts)


def interrupt(*_: Any) -> None:
    raise KeyError


def test_what_was_read_ahead_for_a_graph_that_is_dropped_goes(acts):
    def chain(x: Tensor) -> Tensor:
        for _ in range(8):
            x = x.sin()
        return x

    with acts:
        middle = chain(leaf(1024) * 1)
        loss = chain(middle).sum()
        torch.autograd.grad(loss, middle, retain_graph=True)
    assert 0 < acts.held_bytes <= 4 * PAGE
    del loss, middle
    assert_nothing_left(acts)


def test_graphs_may_take_turns(acts):
    """Backwards may run in forward order: data prefetched for one graph blocks no other graph."""
    xs = [leaf(1024, seed=seed) for seed in range(6)]
    with acts:
        losses = [((x * 1).sin() * (x * 2).cos()).exp().sum() for x in xs]
    for loss in losses:
        loss.backward()
    assert acts.bytes_read <= written(acts)
    assert_nothing_left(acts)
    for x in xs:
        y = x.detach().clone().requires_grad_()
        ((y * 1).sin() * (y * 2).cos()).exp().sum().backward()
        assert torch.equal(grad_of(x), grad_of(y))


def test_forward_waits_while_all_slots_are_under_way(acts, monkeypatch):
    """Forward waits for a write once all buffers are in use, even if no write ends by itself."""
    monkeypatch.setattr(Transfer, "done", lambda _: False)
    store = acts._store
    with acts:
        y = leaf(1024)
        for _ in range(20):
            y = y.sin()
            assert acts.held_bytes == len(store._writing) * PAGE <= 4 * PAGE
    assert len(store._writing) == 4


def test_room_that_slots_and_wrong_guesses_take_is_found_again(folder, monkeypatch):
    """Backward can read ahead after forward filled all buffers, or a read for another graph."""
    disk = Disk(folder, buffer_bytes=64 * PAGE)
    acts = zero.activations_on(disk, least_bytes=1)
    store = acts._store

    def chain(x: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(100):
            last, x = x, x.sin()
        return last, x.sum()

    with acts:
        last, left = chain(leaf(1024) * 1)
        _, taken = chain(leaf(1024) * 1)
    written(acts)  # a buffer is free only when its write has ended
    torch.autograd.grad(left, last, retain_graph=True)
    assert len(store._ahead) > 20
    not_ahead = []
    bring = store.bring

    def watched(receipt: Receipt, backward: int) -> Any:
        assert receipt.content is not None
        not_ahead.append(receipt.content.find_storage() is None)
        return bring(receipt, backward)

    monkeypatch.setattr(store, "bring", watched)
    taken.backward()
    # Data that was read ahead for the first graph is released after PATIENCE reads.
    assert PATIENCE <= sum(not_ahead) <= PATIENCE + 2
    assert not any(not_ahead[PATIENCE + 2 :])
    not_ahead.clear()
    left.backward()
    assert not any(not_ahead)
    del last, left, taken
    assert_nothing_left(acts)


def test_it_ends_with_the_last_that_refers_to_it(folder):
    acts = zero.activations_on(Disk(folder), least_bytes=1)
    gone = weakref.ref(acts)
    x = leaf(100)
    with acts:
        loss = (x * 1).sin().sum()
    del acts
    assert gone() is not None
    loss.backward()
    del loss
    assert gone() is None


class PeakBytes(TorchDispatchMode):
    """Measures the peak of the bytes in storages that operators see while it is active.

    Torch's weak references to storages do not keep their memory alive.
    """

    def __init__(self, ignored: set[int]) -> None:
        super().__init__()
        self.peak = 0
        self._total = 0
        self._ignored = ignored
        self._alive: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in (*args, *(out if isinstance(out, (tuple, list)) else [out])):
            if isinstance(each, Tensor) and each.device.type == "cpu":
                storage = each.untyped_storage()
                key = storage._cdata
                if key not in self._ignored and key not in self._alive:
                    self._alive[key] = (StorageWeakRef(storage), storage.nbytes())
                    self._total += storage.nbytes()
                    # Look for freed storages only if they could hide a new peak.
                    if self._total > self.peak:
                        self._count()
        return out

    def _count(self) -> None:
        # No new storage gets an address while a weak reference to the old storage exists.
        self._alive = {key: each for key, each in self._alive.items() if not each[0].expired()}
        self._total = sum(size for _, size in self._alive.values())
        self.peak = max(self.peak, self._total)


def peak_of(model: GPT, tokens: Tensor, acts: Any) -> int:
    mode = PeakBytes({each.untyped_storage()._cdata for each in model.parameters()})
    with mode:
        if acts is None:
            model(tokens[:, :-1], tokens[:, 1:]).backward()
        else:
            with acts:
                model(tokens[:, :-1], tokens[:, 1:]).backward()
    grads = sum(each.grad.nbytes for each in model.parameters() if each.grad is not None)
    model.zero_grad()
    return mode.peak - grads


def test_memory_is_buffers_what_is_resident_and_what_a_layer_holds(folder):
    """A forward and backward of 12 layers peak at one layer's bytes, buffers and resident bytes.

    The peak excludes the gradients. The peak of a model of one layer is measured separately.
    """
    torch.manual_seed(0)
    tokens = torch.randint(0, 256, (4, 257))
    one, model = (GPT(ModelConfig(32, depth, 2, 256)) for depth in (1, 12))
    layer, usual = peak_of(one, tokens, None), peak_of(model, tokens, None)
    buffers, resident = 1 << 19, 1 << 20
    for resident_bytes in (0, resident):
        disk = Disk(folder, buffer_bytes=buffers, resident_bytes=resident_bytes)
        acts = zero.activations_on(disk, module=model)
        found = peak_of(model, tokens, acts)
        assert found <= layer + buffers + resident_bytes
        assert 3 * found < usual
        # A lower bound as well: the formula is not loose, and the resident bytes were counted.
        assert found >= layer / 3 + resident_bytes
        assert acts.held_bytes <= buffers + resident_bytes


# ---- arguments ----------------------------------------------------------------------------------


def test_arguments_are_checked(folder):
    on: Any = zero.activations_on
    refused: list[tuple[str, Callable[[], Any]]] = [
        ("disk: expected a ringcomm.Disk, got '/x'", lambda: on("/x")),
        ("module: expected torch modules, got 3", lambda: on(Disk("x"), module=[3])),
        ("least_bytes: .*got 0", lambda: on(Disk("x"), least_bytes=0)),
        ("least_bytes: .*got True", lambda: on(Disk("x"), least_bytes=True)),
    ]
    for words, call in refused:
        with pytest.raises(ArgumentError, match=f"activations_on: {words}"):
            call()
    with pytest.raises(ringcomm.DiskError, match=r"activations of process \d+: .*No such file"):
        zero.activations_on(Disk(folder / "absent"))


def test_devices_are_refused(monkeypatch, folder):
    with pytest.raises(UnsupportedError, match="expected tensors on the CPU, got one on cuda:1"):
        expect_host(torch.device("cuda", 1))
    asked: list[torch.device] = []
    monkeypatch.setattr("ringcomm.zero.stages.activations.expect_host", asked.append)
    with zero.activations_on(Disk(folder), module=nn.Linear(2, 2)):
        assert len(asked) == 2
        (leaf(2) * leaf(2).sin()).sum()
    assert len(asked) == 3


def test_contents_are_of_a_storage_of_the_same_size():
    """Finds no storage if its memory was taken away, as FSDP does: it must not be read."""
    tensor = numbers(1000)
    content = Content(0, tensor.untyped_storage(), 0, 4000, 0)
    assert content.find_storage() is not None
    tensor.untyped_storage().resize_(0)
    assert content.find_storage() is None
