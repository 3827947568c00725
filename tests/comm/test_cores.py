# SPDX-License-Identifier: Apache-2.0
"""All cores have the collectives of ``Core`` and ``StepCore``, with the same parameter names."""

import ast
import inspect

import pytest

from ringcomm import _native
from ringcomm.comm.host import step_core
from ringcomm.comm.host.core import Core
from ringcomm.comm.host.step_core import StepCore
from ringcomm.comm.host.triton import TritonEnd
from ringcomm.comm.nodes.calls import CollectivesOverNodes
from ringcomm.comm.nodes.steps import Steps
from ringcomm.comm.recorder.records import OPTIMIZERS

# Further collectives of cores, for an optimizer's buckets and for sums over nodes.
BESIDE = {*OPTIMIZERS, "reduce_scatter_partial", "reduce_partial"}


def parameters_of(method):
    """Returns a method's parameter names; of a native one from the docstring's signature."""
    if not type(method).__module__.startswith("nanobind"):
        return list(inspect.signature(method).parameters)
    (definition,) = ast.parse(f"def {method.__doc__.splitlines()[0]}: ...").body
    assert isinstance(definition, ast.FunctionDef)
    arguments = definition.args
    assert not arguments.kwonlyargs and arguments.vararg is arguments.kwarg is None
    return [each.arg for each in (*arguments.posonlyargs, *arguments.args)]


def collectives_of(core):
    methods = inspect.getmembers(core, inspect.isfunction)
    return {name for name, _ in methods if name in vars(core) and not name.startswith("_")}


def fields_of(method):
    """Returns the argument names of a method that takes the fields of a named tuple."""
    _, arguments = inspect.signature(method).parameters.values()
    assert arguments.kind is arguments.VAR_POSITIONAL
    fields = arguments.annotation.removeprefix("Unpack[").removesuffix("]")
    return list(getattr(step_core, fields)._fields)


EXPECTED = {name: parameters_of(getattr(Core, name)) for name in collectives_of(Core)}


@pytest.mark.parametrize("core", [_native.Comm, _native.DeviceComm, CollectivesOverNodes])
def test_a_core_has_the_collectives_of_the_protocol(core):
    assert len(EXPECTED) > 10
    assert {name: parameters_of(getattr(core, name)) for name in EXPECTED} == EXPECTED


@pytest.mark.parametrize("core", [_native.Comm, _native.DeviceComm, CollectivesOverNodes])
def test_the_protocol_has_the_collectives_of_a_core(core):
    recorded = {name for name in _native.RECORD_NAMES["collectives"] if hasattr(core, name)}
    assert len(recorded) > 8
    assert recorded - EXPECTED.keys() <= BESIDE


def test_the_protocol_has_what_is_called_over_nodes_alone():
    assert collectives_of(CollectivesOverNodes) == EXPECTED.keys()


def test_calls_by_triton_have_the_parameters_of_the_protocol():
    names = EXPECTED.keys() & collectives_of(TritonEnd)
    assert len(names) == 3
    for name in names:
        assert parameters_of(getattr(TritonEnd, name)) == EXPECTED[name]


STEPS = {name: fields_of(getattr(StepCore, name)) for name in collectives_of(StepCore)}


def test_the_protocol_of_steps_has_the_collectives_of_optimizers():
    assert STEPS.keys() == set(OPTIMIZERS)


def test_the_host_core_has_the_steps_of_the_protocol():
    found = {name: parameters_of(getattr(_native.Comm, name)) for name in STEPS}
    assert found == {name: ["self", *fields] for name, fields in STEPS.items()}


def test_steps_over_nodes_are_those_of_the_protocol():
    assert {name: fields_of(getattr(Steps, name)) for name in collectives_of(Steps)} == STEPS


def test_the_steps_of_a_device_have_an_address_of_the_shard_and_no_bytes_of_the_step():
    for name, fields in STEPS.items():
        expected = ["self", *(field for field in fields if field != "step_bytes")]
        if "shard" in fields:
            expected.insert(expected.index("shard") + 1, "address")
        assert parameters_of(getattr(_native.DeviceComm, name)) == expected
