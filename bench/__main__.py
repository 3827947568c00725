"""``python -m ringcomm.bench [WHAT] ...``, and ``ringcomm bench``: one entry to all benches."""

from __future__ import annotations

import importlib
import sys

from .run import COLLECTIVES, run_process

BENCHES = {
    COLLECTIVES: "collectives of ringcomm and of other libraries; the default",
    "training": "training steps at each ZeRO stage, beside DDP, FSDP2 and DeepSpeed",
    "steps": "the optimizer's step on the CPU, beside torch's and DeepSpeed's",
    "device_steps": "the optimizer's step on a GPU, beside torch's and a copy",
    "model_parallel": "training steps under pipeline, data and tensor parallelism",
    "layers": "a tensor-parallel layer, beside torch's plan for it",
    "products": "matrix products over ranks, beside the collective and the product",
    "moe": "tokens to their experts and back, beside all_to_all_single",
    "nodes": "collectives over nodes, beside Gloo's",
    "curves": "losses by optimizer, and by wire of the gradients",
    "disk": "the rates of a disk under plain loops of direct I/O",
}


def main(words: list[str]) -> None:
    """Runs the bench that the first word names, and ends the process."""
    name = COLLECTIVES
    if words and words[0].replace("-", "_") in BENCHES:
        name = words.pop(0).replace("-", "_")
    run_process(importlib.import_module(f"{__package__}.{name}").BENCH, words)


if __name__ == "__main__":
    main(sys.argv[1:])
