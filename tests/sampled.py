"""The parametrized tests of which ``make test`` runs some cases, and ``make test-all`` every one.

CI is short of CPU seconds, and these take most of them: products of settings that mostly meet in
one path of the code. Of each, those cases are kept that have every value of every parameter, and
then most pairs of them, as far as the number goes. Whoever names a file, a folder or a test runs
all of its cases.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest

EVERY_CASE = os.environ.get("RINGCOMM_TEST_CASES") == "all"

# How many cases are kept of each test, by file below tests/.
KEPT = {
    "bench/test_cases.py": {"test_expected_values_are_those_of_a_spelled_out_collective": 36},
    "bench/test_one_gpu.py": {"test_torch_does_the_same_sums_and_copies": 24},
    "c10d/test_nodes.py": {"test_as_on_one_node": 3},
    # One body of a kernel serves all worlds, and one table all dtypes and operators.
    "comm/device/test_device_collectives.py": {
        "test_more_than_staging_holds": 1,
        "test_every_dtype_is_moved": 2,
        "test_every_dtype_and_op": 28,
        "test_every_world_size_and_place": 22,
    },
    # The words of epochs are one type, which tests/proof/races wraps under a sanitizer as well.
    "comm/device/test_device_epochs.py": {"test_items_wrap_around": 11},
    # Launches for all ranks differ by algorithm and size; placing does not change them.
    "comm/device/test_device_groups.py": {
        "test_two_devices_of_one_process": 1,
        "test_all_ranks_from_one_thread": 16,
    },
    "comm/device/test_device_rings.py": {"test_every_order_of_the_ranks": 2},
    "comm/device/test_device_steps.py": {"test_a_graph_replays_steps_as_eager_ones": 2},
    "comm/nodes/test_calls.py": {"test_reductions": 10, "test_movements": 10},
    "comm/nodes/test_on_devices.py": {
        "test_every_collective": 3,
        "test_every_dtype_and_op": 1,
        "test_the_bits_are_the_hosts": 2,
        "test_the_codes_of_a_wire_are_the_hosts": 1,
    },
    "comm/nodes/test_wires.py": {
        "test_an_all_reduce_codes_its_sums_again": 8,
        "test_a_reduce_scatter_adds_what_was_coded_once": 8,
    },
    "comm/test_all_gather.py": {"test_every_world_and_size": 20},
    # Algorithms divide a message by one function of the world and its size, which has its own test.
    "comm/test_all_reduce.py": {"test_every_world_and_size": 20},
    # The copies of a place are those of every collective.
    "comm/test_all_to_all.py": {"test_every_world_and_size": 14},
    # As all_reduce, whose first half it is.
    "comm/test_reduce_scatter.py": {"test_every_world_and_size": 20},
    "examples/test_parallelism.py": {"test_as_one_process": 2},
    "extras/fsdp2/test_plugging.py": {"test_fifty_steps_take_no_more_memory_than_two": 4},
    "gpu/test_wires.py": {"test_the_bits_are_the_hosts": 3},
    # Routes are made by Python that knows neither dtype nor wire, and one native loop moves rows.
    "extras/moe/test_dispatch.py": {
        "test_rows_and_sums_have_the_bits_of_loops": 12,
        "test_ranks_learn_what_one_rank_learns": 9,
        "test_codes_travel": 9,
        "test_outboxes_are_written_by_turns": 3,
        "test_memory_of_the_heap_is_free_once_a_call_ends": 3,
        "test_large_rows": 2,
    },
    # Each variant meets one kind of gradients; the loops have exhaustive tests of their own.
    "optim/test_adamw.py": {"test_a_step_is_torchs": 11},
    "optim/test_nodes.py": {"test_steps_have_the_bits_of_one_node_that_sums_in_blocks": 2},
    "optim/test_sharded.py": {
        "test_steps_have_the_bits_of_the_class_in_one_process": 17,
        "test_state_goes_on_in_other_worlds": 4,
    },
    # Placing is of a dtype and two worlds, and never of all three at once.
    "optim/test_state.py": {"test_a_shard_continues_in_its_own_world_and_all_in_any_other": 13},
    "optim/test_step_kernels.py": {
        "test_one_pass_two_passes_and_separate_kernels_give_the_same_bits": 10
    },
    "optim/test_tiers.py": {"test_bits_are_those_of_memory": 18},
    "proof/faults/test_schedules.py": {"test_promises_hold": 5},
    "proof/faults/test_training.py": {"test_nothing_is_lost": 2, "test_a_lost_state_is_seen": 1},
    "proof/model/test_model_check.py": {
        "test_the_protocol_holds": 5,
        "test_a_mistake_is_rejected": 5,
        "test_the_models_take_their_arithmetic_from_the_headers": 3,
    },
    "proof/ptx/test_cuda.py": {"test_every_unit": 2, "test_every_collective": 2, "test_steps": 2},
    "proof/ptx/test_multicast.py": {"test_results": 2},
    "proof/ptx/test_wires.py": {"test_the_bits_are_the_hosts": 3},
    "support/test_lab.py": {"test_nothing_is_left": 2},
    "tl/test_adamw.py": {"test_collectives_have_the_bits_of_the_native_ones": 2},
    "zero/checkpoint/test_pretrained.py": {"test_a_meta_module_is_as_if_loaded_before": 8},
    # What is held is of the way; the kind scales it.
    "zero/checkpoint/test_pretrained_memory.py": {"test_a_rank_holds_its_shard_and_a_block": 3},
    "zero/checkpoint/test_transformers.py": {"test_a_model_is_what_the_library_loads": 6},
    # Stages differ in where a part lies, and the rank that writes only in a number.
    "zero/test_access.py": {
        "test_a_part_is_gathered_and_written_alone": 10,
        "test_a_dropped_module_gives_everything_back": 4,
    },
    "zero/test_activations_in_training.py": {
        "test_training_has_the_bits_of_training_without": 3,
        "test_models_that_are_brittle": 5,
        "test_a_fault_on_one_rank_reaches_all_at_the_step": 4,
    },
    "zero/test_added_groups.py": {"test_a_part_joins_later_with_the_bits_of_one_that_was_there": 9},
    # Each failure is met at one or two stages: they share the code that undoes.
    "zero/test_all_or_nothing.py": {"test_a_module_is_as_it_was": 7},
    "zero/test_changes_elsewhere.py": {
        "test_devices_end_with_the_bits_of_the_host": 2,
        "test_nodes_end_with_the_bits_of_one": 2,
    },
    # One function clips and unscales for all stages.
    "zero/test_clipping.py": {
        "test_every_stage_clips_values_and_parts_alike": 2,
        "test_a_scaled_loss_is_clipped_as_one_that_is_not": 4,
    },
    "zero/test_coded_params.py": {
        "test_masters_follow_writes_from_outside_and_are_coded_anew": 2,
        "test_three_steps_end_with_the_bits_of_one_rank_that_codes_masters_itself": 2,
        "test_what_leaves_a_node_is_codes": 2,
        "test_a_run_that_resumes_ends_with_the_same_bits": 2,
    },
    "zero/test_compile.py": {"test_whole_graphs_of_autograd_train_with_all_habits": 2},
    "zero/test_devices.py": {
        "test_a_device_trains_as_the_host_does": 4,
        "test_a_graph_replays_the_step_of_a_module": 2,
    },
    "zero/test_eight_bits.py": {"test_all_stages_end_with_the_same_bits": 3},
    "zero/test_error_feedback.py": {
        "test_training_resumes_with_the_same_bits_on_the_same_nodes": 2,
        "test_other_nodes_take_over_what_is_owed_in_sum": 2,
    },
    # Transforms see a module of plain tensors at every stage.
    "zero/test_func.py": {"test_transforms_give_what_they_give_of_the_plain_module": 11},
    # Each loop meets one world, since what is kept is each rank's own.
    "zero/test_local_shards.py": {"test_an_average_by_shards_is_that_of_whole_weights": 6},
    "zero/test_memory.py": {
        "test_a_rank_holds_what_the_closed_form_says": 4,
        "test_a_rank_of_two_nodes_of_two_holds_its_share": 2,
    },
    "zero/test_nodes.py": {
        "test_what_leaves_a_node_in_a_step_is_the_closed_form": 2,
    },
    # Stages and precisions meet in one accessor, and worlds in the bounds of a shard.
    "zero/test_param_access.py": {
        "test_training_goes_on_from_what_is_set": 10,
        "test_the_gradient_is_the_mean_over_the_ranks": 6,
        "test_hooks_see_each_reduced_gradient_once_and_change_it": 7,
        "test_masters_and_states_are_those_of_the_full_state": 8,
        "test_a_gradient_that_is_set_is_what_the_step_takes": 7,
    },
    "zero/test_params_on_disk.py": {"test_bits_and_files_are_those_of_memory": 5},
    "zero/test_pipelines.py": {"test_schedules": 2},
    "zero/test_precision.py": {
        "test_compiled_units_share_their_code": 2,
    },
    "zero/test_saving.py": {
        "test_any_stage_and_world_takes_over": 3,
    },
    "zero/test_tensor_parallel.py": {"test_tensor_parallel": 3},
    "zero/test_tiers.py": {"test_a_checkpoint_is_that_of_memory_and_goes_on_anywhere": 2},
    "zero/test_two_modules.py": {"test_gradients_are_right_whatever_ranks_use": 2},
    # Where a unit raises matters, and at which stage; the choices over nodes share their rails.
    "zero/test_update_in_backward.py": {
        "test_a_backward_that_raises_halfway_leaves_the_optimizer_torn": 4,
    },
    # Growth is of the larger shape; a stage adds its own buffers once.
    "zero/test_zero_r.py": {"test_nothing_but_the_tensors_themselves_grows": 4},
}


def chosen(cases: Sequence[Mapping[str, object]], kept: int) -> set[int]:
    """Returns the numbers of ``kept`` cases, given by their parameters.

    Each but the first has most values that no case before it has, or else most pairs of values; of
    equals, the one that lies farthest from those before it.
    """
    # Of a function or an object, which each case has itself, its text is its identity.
    parts = [sorted((name, repr(value)) for name, value in case.items()) for case in cases]
    seen: set[object] = set()
    taken: list[int] = []
    while len(taken) < min(kept, len(cases)):

        def worth(number: int) -> tuple[int, int, int, int]:
            values, pairs = parts[number], combinations(parts[number], 2)
            far = min((abs(number - other) for other in taken), default=0)
            return (
                sum(value not in seen for value in values),
                sum(pair not in seen for pair in pairs),
                far,
                -number,
            )

        best = max((n for n in range(len(cases)) if n not in taken), key=worth)
        taken.append(best)
        seen.update(parts[best], combinations(parts[best], 2))
    return set(taken)


def _runs(item: pytest.Item) -> bool:
    """False for a case that is skipped here, and so stands for no other."""
    return not any(mark.args[:1] == (True,) for mark in item.iter_markers("skipif"))


def left_out(items: list[pytest.Item], root: str) -> list[pytest.Item]:
    """Returns the cases that ``make test`` leaves out; none that needs a GPU, or is skipped."""
    cases: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for item in items:
        file = item.nodeid.split("::")[0].removeprefix(root)
        name = getattr(item, "originalname", "")
        if name in KEPT.get(file, ()) and not item.get_closest_marker("gpu") and _runs(item):
            cases[file, name].append(item)
    dropped = []
    for (file, name), found in cases.items():
        taken = chosen([item.callspec.params for item in found], KEPT[file][name])
        dropped += [item for number, item in enumerate(found) if number not in taken]
    return dropped
