# SPDX-License-Identifier: Apache-2.0
"""Agreement of ranks: all ranks pass equal data and succeed, or all of them raise."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist

from ringcomm.comm.communicator import Communicator
from ringcomm.comm.host.arguments import ReduceOp
from ringcomm.errors import CheckpointError, CorruptedError, MismatchError, RingcommError, where
from ringcomm.json_reader import digest_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# A description has some hundred bytes per parameter; a peer that announces more sends garbage.
LARGEST_BYTES = 1 << 30

# ---- A few flags of every rank ------------------------------------------------------------------


def any_rank(comm: Communicator, mine: Sequence[bool]) -> list[bool]:
    """Returns for each flag in ``mine`` whether it is True on some rank; collective.

    It uses the host communicator, so that no rank waits for a device.
    """
    if comm.world_size == 1:
        return list(mine)
    flags = torch.tensor(mine, dtype=torch.int32, device="cpu")
    if not comm.launches:
        comm.all_reduce(flags, ReduceOp.MAX)
    else:
        with _faults_of_host(comm):
            host = comm.on_host()
            if host.timeout != comm.timeout:
                host.timeout = comm.timeout
            host.all_reduce(flags, ReduceOp.MAX)
    return [flag > 0 for flag in flags.tolist()]


@contextmanager
def _faults_of_host(comm: Communicator) -> Iterator[None]:
    """A context that ends ``comm``, as a fault does, if a call of its host communicator fails."""
    comm.engine.raise_if_unusable("all_reduce")
    try:
        yield
    except KeyboardInterrupt:
        comm.engine.interrupt()
        raise
    except RingcommError as error:
        # If the device has a fault, the fault has ended both communicators.
        comm.engine.raise_if_unusable("all_reduce")
        comm.abort(str(error))
        raise


# ---- JSON data of every rank --------------------------------------------------------------------


class Ranks(Protocol):
    """Ranks that can exchange data; if a rank is lost, :meth:`exchange` raises on the others."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def name(self) -> str:
        """This rank's name in messages."""
        ...

    def exchange(self, mine: Any) -> list[Any]:
        """Returns JSON data of every rank, by rank; collective."""
        ...


class RankMesh(Protocol):
    """The interface of a device mesh whose ranks have different local tensors."""

    @property
    def mesh(self) -> DeviceMesh: ...
    @property
    def number(self) -> int: ...
    def all_gather(self, text: bytes, device: torch.device) -> list[bytes]: ...


def gather_bytes(comm: Communicator, mine: bytes, size_bytes: int) -> list[bytes]:
    """Gathers each rank's bytes, padded with blanks to ``size_bytes``; collective."""
    padded = torch.frombuffer(bytearray(mine.ljust(size_bytes)), dtype=torch.uint8)
    everyone = torch.empty(comm.world_size * size_bytes, dtype=torch.uint8, device=comm.device)
    comm.all_gather_into_tensor(everyone, padded.to(comm.device))
    comm.engine.finish_host_side()
    # tolist() works in a torch without NumPy; the copy per rank is small.
    return [bytes(cast("list[int]", row.tolist())) for row in everyone.view(comm.world_size, -1)]


def exchange(comm: Communicator, mine: Any) -> list[Any]:
    """Returns JSON data of every rank, by rank; collective.

    Raises:
        CorruptedError: a rank sent something other than JSON data; the error names the rank.
    """
    text = json.dumps(mine).encode()
    size = torch.tensor([len(text)], dtype=torch.int64, device=comm.device)
    comm.all_reduce(size, ReduceOp.MAX)
    comm.engine.finish_host_side()
    head = where("comparing the ranks", comm.rank, comm.world_size)
    longest = int(size.item())
    if not len(text) <= longest <= LARGEST_BYTES:
        raise CorruptedError(
            f"{head}: expected descriptions of {len(text)} to {LARGEST_BYTES} bytes, and some rank "
            f"announced {longest}. Do all ranks run the same ringcomm?"
        )
    texts = gather_bytes(comm, text, longest)
    return [read_description(each, rank, head) for rank, each in enumerate(texts)]


def read_description(text: bytes, rank: int, operation: str) -> Any:
    """Parses the JSON data that ``rank`` sent.

    Raises:
        CorruptedError: the text is not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptedError(
            f"{operation}: rank {rank} sent text that is not JSON ({text[:80]!r}). Do all ranks "
            "run the same ringcomm?"
        ) from error


class ModelRanks:
    """The ranks that train one model together, which can exchange JSON data.

    Args:
        comm: the ranks with the same parts of the model; None if this rank is the only one.
        mesh: the mesh of the parts; None if each rank has the whole model. Ranks with the same part
            have consecutive numbers here, in the order of ``comm``.
    """

    def __init__(self, comm: Communicator | None, mesh: RankMesh | None = None) -> None:
        self._comm, self._mesh = comm, mesh
        self._replica, self._replicas = (0, 1) if comm is None else (comm.rank, comm.world_size)

    @property
    def rank(self) -> int:
        return self._replica + (0 if self._mesh is None else self._mesh.number * self._replicas)

    @property
    def world_size(self) -> int:
        return self._replicas * (1 if self._mesh is None else self._mesh.mesh.size())

    @property
    def name(self) -> str:
        """This rank's name in messages; on a mesh, the name has the launcher's rank number."""
        if self._mesh is None:
            return f"rank {self.rank} of {self.world_size}"
        return f"rank {dist.get_rank()} of {dist.get_world_size()}"

    def exchange(self, mine: Any) -> list[Any]:
        """Returns JSON data of every rank, by rank; collective."""
        row = [mine] if self._comm is None else exchange(self._comm, mine)
        if self._mesh is None:
            return row
        device = torch.device("cpu") if self._comm is None else self._comm.device
        texts = self._mesh.all_gather(json.dumps(row).encode(), device)
        head = where("comparing the ranks", self.rank, self.world_size)
        rows = (read_description(t, n * self._replicas, head) for n, t in enumerate(texts))
        return [each for row in rows for each in row]


def ranks_of(comm: Communicator | None, mesh: RankMesh | None) -> ModelRanks | None:
    """Returns the ranks that train one model together; None if this rank is the only one."""
    return None if comm is None and mesh is None else ModelRanks(comm, mesh)


# ---- All ranks have equal data ------------------------------------------------------------------

_SAME_MODEL = "Give all ranks the same parameters, in the same order, and the same options"


def check_agreement(
    comm: Communicator, operation: str, mine: Mapping[str, Any], advice: str = _SAME_MODEL
) -> None:
    """Compares JSON data of all ranks; collective.

    Args:
        comm: communicator of the ranks.
        operation: name of the operation, for the error.
        mine: this rank's data, as described in :func:`first_difference`.
        advice: what to do about a difference.

    Raises:
        MismatchError: the ranks' data differ; raised on every rank. It names rank 0, the lowest
            rank that differs from rank 0, and the first difference.
    """
    digest = bytes.fromhex(digest_of(mine))
    other = first_other(gather_bytes(comm, digest, len(digest)))
    if other:
        head = where(operation, comm.rank, comm.world_size)
        raise mismatch(head, exchange(comm, mine), other, advice)


def check_on_mesh(
    comm: Communicator | None, mesh: RankMesh | None, operation: str, mine: Mapping[str, Any]
) -> None:
    """Compares data that ranks with different local tensors must share; collective.

    Args:
        comm: the ranks with the same parts; None if this rank is the only one.
        mesh: the mesh of the parts; None if there is no mesh, so nothing to compare.
        operation, mine: as in :func:`check_agreement`.

    Raises:
        MismatchError: the ranks' data differ; raised on every rank.
    """
    if mesh is None:
        return
    ranks = ModelRanks(comm, mesh)
    other = first_other(ranks.exchange(digest_of(mine)))
    if other:
        everyone, names = ranks.exchange(mine), ranks.exchange(ranks.name)
        who = f"the ranks of the mesh {mesh.mesh}"
        raise mismatch(f"{operation} on {ranks.name}", everyone, other, names=names, who=who)


def first_other(values: Sequence[Any]) -> int:
    """Returns the lowest rank whose value differs from rank 0's; 0 if all values are equal."""
    return next((rank for rank, each in enumerate(values) if each != values[0]), 0)


def mismatch(
    head: str,
    everyone: Sequence[Any],
    other: int,
    advice: str = _SAME_MODEL,
    *,
    names: Sequence[str] = (),
    who: str = "the ranks",
) -> MismatchError:
    """Returns the error for ranks with different data; names two ranks and the first difference.

    Args:
        head: the operation and this rank.
        everyone: the data of each rank, by rank, as described in :func:`first_difference`.
        other: a rank whose data differ from rank 0's.
        advice: what to do.
        names: names of the ranks; default "rank 0" and so on.
        who: the name of the ranks together, such as "ranks".

    Raises:
        CorruptedError: the data of a rank are not a description.
    """
    first, second = (names[rank] if names else f"rank {rank}" for rank in (0, other))
    said = difference_in_words(everyone[0], everyone[other], (first, second), head)
    return MismatchError(f"{head}: {who} differ. {said}. {advice}")


def unequal(
    head: str,
    names: Iterable[str],
    rows: Sequence[Sequence[Any]],
    other: int,
    advice: str,
    *,
    kind: type[RingcommError] = MismatchError,
) -> RingcommError:
    """Returns the error for ranks whose values differ; the caller has exchanged the values.

    Args:
        head: the operation and this rank.
        names: the names of a rank's values.
        rows: the values of each rank, by rank.
        other: a rank whose values differ from rank 0's, such as :func:`first_other` of the rows.
        advice: what to do.
        kind: class of the error.
    """
    values = zip(names, rows[0], rows[other], strict=True)
    difference = next((name, first, second) for name, first, second in values if first != second)
    said = _in_words(*difference, ("rank 0", f"rank {other}"))
    return kind(f"{head}: the ranks differ. {said}. {advice}")


def difference_in_words(first: Any, other: Any, names: tuple[str, str], operation: str) -> str:
    """Returns a sentence on how the descriptions of two ranks differ, or raises CorruptedError."""
    try:
        return _in_words(*first_difference(first, other), names)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CorruptedError(
            f"{operation}: {names[0]} and {names[1]} differ, and one of them sent data that are "
            f"not a description: {error}. Do all ranks run the same ringcomm?"
        ) from error


def _in_words(label: str, first: Any, other: Any, names: tuple[str, str]) -> str:
    said = f"{label[0].upper()}{label[1:]} is {_short(first)} on {names[0]}"
    return f"{said} and {_short(other)} on {names[1]}"


# Sections of a description, in the order in which they are compared, and the name of an entry of
# each. Parameters come first, since a difference of parameters explains the others.
_LABELS = {
    "params": "parameter",
    "buckets": "bucket",
    "groups": "param group",
    "modules": "module",
    "options": "option",
}


def first_difference(first: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, Any, Any]:
    """Returns the first difference of two descriptions: its label and both values.

    A description may have lists under "groups" (hyperparameters) and "modules", a dict under
    "options", and the description of a layout under "layout".
    """
    sections = [{**each.get("layout", {}), **each} for each in (first, other)]
    for key, label in _LABELS.items():
        sides = [_entries(each.get(key, {})) for each in sections]
        for entry in sorted({**sides[0], **sides[1]}):
            a, b = (each.get(entry) for each in sides)
            if a != b:
                return f"{label} {entry}", a, b
    return "description", dict(first), dict(other)


def _entries(section: list[Any] | dict[str, Any]) -> dict[Any, Any]:
    return dict(enumerate(section)) if isinstance(section, list) else section


def _short(value: Any) -> str:
    if value is None:
        return "missing"
    if not isinstance(value, dict) or "shape" not in value:
        return json.dumps(value)
    name = f"{value['name']!r} " if value["name"] else ""
    extra = "" if value["trainable"] else ", frozen"
    extra += "" if value["tied_to"] is None else f", tied to parameter {value['tied_to']}"
    extra += "" if value["stride"] is None else f", stride {tuple(value['stride'])}"
    extra += ", a local tensor" if "divided_by" in value else ""
    kind = f"{value['dtype']} of shape {tuple(value['shape'])}"
    return f"{name}({kind} in group {value['group']}{extra})"


# ---- All ranks succeed, or none continues -------------------------------------------------------


class RankOutcome(NamedTuple):
    """How one rank's part of the work ended: the class and text of its exception, or "" and ""."""

    name: str
    kind: str
    text: str
    value: Any

    def error_class(self, otherwise: type[RingcommError]) -> type[RingcommError]:
        """Returns the class of the rank's exception, or ``otherwise`` if it is not ringcomm's."""
        kinds = {kind.__name__: kind for kind in RingcommError.__subclasses__()}
        return kinds.get(self.kind, otherwise)


@contextmanager
def _keeping(errors: list[Exception]) -> Iterator[None]:
    """Stores an exception instead of raising it, so that other ranks need not time out."""
    try:
        yield
    except Exception as error:
        errors.append(error)


def outcomes(
    ranks: Ranks, operation: str, error: Exception | None, value: Any = None
) -> list[RankOutcome]:
    """Returns how the work ended on each rank, and each rank's JSON data; collective.

    Raises:
        CorruptedError: a rank sent something other than an outcome; the error names the rank.
    """
    failed = ("", "") if error is None else (type(error).__name__, str(error))
    told = ranks.exchange([ranks.name, *failed, value])
    for rank, each in enumerate(told):
        if not (isinstance(each, list) and [*map(type, each[:3])] == [str] * 3 and len(each) == 4):
            raise CorruptedError(
                f"{operation}: expected the outcome of rank {rank}'s part, got {each!r:.80}"
            )
    return [RankOutcome(*each) for each in told]


@contextmanager
def agreed_load(ranks: Ranks | None, operation: str) -> Iterator[list[object]]:
    """A context for loading state; at its end all ranks continue, or all raise; collective.

    Yields:
        A list for values that must be equal on all ranks.

    Raises:
        Exception: the exception raised on this rank.
        RingcommError: the load failed on another rank; of the same class if the class is
            ringcomm's, otherwise CheckpointError.
        CheckpointError: the ranks' values differ.
    """
    same: list[object] = []
    errors: list[Exception] = []
    with _keeping(errors):
        yield same
    error = errors[0] if errors else None
    if ranks is not None:
        for each in outcomes(ranks, operation, error, same):
            if error is None and each.kind:
                error = each.error_class(CheckpointError)(
                    f"{operation}: {each.name} cannot load its state, so no rank does: {each.text}"
                )
                error.repeats = True
            if error is None and each.value != same:
                error = CheckpointError(
                    f"{operation}: {ranks.name} and {each.name} load states of different steps, "
                    f"{same} and {each.value}; pass shards that were saved together"
                )
    if error is not None:
        raise error


@contextmanager
def all_or_none(
    comm: Communicator | None, operation: str, mesh: RankMesh | None = None
) -> Iterator[None]:
    """A context for work that may fail on one rank; at its end all continue, or none; collective.

    Inside, no rank may wait for another rank, which may have failed.

    Args:
        comm: the ranks; None if this rank is the only one.
        operation: name of the operation, for the error.
        mesh: the mesh whose other ranks have other parts of the parameters; they continue together.

    Raises:
        Exception: the exception raised on this rank.
        RingcommError: another rank's exception; of the same class if the class is ringcomm's.
    """
    errors: list[Exception] = []
    with _keeping(errors):
        yield
    error = errors[0] if errors else None
    verdict, ranks = b"+" if error is None else b"-", ranks_of(comm, mesh)
    verdicts = [verdict] if comm is None else gather_bytes(comm, verdict, 1)
    if mesh is not None:
        device = torch.device("cpu") if comm is None else comm.device
        verdicts = mesh.all_gather(b"".join(verdicts), device)
    if all(set(each) == set(b"+") for each in verdicts):
        return
    told = [] if ranks is None else outcomes(ranks, operation, error)
    if error is not None:
        raise error
    assert ranks is not None  # None: only this rank can fail, and it has raised above
    first = next(each for each in told if each.kind)
    failed = first.error_class(RingcommError)(
        f"{operation} on {ranks.name}: {first.name} failed, so no rank goes on: {first.text}"
    )
    failed.repeats = True
    raise failed
