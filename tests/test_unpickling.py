# SPDX-License-Identifier: Apache-2.0
"""ringcomm never builds objects from bytes that others may choose, except for listed reasons.

Unpickling, ``eval`` and similar functions execute their input. The test searches the syntax trees,
and resolves imported names.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT

SHIPPED = ("ringcomm", "kernels", "bench", "tools", "setup.py")

# Modules whose names all count, since they unpickle or send objects.
MODULES = ("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib")
CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "torch.load",
    "torch.jit.load",
    "torch.package.PackageImporter",
    "numpy.load",
    "numpy.fromfile",
    "yaml.load",
    "yaml.full_load",
    "yaml.unsafe_load",
    "multiprocessing.Pipe",
    "multiprocessing.Queue",
    "multiprocessing.connection.Client",
    "multiprocessing.connection.Listener",
    "torch.distributed.all_gather_object",
    "torch.distributed.broadcast_object_list",
    "torch.distributed.gather_object",
    "torch.distributed.scatter_object_list",
}
# These only write.
HARMLESS = {"pickle.dumps", "pickle.dump", "pickle.PicklingError"}

ALLOWED = {
    (
        "ringcomm/comm/objects.py",
        "pickle.loads",
    ): "CommOptions(objects='pickle') asks for it",
}


def reading(source: str) -> Iterator[tuple[int, str]]:
    """Yields line and dotted name of every call in ``source`` that may execute its input."""
    tree = ast.parse(source)
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                names[alias.asname or name] = name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Load):
            head, dot, rest = ast.unparse(node).partition(".")
            dotted = names.get(head, head) + dot + rest
            of_module = dotted.partition(".")[0] in MODULES and "." in dotted and head in names
            if (of_module or dotted in CALLS) and dotted not in HARMLESS:
                yield node.lineno, dotted


def shipped() -> Iterator[Path]:
    for top in SHIPPED:
        path = ROOT / top
        yield from [path] if path.is_file() else sorted(path.rglob("*.py"))


def test_nothing_shipped_runs_what_it_reads():
    found = {
        (str(path.relative_to(ROOT)), name)
        for path in shipped()
        if "_tl" not in path.relative_to(ROOT).parts
        for _, name in reading(path.read_text())
    }
    assert found == set(ALLOWED), "each needs a reason in ALLOWED, or another format"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.loads(b'')",
        "import pickle as p\np.Unpickler(f)",
        "from pickle import loads\nloads(b'')",
        "from pickle import loads as read\nread(b'')",
        "import torch\ntorch.load('x')",
        "from torch import load\nload('x', weights_only=True)",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import marshal\nf = marshal.loads",
        "import shelve\nshelve.open('x')",
        "eval('1')",
        "import yaml\nyaml.load('x')",
        "import torch.distributed as dist\ndist.all_gather_object([], 1)",
        "def f():\n    import dill\n    return dill.load(g)",
    ],
)
def test_what_is_found(source):
    assert len(list(reading(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.dumps(1)",
        "import json\njson.loads('1')",
        "model.eval()",
        "import re\nre.compile('x')",
        "from safetensors.torch import load_file\nload_file('x')",
    ],
)
def test_what_is_not(source):
    assert list(reading(source)) == []
