"""The figures of ``ringcomm estimate``, and their JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from ringcomm.cli import estimate_disk
from ringcomm.cli.estimate_disk import Computing, DiskRow, ParamsRow, disk_row, params_row
from ringcomm.cli.estimate_network import Step
from ringcomm.cli.estimate_request import Request, TimingInputs
from ringcomm.zero.estimate import StateBytes, WorkingBytes, World, largest_model, working_buffers
from ringcomm.zero.estimate_activations import ActivationBytes, layer_bytes
from ringcomm.zero.estimate_model import Transformer
from ringcomm.zero.estimate_model_parallel import stage_activations
from ringcomm.zero.estimate_tier import params_in_tier, state_in_tier
from ringcomm.zero.estimate_time import (
    StepTime,
    Traffic,
    checkpoint_intensity,
    efficiency,
    leaving_node_bytes,
    params_intensity,
    state_intensity,
    step_flops,
    step_time,
    traffic,
)


@dataclass(frozen=True)
class StageRow:
    """One stage: bytes of a rank, what it sends, and how long a step takes it.

    Attributes:
        activation_bytes: 0 where they are not known.
        leaving_node_bytes: what of gradients and parameters leaves each node.
        time: None where the machine is not known.
        largest_elems: the largest model that fits beside buffers and activations; None without a
            budget.
        disk: of the state; None if it is in memory.
        params_disk: of the parameters; None if they are in memory.
    """

    stage: int
    state: StateBytes
    working: WorkingBytes
    activation_bytes: int
    moved: Traffic
    leaving_node_bytes: int
    time: StepTime | None
    largest_elems: int | None
    disk: DiskRow | None
    params_disk: ParamsRow | None

    @property
    def total_bytes(self) -> int:
        return self.state.total + self.working.total + self.activation_bytes


@dataclass(frozen=True)
class Estimate:
    """The question and its answer; ``activations`` is None where the shape is not known."""

    request: Request
    rows: tuple[StageRow, ...]
    activations: ActivationBytes | None


def work_out(request: Request) -> Estimate:
    """Does the arithmetic.

    Raises:
        ArgumentError: a size is not positive.
    """
    forward, held = request.forward, None
    if forward.shape is not None:
        held = stage_activations(
            forward.shape,
            forward.micro_batch,
            forward.parallel,
            forward.checkpointing,
            forward.every,
            request.elem_bytes,
        )
        if request.activations_disk is not None:
            held = held.kept_on(request.activations_disk.disk, _layer_bytes(request, forward.shape))
    rows = tuple(_row(request, stage, held.total if held else 0) for stage in request.stages)
    return Estimate(request, rows, held)


def _layer_bytes(request: Request, shape: Transformer) -> int:
    forward = request.forward
    tp, sequence = forward.parallel.tp, forward.parallel.sequence
    return layer_bytes(shape, forward.micro_batch, request.elem_bytes, tp, sequence)


def activation_times_s(report: Estimate) -> tuple[float, float] | None:
    """Returns the seconds of a step's writes and reads of activations; None if not known."""
    disk, held = report.request.activations_disk, report.activations
    if disk is None or held is None:
        return None
    return disk.times_s(held.moved, report.request.world.mates)


def total_bytes(report: Estimate, stage: int, world_size: int) -> int:
    """Returns the memory that a rank would need in another world."""
    request = report.request
    world = replace(request.world, ranks=world_size)
    state = request.model_state(stage, world)
    working = _working(request, stage, world)
    held = report.activations
    return state.total + working.total + (held.total if held else 0)


def _working(request: Request, stage: int, world: World) -> WorkingBytes:
    return working_buffers(
        request.model,
        stage,
        world,
        request.each,
        request.options,
        request.two_passes,
        request.tier,
    )


def _row(request: Request, stage: int, activation_bytes: int) -> StageRow:
    model, world, each = request.model, request.world, request.each
    working = _working(request, stage, world)
    moved = traffic(model, stage, each)
    largest = None
    if request.budget_bytes is not None:
        other_bytes = working.total + activation_bytes
        tiers = request.tier, request.params_tier
        largest = largest_model(request.budget_bytes, stage, world, each, other_bytes, *tiers)
    return StageRow(
        stage,
        request.model_state(stage, world),
        working,
        activation_bytes,
        moved,
        leaving_node_bytes(model, stage, world, each),
        _step_time(request, moved.sent_bytes(world.ranks)),
        largest,
        _disk_row(request, stage),
        _params_row(request, stage),
    )


def _step_time(request: Request, sent_bytes: int) -> StepTime | None:
    timing = request.timing
    if timing is None:
        return None
    return step_time(_flops(request, timing), sent_bytes, timing.gbps, timing.peak_tflops)


def _flops(request: Request, timing: TimingInputs) -> int:
    return step_flops(request.model.total, timing.tokens, request.forward.recomputes)


def _disk_row(request: Request, stage: int) -> DiskRow | None:
    disk, world = request.state_disk, request.world
    if disk is None:
        return None
    moved = state_in_tier(request.model, stage, world, request.each, request.options, disk.tier)
    return disk_row(moved, disk.rates, world.mates, _computing(request))


def _params_row(request: Request, stage: int) -> ParamsRow | None:
    disk, world = request.params_disk, request.world
    if disk is None or stage != 3:
        return None
    moved = params_in_tier(request.model, world, request.each, request.options, disk.tier)
    return params_row(moved, disk.rates, world.mates, _computing(request))


def _computing(request: Request) -> Computing | None:
    timing = request.timing
    if timing is None:
        return None
    flops = _flops(request, timing)
    compute_s = step_time(flops, 0, timing.gbps, timing.peak_tflops).compute_s
    return Computing(flops, compute_s, timing.peak_tflops)


def network_step(report: Estimate) -> Step:
    """Returns the facts from which the network's times of a step follow."""
    request = report.request
    times = [row.time for row in report.rows if row.time is not None]
    return Step(
        model=request.model,
        each=request.each,
        bucket_elems=request.options.bucket_elems,
        compute_s=times[0].compute_s if times else None,
        stages=request.stages,
        world=request.world,
    )


def outside_efficiency(request: Request) -> dict[str, float]:
    """Efficiency, 0 to 1, with each kind of data outside the device, not overlapped.

    Each rank moves all parameters and all its checkpoints, but only its shard of the state, for
    which the bandwidths of all ranks add up. Empty where the machine is not known.
    """
    timing, forward = request.timing, request.forward
    if timing is None:
        return {}
    gbps, peak = timing.gbps, timing.peak_tflops
    state = state_intensity(timing.tokens, forward.recomputes)
    shares = {
        "parameters": efficiency(params_intensity(timing.tokens), gbps, peak),
        "state": efficiency(state, gbps * request.world.ranks, peak),
    }
    if forward.shape is not None and forward.recomputes:
        intensity = checkpoint_intensity(forward.shape.width, forward.every)
        shares["checkpoints"] = efficiency(intensity, gbps, peak)
    return shares


def as_json(report: Estimate) -> dict[str, Any]:
    """The report as plain JSON types: bytes, elements, seconds."""
    request = report.request
    return {
        "model": {"called": request.called, **asdict(request.model)},
        "world": request.world.ranks,
        "nodes": request.world.nodes,
        "shard_params": request.world.params,
        "shard_state": request.world.state,
        "wire": request.world.wire,
        "error_feedback": request.world.error_feedback,
        "wire_parameters": request.world.param_wire,
        "bytes_per_element": asdict(request.each),
        "activations": None if report.activations is None else asdict(report.activations),
        "activations_write_read_s": activation_times_s(report),
        "budget_bytes": request.budget_bytes,
        "outside_efficiency": outside_efficiency(request),
        "stages": [_row_json(row, request.world.ranks) for row in report.rows],
    }


def _row_json(row: StageRow, world_size: int) -> dict[str, Any]:
    disks = {"state_elsewhere": row.disk, "params_on_disk": row.params_disk}
    return {
        "stage": row.stage,
        "model_state_bytes": {**asdict(row.state), "total": row.state.total},
        "working_bytes": {**asdict(row.working), "total": row.working.total},
        "activation_bytes": row.activation_bytes,
        "total_bytes": row.total_bytes,
        "volume_elems": row.moved.volume_elems,
        "volume_bytes": row.moved.volume_bytes,
        "sent_elems": row.moved.sent_elems(world_size),
        "sent_bytes": row.moved.sent_bytes(world_size),
        "leaving_node_bytes": row.leaving_node_bytes,
        "time": None if row.time is None else _time_json(row.time),
        "largest_model_elems": row.largest_elems,
        **{name: each and estimate_disk.as_json(each) for name, each in disks.items()},
    }


def _time_json(time: StepTime) -> dict[str, float]:
    return {
        **asdict(time),
        "serial_s": time.serial_s,
        "serial_efficiency": time.serial_efficiency,
        "overlapped_s": time.overlapped_s,
        "overlapped_efficiency": time.overlapped_efficiency,
    }
