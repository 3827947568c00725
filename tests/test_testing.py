# SPDX-License-Identifier: Apache-2.0
"""``ringcomm.testing.ranks``: how pytest runs and reports tests on several ranks."""

import os
import subprocess
import sys
import textwrap
import time

import pytest
import torch

import ringcomm
from ringcomm.testing import ranks
from tests.support import ROOT

HEAD = """
import pytest
import ringcomm
import torch
from ringcomm.testing import ranks
"""


def run(tmp_path, text, *arguments):
    """Runs pytest on a test file in its own process; returns the finished process."""
    (tmp_path / "test_it.py").write_text(HEAD + textwrap.dedent(text))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        [*command, "test_it.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


@ranks(4)
def test_each_rank_runs_the_body(comm):
    x = torch.full((3,), float(comm.rank))
    comm.all_reduce(x)
    assert x.tolist() == [6.0] * 3 and comm.world_size == 4


@pytest.fixture
def doubled(request, tmp_path):
    return request.param * 2, tmp_path


@pytest.mark.parametrize("doubled", [1, 3], indirect=True)
@ranks(2)
@pytest.mark.parametrize("third", ["a"])
def test_fixtures_and_parameters_are_passed(third, comm, doubled):
    number, path = doubled
    (path / str(comm.rank)).write_text(third)
    comm.barrier()
    assert number in (2, 6) and sorted(os.listdir(path)) == ["0", "1"]


@ranks(2)
def test_the_functions_of_the_package_use_the_rank():
    x = torch.ones(1)
    ringcomm.all_reduce(x)
    assert x.item() == ringcomm.get_world_size() == 2


class TestInAClass:
    @ranks(2, options=ringcomm.CommOptions(records=7))
    def test_of_a_method(self, comm):
        assert isinstance(self, TestInAClass) and comm.options.records == 7


@ranks(4, nodes=[2, 2])
def test_over_nodes(comm):
    assert comm.num_nodes == 2


@pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
@ranks(2)
def test_marks_apply(comm):
    _ = 1 // (1 - comm.rank)


def test_only_functions_are_decorated():
    with pytest.raises(TypeError, match="expected a test function"):
        ranks(2)(TestInAClass)


def test_a_wrong_number_of_ranks_fails_the_test():
    @ranks(0)
    def body(comm):
        raise AssertionError

    with pytest.raises(ringcomm.ArgumentError, match="expected the number of ranks"):
        body()


def test_a_rank_that_fails_ends_the_waits_of_the_others():
    @ranks(3, timeout=100)
    def body(comm):
        if comm.rank == 1:
            raise ValueError("broken here")
        comm.barrier()

    begin_s = time.monotonic()
    with pytest.raises(ValueError, match="broken here"):
        body()
    assert time.monotonic() - begin_s < 30


def test_ranks_that_wait_for_each_other_fail_at_the_timeout():
    @ranks(2, timeout=0.3)
    def body(comm):
        comm.recv(torch.ones(1), 1 - comm.rank)

    with pytest.raises(ringcomm.CollectiveTimeout, match="recv on rank"):
        body()


def test_a_failure_names_the_rank_and_shows_its_traceback(tmp_path):
    done = run(
        tmp_path,
        """
        @ranks(3)
        def test_sum(comm):
            x = torch.ones(2)
            if comm.rank == 2:
                assert x.sum() == 5, "a wrong sum"
            comm.all_reduce(x)
        """,
        "-p",
        "ringcomm.testing",
    )
    text = done.stdout
    assert done.returncode == 1 and "1 failed" in text, text + done.stderr
    assert '>           assert x.sum() == 5, "a wrong sum"' in text, text
    assert "test_it.py:11: AssertionError" in text, text
    if sys.version_info < (3, 11):
        text = done.stdout + done.stderr
    assert "raised on rank 2 of 3" in text, text
    assert "rank 0 raised PeerLost at test_it.py:12: all_reduce on rank 0 of 3" in text, text
    assert "rank 1 raised PeerLost at test_it.py:12: all_reduce on rank 1 of 3" in text, text
    for own in ("testing.py", "local_world.py", "_run_threads"):
        assert own not in text, text


def test_an_error_of_a_call_ends_at_the_line_of_the_test(tmp_path):
    done = run(
        tmp_path,
        """
        def total(comm):
            comm.all_reduce(torch.ones(2 + comm.rank))

        @ranks(2)
        def test_unequal_sizes(comm):
            total(comm)

        @ranks(2, timeout=0.3)
        def test_missed_barrier(comm):
            if comm.rank == 0:
                comm.barrier()
            else:
                comm.recv(torch.ones(1), 0)

        @ranks(0)
        def test_no_ranks(comm):
            raise AssertionError
        """,
    )
    text = done.stdout
    assert "3 failed" in text, text + done.stderr
    assert ">       comm.all_reduce(torch.ones(2 + comm.rank))" in text, text
    assert "test_it.py:8: MismatchError" in text, text
    assert ">           comm.barrier()" in text or ">           comm.recv(" in text, text
    assert "expected the number of ranks" in text, text
    for own in ("collectives.py", "local_world.py", "Args:", "Raises:"):
        assert own not in text, text


def test_an_error_that_is_not_ringcomms_keeps_the_frames_of_the_call(tmp_path):
    done = run(
        tmp_path,
        """
        @ranks(2)
        def test_wrong_call(comm):
            with ringcomm.local_world(2) as world:
                world.run(lambda other: 1 // (other.rank - other.rank))
        """,
    )
    assert "ZeroDivisionError" in done.stdout and "local_world.py" in done.stdout, done.stdout


def test_several_failures_and_skips_are_told(tmp_path):
    done = run(
        tmp_path,
        """
        @ranks(2)
        def test_own_failures(comm):
            assert comm.rank == 7

        @ranks(2)
        def test_skipped(comm):
            pytest.skip("not here")

        @ranks(2)
        def test_after_it(comm):
            comm.barrier()
        """,
        "-rs",
    )
    assert "1 failed, 1 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert "not here" in done.stdout
    assert "rank 1 raised AssertionError at test_it.py:9: assert 1 == 7" in done.stdout, done.stdout


def test_the_plug_in_loads_neither_torch_nor_the_native_module(tmp_path):
    text = """
    import sys

    def test_it():
        assert "ringcomm.testing" in sys.modules
        assert not {"torch", "ringcomm._native"} & set(sys.modules)
    """
    (tmp_path / "test_it.py").write_text(textwrap.dedent(text))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "ringcomm.testing", "test_it.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
