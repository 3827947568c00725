"""``python -m ringcomm.bench.collectives``: the collectives, as ``ringcomm bench`` runs them."""

from . import BENCH

BENCH.run_as_main(__name__)
