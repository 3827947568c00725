# SPDX-License-Identifier: Apache-2.0
"""Interpreters that end at inconvenient times, with live objects, print nothing on stderr."""

import ast
import json
import os
import subprocess
import sys

import pytest

from tests.memory.disk_folder import skip_unless_disk
from tests.support import ROOT
from tests.support.emulated_driver import COMPILER

WORLD = "world = ringcomm.local_world(2)\n"
# Programs by group and by name; each ends an interpreter while the named objects are alive.
ENDS = {
    "objects": {
        "asynchronous calls": WORLD
        + """
works = world.run(lambda comm: comm.all_reduce(torch.ones(3), async_op=True))
tensors = [ringcomm.zeros(3), ringcomm.empty(5)[1:]]
""",
        "nodes": """
world = ringcomm.local_world(4, nodes=[2, 2])
works = world.run(lambda comm: comm.all_reduce(torch.ones(3), async_op=True))
""",
        "a call that waits for its peer": WORLD
        + "work = world[0].all_reduce(torch.ones(3), async_op=True)\n",
        "a rank that raises": WORLD
        + """
def body(comm):
    comm.all_reduce(torch.ones(3), async_op=True).wait()
    if comm.rank:
        raise ValueError("mine")
    comm.barrier()
with contextlib.suppress(ValueError):
    world.run(body)
""",
        "calls that differ": WORLD
        + """
def body(comm):
    comm.all_reduce(torch.ones(3 + comm.rank), async_op=True).wait()
kept = None
try:
    world.run(body)
except ringcomm.MismatchError as error:
    kept = error
""",
        "sharded modules": WORLD
        + """
def body(comm):
    kept = []
    for stage in range(4):
        net = zero.shard(torch.nn.Linear(8, 8), stage, comm=comm)
        step = optim.AdamW(net.parameters(), lr=0.1, comm=comm)
        net(torch.ones(2, 8)).sum().backward()
        step.step()
        net(torch.ones(2, 8)).sum().backward()
        kept.append((net, step))
    net = torch.nn.Linear(8, 8)
    disk = ringcomm.Disk(FOLDER)
    options = optim.AdamWOptions(accumulate_dtype=torch.float32, offload_state=disk)
    step = optim.AdamW(net.parameters(), lr=0.1, comm=comm, options=options)
    net(torch.ones(2, 8)).sum().backward()
    return kept, net, step
kept = world.run(body)
""",
        "a process group": """
dist.init_process_group("ringcomm", store=dist.HashStore(), rank=0, world_size=1)
work = dist.all_reduce(torch.ones(3), async_op=True)
group = dist.new_group([0])
""",
        "devices": """
from tests.support.device_worlds import emulated_runtime
ringcomm.cuda.use(emulated_runtime())
world = ringcomm.local_world(2, device="cuda:0")
tensor = ringcomm.zeros(3, device="cuda:0")
stream = ringcomm.cuda.current().make_stream(0)
""",
    },
    "cycles, and no collection": {
        "a world": WORLD
        + """
gc.disable()
class Node: pass
node = Node()
node.me, node.world = node, world
node.works = world.run(lambda comm: comm.all_reduce(torch.ones(3), async_op=True))
del world, node
""",
    },
    # At exit the world is closed while threads call it; their later calls raise. When the
    # interpreter is finalized, neither these threads nor the world's workers may be inside torch:
    # torch takes the GIL back in destructors, and before Python 3.14 this ends the thread and
    # aborts (python/cpython#87135). So the workers get time for the whole queue, which may be long.
    "threads that call": {
        "a world": WORLD
        + """
def loop(comm):
    with contextlib.suppress(ringcomm.RingcommError):
        while True:
            comm.all_reduce(torch.ones(3), async_op=True)
for comm in world:
    thread = threading.Thread(target=loop, args=(comm,), daemon=True)
    thread.start()
    at_the_end.append(thread.join)
time.sleep(0.1)
engine.EXIT_GRACE_S = 60
""",
    },
    "a forked child": {
        "a world": WORLD
        + "world.run(lambda comm: comm.all_reduce(torch.ones(3), async_op=True).wait())\n",
        "a scratch file": """
scratch = ScratchFile(FOLDER, "state")
memory = aligned_buffer(8 << 20)
extent = scratch.add_extent(8 << 20)
for _ in range(20):
    scratch.write(extent, memory)
if os.fork():
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
""",
    },
    # The negative control: a destructor reads a global of a module that was already emptied.
    "control": {
        "a destructor": """
import types
module = types.ModuleType("module")
exec("other = 1\\nclass Late:\\n    def __del__(self): other.real", module.__dict__)
sys.modules["module"], late = module, module.Late()
del module
""",
    },
}
# One interpreter forks a child for each program; a child ends as an interpreter does. Modules are
# emptied from the newest to the oldest, and only if something refers to them. So an object held by
# an old module dies after ringcomm's modules were emptied.
DRIVER = """
import atexit
at_the_end = []  # called after all that others register
atexit.register(lambda: [each() for each in at_the_end])
import contextlib, gc, json, os, sys, threading, time
import torch, torch.distributed as dist
import ringcomm
from ringcomm import optim, zero
from ringcomm.comm.host import engine
from ringcomm.offload.scratch import ScratchFile, aligned_buffer

torch.set_num_threads(1)
engine.EXIT_GRACE_S = 0.1  # of calls that do not end
FOLDER = os.getcwd()
told = {}
for name, texts in json.loads(sys.argv[1]).items():
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.dup2(writer, 2)
        os.close(reader)
        os.close(writer)
        break
    os.close(writer)
    with os.fdopen(reader) as file:
        told[name] = file.read()
    told[name] += f"[{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}]"
else:
    print(json.dumps(told))
    sys.exit()
os.all_globals = [dict(globals()) for _ in texts]
for text, names in zip(texts.values(), os.all_globals):
    exec(text, names)
sys.all_modules = list(sys.modules.values())
"""


@pytest.mark.timeout(300)
def test_the_interpreter_ends_in_silence(tmp_path):
    skip_unless_disk(tmp_path)
    ends = {name: dict(texts) for name, texts in ENDS.items()}
    if COMPILER is None:
        del ends["objects"]["devices"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", DRIVER, json.dumps(ends)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert "Exception ignored in" in told.pop("control")
    assert told == dict.fromkeys(told, "[0]")
    assert os.listdir(tmp_path) == []  # not even the scratch file of unfinished writes


# Their destructors use only the object itself.
UNGUARDED = {
    ("ringcomm/cuda/cupy_runtime.py", "CudaStream"),
    ("ringcomm/cuda/cupy_runtime.py", "CudaEvent"),
}


def test_every_destructor_is_silent_at_the_end():
    unguarded, guarded = set(), 0
    paths = [*(ROOT / "ringcomm").rglob("*.py"), *(ROOT / "kernels" / "tl").rglob("*.py")]
    for path in [*paths, *(ROOT / "bench").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ClassDef):
                continue
            for each in node.body:
                if not isinstance(each, ast.FunctionDef) or each.name != "__del__":
                    continue
                if [ast.unparse(mark) for mark in each.decorator_list] == ["until_exit"]:
                    guarded += 1
                else:
                    unguarded.add((path.relative_to(ROOT).as_posix(), node.name))
    assert unguarded == UNGUARDED
    assert guarded >= 6
