"""Agreement of the ranks: all step the same model with the same options, or none steps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist

from ringcomm.comm.communicator import Communicator
from ringcomm.comm.host.arguments import ReduceOp
from ringcomm.errors import CheckpointError, CorruptedError, MismatchError, RingcommError, where
from ringcomm.optim.dtensors import PartMesh
from ringcomm.optim.layout import digest_of

# A description has some hundred bytes per parameter; a peer that announces more than this is not
# believed.
LARGEST_BYTES = 1 << 30


@dataclass(frozen=True)
class Asked:
    """A rank's request to its step or clipping, which the ranks compare before they reduce.

    Attributes:
        operation: compared, too, with what is told, and named in errors.
        told: arguments that must be equal on all ranks, as plain JSON types; none of a step.
        refusal: why this rank cannot do it, or None.
    """

    operation: str = "optimizer.step"
    told: Mapping[str, Any] = field(default_factory=dict)
    refusal: Exception | None = None


#: A mere step, which asks nothing.
STEP = Asked()


def check_agreement(comm: Communicator, operation: str, mine: Mapping[str, Any]) -> None:
    """Compares plain JSON data of all ranks; collective.

    Args:
        comm: communicator of the ranks.
        operation: name of the operation, for the error.
        mine: this rank's data: a layout's description under "layout", options under "options" and
            groups' hyper-parameters under "groups".

    Raises:
        MismatchError: the ranks' data differ; raised on every rank, naming rank 0, the lowest rank
            that differs from it, and the first difference.
    """
    digest = bytes.fromhex(digest_of(mine))
    digests = _all_gather_bytes(comm, digest, len(digest))
    if len(set(digests)) == 1:
        return
    everyone = exchange(comm, mine)
    other = next(rank for rank, each in enumerate(digests) if each != digests[0])
    head = where(operation, comm.rank, comm.world_size)
    said = difference_in_words(everyone[0], everyone[other], ("rank 0", f"rank {other}"), head)
    raise MismatchError(
        f"{head}: the ranks differ. {said}. Give all ranks the same parameters, in the same order, "
        "and the same options"
    )


def check_on_mesh(
    comm: Communicator | None, mesh: PartMesh | None, operation: str, mine: Mapping[str, Any]
) -> None:
    """Compares what ranks with different parts of parameters have in common; collective.

    Args:
        comm: the ranks with the same parts; None for this one alone.
        mesh: of the parts; None where there are none, and nothing to compare.
        operation, mine: as of :func:`check_agreement`.

    Raises:
        MismatchError: the ranks' data differ, on every rank.
    """
    if mesh is None:
        return
    ranks = MeshRanks(comm, mesh)
    if len(set(ranks.exchange(digest_of(mine)))) == 1:
        return
    everyone, names = ranks.exchange(mine), ranks.exchange(ranks.name)
    other = next(rank for rank, each in enumerate(everyone) if each != everyone[0])
    head = f"{operation} on {ranks.name}"
    said = difference_in_words(everyone[0], everyone[other], (names[0], names[other]), head)
    raise MismatchError(
        f"{head}: the ranks of the mesh {mesh.mesh} differ. {said}. Give all ranks the same "
        "parameters, in the same order, and the same options"
    )


def exchange(comm: Communicator, mine: Any) -> list[Any]:
    """Returns plain JSON data of every rank, by rank; collective.

    Raises:
        CorruptedError: a rank sent something else; names the rank.
    """
    text = json.dumps(mine).encode()
    size = torch.tensor([len(text)], dtype=torch.int64, device=comm.device)
    comm.all_reduce(size, ReduceOp.MAX)
    comm.finish_host_side()
    head = where("comparing the ranks", comm.rank, comm.world_size)
    longest = int(size.item())
    if not len(text) <= longest <= LARGEST_BYTES:
        raise CorruptedError(
            f"{head}: expected descriptions of {len(text)} to {LARGEST_BYTES} bytes, and some rank "
            f"announced {longest}. Do all ranks run the same ringcomm?"
        )
    texts = _all_gather_bytes(comm, text, longest)
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
            f"{operation}: what rank {rank} sent is no JSON text ({text[:80]!r}). Do all ranks run "
            "the same ringcomm?"
        ) from error


class CommRanks:
    """The ranks of a communicator, with plain data to exchange."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    @property
    def rank(self) -> int:
        return self._comm.rank

    @property
    def world_size(self) -> int:
        return self._comm.world_size

    @property
    def name(self) -> str:
        """This rank, as messages name it."""
        return f"rank {self.rank} of {self.world_size}"

    def exchange(self, mine: Any) -> list[Any]:
        """Returns plain JSON data of every rank, by rank; collective."""
        return exchange(self._comm, mine)


class MeshRanks:
    """The ranks of a mesh that holds parts of parameters, and of the replicas of each part.

    Ranks with the same part follow each other, in the order of their communicator.
    """

    def __init__(self, comm: Communicator | None, mesh: PartMesh) -> None:
        self._comm = comm
        self._mesh = mesh
        self._replicas = 1 if comm is None else comm.world_size

    @property
    def rank(self) -> int:
        return self._mesh.number * self._replicas + (0 if self._comm is None else self._comm.rank)

    @property
    def world_size(self) -> int:
        return self._mesh.mesh.size() * self._replicas

    @property
    def name(self) -> str:
        """This rank, as messages name it: by its number in the job, as launchers number ranks."""
        return f"rank {dist.get_rank()} of {dist.get_world_size()}"

    def exchange(self, mine: Any) -> list[Any]:
        """Returns plain JSON data of every rank, by rank; collective."""
        row = [mine] if self._comm is None else exchange(self._comm, mine)
        device = torch.device("cpu") if self._comm is None else self._comm.device
        texts = self._mesh.all_gather(json.dumps(row).encode(), device)
        head = where("comparing the ranks", self.rank, self.world_size)
        rows = (read_description(t, n * self._replicas, head) for n, t in enumerate(texts))
        return [each for row in rows for each in row]


def ranks_of(comm: Communicator | None, mesh: PartMesh | None) -> CommRanks | MeshRanks | None:
    """Returns the ranks that train one model together; None for this one alone."""
    if mesh is not None:
        return MeshRanks(comm, mesh)
    return None if comm is None else CommRanks(comm)


@contextmanager
def agreed_load(ranks: CommRanks | MeshRanks | None, operation: str) -> Iterator[list[object]]:
    """Checks a load inside the context; at its end all ranks go on, or none; collective.

    Yields:
        A list for values that must be equal on all ranks.

    Raises:
        Exception: the exception raised on this rank.
        CheckpointError: the load failed on another rank, or the ranks' values differ.
    """
    same: list[object] = []
    error: Exception | None = None
    try:
        yield same
    # Any exception is caught, so that the other ranks need not wait for this one to time out.
    except Exception as raised:
        error = raised
    if ranks is not None:
        told = {"error": None if error is None else str(error), "same": same, "name": ranks.name}
        for rank, each in enumerate(ranks.exchange(told)):
            if not isinstance(each, dict) or not {"error", "same", "name"} <= each.keys():
                raise CorruptedError(
                    f"{operation}: expected the outcome of rank {rank}'s load, got {each!r:.80}"
                )
            if error is None and each["error"] is not None:
                error = CheckpointError(
                    f"{operation}: {each['name']} cannot load its state, so no rank does: "
                    f"{each['error']}"
                )
            if error is None and each["same"] != same:
                error = CheckpointError(
                    f"{operation}: {ranks.name} and {each['name']} load states of different steps, "
                    f"{same} and {each['same']}; pass shards that were saved together"
                )
    if error is not None:
        raise error


@contextmanager
def all_or_none(
    comm: Communicator | None, operation: str, mesh: PartMesh | None = None
) -> Iterator[None]:
    """Runs work that may fail on one rank alone; at its end all go on, or none; collective.

    Inside, no rank may wait for another that has failed.

    Args:
        comm: the ranks; None for this one alone.
        operation: name of the operation, for the error.
        mesh: of ranks that have other parts of the parameters, and go on with these or not.

    Raises:
        Exception: the exception raised on this rank.
        RingcommError: another rank's exception, of the same class if that is one of ringcomm's.
    """
    error: Exception | None = None
    try:
        yield
    # Any exception is caught, so that the other ranks need not wait for this one to time out.
    except Exception as raised:
        error = raised
    verdict, ranks = b"+" if error is None else b"-", ranks_of(comm, mesh)
    verdicts = [verdict] if comm is None else _all_gather_bytes(comm, verdict, 1)
    if mesh is not None:
        device = torch.device("cpu") if comm is None else comm.device
        verdicts = mesh.all_gather(b"".join(verdicts), device)
    if all(set(each) == set(b"+") for each in verdicts):
        return
    if ranks is None:
        assert error is not None
        raise error
    told = ranks.exchange(None if error is None else [type(error).__name__, str(error), ranks.name])
    if error is not None:
        raise error
    kinds = {kind.__name__: kind for kind in RingcommError.__subclasses__()}
    name, text, who = next(each for each in told if each is not None)
    failed = kinds.get(name, RingcommError)(
        f"{operation} on {ranks.name}: {who} failed, so no rank goes on: {text}"
    )
    failed.repeats = True
    raise failed


def _all_gather_bytes(comm: Communicator, mine: bytes, size_bytes: int) -> list[bytes]:
    """Gathers each rank's bytes, padded with blanks to ``size_bytes``; collective."""
    padded = torch.frombuffer(bytearray(mine.ljust(size_bytes)), dtype=torch.uint8)
    everyone = torch.empty(comm.world_size * size_bytes, dtype=torch.uint8, device=comm.device)
    comm.all_gather_into_tensor(everyone, padded.to(comm.device))
    comm.finish_host_side()
    # tolist() rather than numpy(), without which torch also runs. A copy per rank is cheap here.
    return [bytes(cast("list[int]", row.tolist())) for row in everyone.view(comm.world_size, -1)]


def difference_in_words(first: Any, other: Any, names: tuple[str, str], operation: str) -> str:
    """Returns a sentence on how the descriptions of two ranks differ.

    Args:
        first: of the first rank.
        other: of another.
        names: of the two ranks.
        operation: named in errors.

    Raises:
        CorruptedError: one of them is not a description.
    """
    try:
        return _worded(first_difference(first, other), *names)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CorruptedError(
            f"{operation}: {names[0]} and {names[1]} differ, and what one of them sent is no "
            f"description of an optimizer: {error}. Do all ranks run the same ringcomm?"
        ) from error


Difference = tuple[str, Any, Any]


def first_difference(first: Mapping[str, Any], other: Mapping[str, Any]) -> Difference:
    """Returns the first difference of two descriptions: its label and both values.

    Parameters are compared first, since a difference there explains the others.
    """
    for label, key in (("parameter", "params"), ("bucket", "buckets")):
        pairs = _side_by_side(_layout(first).get(key, []), _layout(other).get(key, []))
        for index, (a, b) in enumerate(pairs):
            if a != b:
                return f"{label} {index}", a, b
    for index, (a, b) in enumerate(_side_by_side(first.get("groups", []), other.get("groups", []))):
        if a != b:
            return f"param group {index}", a, b
    for key in sorted({**first.get("options", {}), **other.get("options", {})}):
        a, b = first.get("options", {}).get(key), other.get("options", {}).get(key)
        if a != b:
            return f"option {key}", a, b
    return "description", dict(first), dict(other)


def _layout(described: Mapping[str, Any]) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", described.get("layout", {}))


def _side_by_side(first: list[Any], other: list[Any]) -> list[tuple[Any, Any]]:
    longest = max(len(first), len(other))
    pad = [None] * longest
    return list(zip([*first, *pad][:longest], [*other, *pad][:longest], strict=True))


def _worded(difference: Difference, first: str, other: str) -> str:
    label, a, b = difference
    return f"{label[0].upper()}{label[1:]} is {_short(a)} on {first} and {_short(b)} on {other}"


def _short(value: Any) -> str:
    if value is None:
        return "missing"
    if not isinstance(value, dict) or "shape" not in value:
        return json.dumps(value)
    name = f"{value['name']!r} " if value["name"] else ""
    extra = "" if value["trainable"] else ", frozen"
    extra += "" if value["tied_to"] is None else f", tied to parameter {value['tied_to']}"
    extra += "" if value["stride"] is None else f", stride {tuple(value['stride'])}"
    extra += ", in parts" if "divided_by" in value else ""
    kind = f"{value['dtype']} of shape {tuple(value['shape'])}"
    return f"{name}({kind} in group {value['group']}{extra})"
