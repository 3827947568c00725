"""The rates of coding: each round has one call of each kind for each wire, on all numbers."""

from collections import Counter

import pytest

from ringcomm import _native
from tools import coding_rates

KINDS = [coding_rates.CODING, coding_rates.ADDING, coding_rates.IN_TURN]


def test_a_round_has_each_call_once(monkeypatch):
    calls: Counter[tuple[str, int, int]] = Counter()

    def counted(name):
        inner = getattr(_native, name)

        def call(wire, given, dtype_or_out, *rest):
            calls[name, wire, rest[-1]] += 1
            inner(wire, given, dtype_or_out, *rest)

        monkeypatch.setattr(_native, name, call)

    counted("encode_wire")
    counted("sum_wires")
    rates = coding_rates.time_coding(1000, 3)
    assert [(rate.wire, rate.what) for rate in rates] == [
        (wire, kind) for wire in _native.WIRES for kind in KINDS
    ]
    assert all(len(rate.ratios) == 3 and rate.gbps > 0 for rate in rates)
    names, wires = ("encode_wire", "sum_wires"), _native.WIRES.values()
    assert calls == {(name, wire, 1000): 4 for name in names for wire in wires}


def test_each_instruction_set_has_its_rows(capsys):
    best = _native.isa()
    coding_rates.main(["--elems", "512", "-n", "2", "--isa", "baseline", best])
    rows = capsys.readouterr().out.splitlines()[1:]
    assert Counter(row.split()[0] for row in rows) == Counter(["baseline", best] * 3 * len(KINDS))
    assert _native.isa() == best


@pytest.mark.parametrize("bad", [["--elems", "0"], ["-n", "1"], ["--isa", "mmx"]])
def test_other_words_are_refused(bad, capsys):
    with pytest.raises(SystemExit) as stopped:
        coding_rates.main(["--elems", "512", "-n", "2", *bad])
    assert stopped.value.code == 2
    assert "expected" in (said := capsys.readouterr().err) or "no instruction set" in said
