# SPDX-License-Identifier: Apache-2.0
"""Every list of calls in tests and proofs contains every collective of the cores."""

import inspect
import re

import pytest

from ringcomm.comm.host.core import Core
from tests.proof.soak.cases import CALLS
from tests.support import ROOT
from tests.support.call_checks import CHECKS
from tests.support.fault_calls import BODIES
from tests.support.fault_schedules import KINDS

CORES = {
    name.removesuffix("_list")
    for name, _ in inspect.getmembers(Core, inspect.isfunction)
    if not name.startswith("_")
}
RACES = ROOT / "tests/proof/races"


def cores_name(name):
    """Returns the name that a core has for a communicator's call."""
    return re.sub(r"_(?:tensor|into_tensor|single)$", "", name)


def named_in(text):
    """Returns the collectives of call.h that a C++ text names, spelled as cores spell them."""
    found = set(re.findall(r"\bCollective::k(\w+)", text))
    return {re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower() for name in found}


def test_fault_schedules_have_a_body_of_each_kind():
    assert KINDS.keys() == BODIES.keys()


@pytest.mark.parametrize("calls", [KINDS, CALLS], ids=["faults", "soak"])
def test_calls_under_faults_and_load_are_all_collectives(calls):
    assert {cores_name(name) for name in calls} == CORES | {"messages"}


def test_call_checks_have_all_collectives_that_give_values():
    checked = {cores_name(part) for name in CHECKS for part in name.split(" and ")}
    assert checked == CORES - {"barrier"} | {"messages"}


def test_race_tests_run_all_collectives():
    cases = (RACES / "device_race_cases.h").read_text()
    cycle = cases.partition("kCycle[] = {")[2].partition("};")[0]
    started = re.findall(r"\bstart\((.*?)\)", (RACES / "race_test.cpp").read_text())
    assert len(CORES) > 8
    assert named_in(cycle) == CORES
    assert named_in(" ".join(started)) == CORES
