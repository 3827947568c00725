# SPDX-License-Identifier: Apache-2.0
"""If the node with the store is lost, the others get an error in time that names the store."""

import time
from pathlib import Path

import pytest
import torch

from ringcomm import Communicator, RingcommError
from tests.support import lab
from tests.support.lab import Lab

TIMEOUT_S, LIMIT_S = 2.0, 20.0  # many timeouts, but a request to the store waits for minutes


def loses_the_store(folder: Path) -> tuple[str, str]:
    """Makes calls until one fails; returns the error's type and text."""
    comm = Communicator.from_env(timeout=TIMEOUT_S)
    tensor = torch.ones(1000)
    while True:
        try:
            comm.all_reduce(tensor)
            (folder / str(comm.rank)).touch()
        except RingcommError as error:
            return type(error).__name__, str(error)
        time.sleep(0.05)


@pytest.mark.parametrize("how", ["cut", "kill"])
def test_the_node_of_the_store_is_lost(how, tmp_path):
    """A cut link sends no message, so each request to the store waits."""
    lab.require()
    with Lab(2) as made:
        ranks = made.ranks((1, 2))
        ranks.run("os.getpid")
        ranks.start(loses_the_store, tmp_path)
        deadline = time.monotonic() + LIMIT_S
        while len(list(tmp_path.iterdir())) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        (made.cut if how == "cut" else made.kill)(0)
        outcomes = ranks.outcomes(LIMIT_S)
        for outcome in outcomes[1:]:
            assert outcome.value is not None, outcome.describe()
            kind, words = outcome.value
            assert kind == ("CollectiveTimeout" if how == "cut" else "PeerLost")
            assert f"The store at {made.address(0)}:" in words and "does not answer" in words
