# SPDX-License-Identifier: Apache-2.0
"""ringcomm/_native.pyi declares all of the native module, with the types of the bindings."""

import re

from ringcomm import _native
from tools.native_stub import STUB, native_stub


def test_the_stub_is_what_the_bindings_declare():
    assert STUB.read_text() == native_stub(), "`make native` writes ringcomm/_native.pyi"


def test_a_name_that_the_stub_lacks_is_seen(monkeypatch):
    monkeypatch.setattr(_native, "UNDECLARED", 1, raising=False)
    undeclared = set(native_stub().splitlines()) - set(STUB.read_text().splitlines())
    assert undeclared == {"UNDECLARED: int = 1"}


def unnamed_or_untyped(stub: str) -> list[str]:
    """Returns the stub's parameters without names and results without types."""
    return re.findall(r"\barg\d+|-> object", stub)


def test_every_signature_has_names_and_types():
    assert unnamed_or_untyped(STUB.read_text()) == []
    assert unnamed_or_untyped("def f(arg0: int, arg1: int, /) -> object") == [
        *("arg0", "arg1", "-> object")
    ]
