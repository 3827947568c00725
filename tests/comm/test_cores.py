"""All cores have the collectives of the protocol ``Core``, with its parameters by its names."""

import ast
import inspect

import pytest

from ringcomm import _native
from ringcomm.comm.host.core import Core
from ringcomm.comm.host.triton import TritonEnd
from ringcomm.comm.nodes.calls import CollectivesOverNodes

# Collectives that cores have besides: on buckets of an optimizer, and of a sum over nodes.
BESIDE = {
    *("reduce_scatter_norm", "adamw_all_gather", "reduce_scatter_adamw_all_gather"),
    *("reduce_scatter_partial", "reduce_partial"),
}


def parameters_of(method):
    """The names of a method's parameters, of a native one from the signature in its docstring."""
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
