# SPDX-License-Identifier: Apache-2.0
"""Trains a byte-level GPT on text, data-parallel, with ringcomm.zero: what ``ringcomm train`` runs.

Read it from top to bottom: options, model, sharding and a step, checkpoints, memory, and the run
with its report. A copy of this file runs alone: torchrun --nproc-per-node 2 train_gpt.py --steps
50. Shapes in comments: B sequences, T positions, D width, H heads, K = D / H.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ringcomm
from ringcomm import ArgumentError, Communicator, Disk, MismatchError, zero
from ringcomm.examples.corpus import Corpus, draw, read_corpus
from ringcomm.optim import AdamW, AdamWOptions, LossScaleOptions, LossScaler
from ringcomm.zero.checkpoint import Checkpoints

# Options and their command line, which ``ringcomm train`` shares.

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def flag(default: Any, text: str, choices: Collection[str] | None = None) -> Any:
    """Declares an option with its default, its help and its choices."""
    return field(default=default, metadata={"help": text, "choices": choices})


@dataclass(frozen=True)
class ModelConfig:
    """The size of a GPT; ``context`` is in bytes, and each byte is a token."""

    width: int = flag(128, "channels of the model")
    depth: int = flag(4, "layers of the model")
    heads: int = flag(4, "attention heads per layer")
    context: int = flag(128, "bytes per sequence")
    tied: bool = flag(False, "share the weights of the embedding and the output layer")

    def __post_init__(self) -> None:
        for name in ("width", "depth", "heads", "context"):
            value = getattr(self, name)
            expect(value >= 1, f"{argument(name)} must be at least 1, got {value}")
        told = f"--width must be a multiple of 2 x --heads, which is {2 * self.heads}"
        expect(self.width % (2 * self.heads) == 0, f"{told}, got {self.width}")


@dataclass(frozen=True)
class Options(ModelConfig):
    """The options of a run, each with its help."""

    data: str | None = flag(None, "text file or folder (default: Python's standard library)")
    steps: int = flag(200, "steps of the optimizer")
    batch: int = flag(16, "sequences per step, on all ranks")
    accum: int = flag(1, "micro-batches per step")
    clip: float | None = flag(None, "largest norm of the gradient (default: none)")
    learning_rate: float = flag(3e-3, "peak of the learning rate")
    seed: int = flag(0, "seed of weights and batches")
    checkpoint_activations: bool = flag(False, "compute layers again in backward, to save memory")
    stage: int = flag(2, "ZeRO stage: 1 shards state, 2 also gradients, 3 also parameters")
    dtype: str = flag("fp32", "dtype of parameters and gradients; masters are FP32", DTYPES)
    loss_scale: float | None = flag(None, "initial loss scale of fp16 (default: 65536)")
    device: str = flag("cpu", "cuda: a rank uses the GPU LOCAL_RANK", ("cpu", "cuda"))
    shard_params: str = flag("node", "ranks that share parameters, over nodes", ("node", "world"))
    shard_state: str = flag("world", "ranks that share the state, over nodes", ("node", "world"))
    offload_state: str | None = flag(None, "folder on a disk for the optimizer's state")
    offload_params: str | None = flag(None, "folder on a disk for parameters, at stage 3")
    save: str | None = flag(None, "folder for checkpoints; the latest two are kept")
    save_every: int = flag(100, "steps between checkpoints; the last step is also saved")
    resume: str | None = flag(None, "resume the latest save; auto: if any", ("latest", "auto"))
    memory: bool = flag(False, "count only memory in use; makes steps slower")
    profile: str | None = flag(None, "folder for a time line of each rank, for Perfetto")
    json: str | None = flag(None, "file for options, losses, memory and speed, for a report")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declares an argument for each option."""
    for each in fields(Options):
        words: dict[str, Any] = {"default": each.default, "help": each.metadata["help"]}
        if each.default not in (None, False) or each.type == "int":
            words["help"] += " (default: %(default)s)"
        if each.type == "bool":
            words["action"] = "store_true"
        else:
            words["choices"] = each.metadata["choices"]
            words["type"] = {"int": int, "float": float, "str": str}[str(each.type).split()[0]]
        if each.name == "resume":
            words |= {"nargs": "?", "const": "latest"}
        parser.add_argument(argument(each.name), **words)


def argument(name: str) -> str:
    """Returns the argument of an option: "--save-every" for save_every."""
    return "--" + name.replace("_", "-")


def check(options: Options, ranks: int) -> None:
    """Raises ArgumentError if ``ranks`` ranks cannot run with the options."""
    for name in ("steps", "batch", "accum", "save_every"):
        value = getattr(options, name)
        expect(value >= 1, f"{argument(name)} must be at least 1, got {value}")
    pieces = ranks * options.accum
    told = f"{options.batch} sequences do not divide among {ranks} ranks x {options.accum} "
    told += f"micro-batches; choose a multiple of {pieces}"
    expect(options.batch % pieces == 0, f"--batch: {told}")
    rate, seed, clip = options.learning_rate, options.seed, options.clip
    expect(0 < rate < math.inf, f"--learning-rate must be above 0, got {rate}")
    expect(0 <= seed < 1 << 31, f"--seed must be in 0 .. 2^31 - 1, got {seed}")
    expect(clip is None or 0 < clip < math.inf, f"--clip must be a norm above 0, got {clip}")
    expect(options.stage in range(4), f"--stage must be in 0 .. 3, got {options.stage}")
    if options.loss_scale is not None:
        told = f"--loss-scale: {options.dtype} gradients need no scale; take --dtype fp16"
        expect(options.dtype == "fp16", told)
        try:
            LossScaleOptions(init_scale=options.loss_scale)
        except ArgumentError as error:
            raise ArgumentError(f"--loss-scale: {str(error).partition(': ')[2]}") from error


def expect(holds: bool, message: str) -> None:
    """Raises ArgumentError with the message unless the condition holds."""
    if not holds:
        raise ArgumentError(message)


# The model: a pre-norm decoder over the 256 byte values. RMSNorm without weights, rotary positions,
# causal attention with normalized queries and keys, an MLP with a squared ReLU.

VOCABULARY = 256
HEARTBEAT_S = 30.0  # a step is printed if the last printed step ended this long ago


def norm(x: Tensor) -> Tensor:
    """RMS-normalizes the last dimension; any shape."""
    return F.rms_norm(x, (x.size(-1),))


def rotary_angles(context: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines of the rotary positions, each (T, K/2) in FP32."""
    channel = torch.arange(0, head_width, 2, dtype=torch.float32)
    frequency = 10_000.0 ** (-channel / head_width)  # (K/2,)
    angle = torch.outer(torch.arange(context, dtype=torch.float32), frequency)  # (T, K/2)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates each channel pair of x (B, H, T, K) by the angle (T, K/2) of its position."""
    first, second = x.chunk(2, dim=-1)  # (B, H, T, K/2) each
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Attention(nn.Module):
    """Causal multi-head self-attention; maps x (B, T, D) to (B, T, D)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.project_in = nn.Linear(config.width, 3 * config.width, bias=False)
        self.project_out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.project_in(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)  # (B, H, T, K) each
        query, key = norm(rotate(query, cos, sin)), norm(rotate(key, cos, sin))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)  # (B, H, T, K)
        out: Tensor = self.project_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class MLP(nn.Module):
    """Two linear layers around a squared ReLU; maps x (B, T, D) to (B, T, D)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.expand = nn.Linear(config.width, 4 * config.width, bias=False)
        self.contract = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.contract(F.relu(self.expand(x)).square())
        return out


class Block(nn.Module):
    """One decoder layer; maps x (B, T, D) to (B, T, D)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(norm(x), cos, sin)
        out: Tensor = x + self.mlp(norm(x))
        return out


class GPT(nn.Module):
    """The model. With one ``torch.manual_seed`` before its creation, all ranks get equal weights.

    With ``checkpoints_activations`` forward keeps only the inputs of layers, and backward computes
    the other activations again. Chen et al., "Training Deep Nets with Sublinear Memory Cost"
    (2016).
    """

    cos: Tensor  # (T, K/2)
    sin: Tensor  # (T, K/2)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.checkpoints_activations = False
        self.embed = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight
        cos, sin = rotary_angles(config.context, config.width // config.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, param in self.named_parameters():
            into_residual = name.endswith(("project_out.weight", "contract.weight"))
            nn.init.normal_(
                param, std=0.02 / math.sqrt(2 * config.depth) if into_residual else 0.02
            )

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean cross-entropy in nats, a scalar; both arguments are (B, T) int64.

        Raises ArgumentError when T exceeds the model's context.
        """
        length, context = tokens.size(1), self.config.context
        expect(length <= context, f"GPT: sequences hold {length} tokens, the context is {context}")
        cos, sin = self.cos[:length], self.sin[:length]
        x = norm(self.embed(tokens))  # (B, T, D)
        for block in self.blocks:
            if self.checkpoints_activations and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, cos, sin)
        logits = self.head(norm(x))  # (B, T, 256)
        # The loss is FP32 even with 16-bit weights, so that its last digits distinguish runs.
        return F.cross_entropy(logits.float().view(-1, VOCABULARY), targets.reshape(-1))


# Sharding and the training step.


class Trainer:
    """A sharded GPT, its optimizer and its text, on one rank."""

    def __init__(self, gpt: GPT, options: Options, comm: Communicator, corpus: Corpus) -> None:
        self.options, self.comm, self.corpus = options, comm, corpus
        self.held_bytes: list[int] = []  # Bytes held in each step, right after the backward.
        self.profile = zero.StepProfile()  # Records the parts of steps, if --profile is given.
        gpt.checkpoints_activations = options.checkpoint_activations
        dtype = DTYPES[options.dtype]
        zero_options = zero.ZeroOptions(
            precision=zero.Precision(param=dtype, buffer=dtype),
            params=options.shard_params,
            state=options.shard_state,
            offload_params=Disk(options.offload_params) if options.offload_params else None,
        )
        gpt.to(comm.device)
        self.module = zero.shard(gpt, options.stage, comm=comm, options=zero_options)
        self.scaler: LossScaler | None = None
        if options.dtype == "fp16":
            scale = LossScaleOptions(init_scale=options.loss_scale or 2.0**16)
            self.scaler = LossScaler(scale, device=comm.device)
        state = AdamWOptions(
            offload_state=Disk(options.offload_state) if options.offload_state else None
        )
        params, betas = self.module.parameters(), (0.9, 0.95)
        self.optimizer = AdamW(
            params, betas=betas, weight_decay=0.1, options=state, loss_scaler=self.scaler
        )

    def step(self, index: int) -> Tensor:
        """Trains on batch ``index``; returns the mean loss of this rank's rows, a scalar."""
        options = self.options
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(index)
        total = torch.zeros((), device=self.comm.device)
        for number, (tokens, targets) in enumerate(self._rows(self.corpus.train, index)):
            is_last = number == options.accum - 1  # the last micro-batch reduces gradients
            with nullcontext() if is_last else zero.no_sync(self.module):
                with self.profile.span("forward", kind="compute"):
                    loss = self.module(tokens, targets) / options.accum
                with self.profile.span("backward", kind="compute"):
                    (self.scaler.scale(loss) if self.scaler else loss).backward()
            total += loss.detach()
        self.held_bytes.append(held_bytes(self.comm.device, trim=options.memory))
        with self.profile.span("step", kind="compute"):
            if options.clip is not None:
                self.optimizer.clip_grad_norm_(options.clip)
            self.optimizer.step()
            # At stages 0 and 1 gradients are views of their bucket, which stays in memory.
            self.optimizer.zero_grad(set_to_none=options.stage >= 2)
        return total

    def _learning_rate(self, index: int) -> float:
        """Returns a step's learning rate: 5 % of steps warm up, then a cosine to peak / 10."""
        peak, steps = self.options.learning_rate, self.options.steps
        warm_up = max(1, int(steps * 0.05))
        if index < warm_up:
            return peak * (index + 1) / warm_up
        progress = (index - warm_up) / max(1, steps - warm_up)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return peak * (0.1 + (1 - 0.1) * cosine)

    def _rows(self, text: Tensor, index: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields this rank's micro-batches of a batch, each (B / ranks / accum, T)."""
        options, comm = self.options, self.comm
        batch = draw(text, options.seed, index, (options.batch, options.context))
        count = options.batch // (comm.world_size * options.accum)
        for number in range(options.accum):
            start = (comm.rank * options.accum + number) * count
            tokens, targets = (part[start : start + count].to(comm.device) for part in batch)
            yield tokens, targets

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Returns the mean loss over eight batches of held-out text, in nats; collective."""
        batches = (self._rows(self.corpus.held_out, index) for index in range(8))
        losses = torch.stack([self.module(*rows) for batch in batches for rows in batch])
        return self.mean_over_ranks(losses).mean().item()

    def mean_over_ranks(self, losses: Tensor) -> Tensor:
        """Averages ``losses`` (any shape) over the ranks, in FP64; collective."""
        total = losses.double()
        self.comm.all_reduce(total)
        return total / self.comm.world_size


# Checkpoints. A resumed run must keep these options: otherwise its losses would differ.

SHARED = ("width", "depth", "heads", "context", "tied", "batch", "steps", "learning_rate", "seed")


def checkpoint_to_resume(options: Options) -> Checkpoints | None:
    """Returns the checkpoints from whose latest the run continues; None: it begins at step 0.

    Raises ArgumentError if ``resume`` is set without a checkpoint, or not set although there is
    one, or if the checkpoint was saved with other options.
    """
    found = Checkpoints(options.save) if options.save else None
    latest = found.latest() if found else None
    if found is None or latest is None:
        told = f"--resume: --save {options.save} holds no complete checkpoint"
        expect(options.resume != "latest", f"{told}; drop --resume, or use --resume auto")
        return None
    told = f"--save {found.root}: holds a checkpoint of step {latest} already; add --resume"
    expect(options.resume is not None, f"{told}, or give another folder")
    user = found.reader().data.get("user")
    saved = user.get("options") if isinstance(user, dict) else None
    for name in SHARED:
        wanted, value = getattr(options, name), saved.get(name) if isinstance(saved, dict) else None
        expect(value == wanted, f"--resume: {found.root}: saved with {name} {value}, got {wanted}")
    is_left = latest != options.steps or options.resume == "auto"
    expect(is_left, f"--resume: all {options.steps} steps are done in {found.root}")
    return found


def resume(trainer: Trainer) -> tuple[list[float], float | None]:
    """Loads the latest checkpoint if the options say so; collective.

    Returns the losses of the earlier steps, and the loss on held-out text before step 0, if known.
    """
    found = checkpoint_to_resume(trainer.options)
    if found is None:
        return [], None
    data = zero.load(found.root, trainer.module, trainer.optimizer).data
    return data["losses"], data["held_out"]


def held_bytes(device: torch.device, *, trim: bool = False) -> int:
    """Returns this rank's bytes in the heap and elsewhere; ``trim`` frees unused memory before.

    On the CPU it reads RssAnon (proc_pid_status(5)): the resident set includes the peers' heaps.
    """
    if device.type != "cpu":
        return ringcomm.heap_stats(device)["used_bytes"] + torch.cuda.memory_allocated(device)
    if trim:
        ctypes.CDLL(None).malloc_trim(0)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return ringcomm.heap_stats()["used_bytes"] + 1024 * int(status["RssAnon"].split()[0])


def gathered(comm: Communicator, values: list[int]) -> list[list[int]]:
    """Returns the values of all ranks, by rank; ranks give equally many values; collective."""
    own = torch.tensor([values], device=comm.device)
    found = own.repeat(comm.world_size, 1)
    comm.all_gather_into_tensor(found, own)
    return cast(list[list[int]], found.tolist())


# The run, and its report.


def train(options: Options, comm: Communicator) -> None:
    """Trains on every rank of ``comm``; rank 0 prints and writes the record; collective.

    Raises:
        ArgumentError: the options do not match the existing checkpoints.
        MismatchError: the ranks have read different text.
        RingcommError: see ``zero.shard``, ``zero.save`` and ``zero.load``.
    """
    corpus = read_corpus(options.data, options.context)
    texts = gathered(comm, [corpus.checksum, corpus.train.numel()])
    if any(each != texts[0] for each in texts):
        raise MismatchError(f"--data: expected one text on all ranks, got (crc, bytes) {texts}")
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])  # loads 80 MB of torch before the measurement
    before_bytes = held_bytes(comm.device, trim=True)
    torch.manual_seed(options.seed)
    gpt = GPT(options)
    elems = sum(param.numel() for param in gpt.parameters())
    given = (f"{name} {value}" for name, value in asdict(options).items() if value is not None)
    say: Callable[[str], None] = partial(print, flush=True) if comm.rank == 0 else lambda text: None
    say(f"ranks   {comm.world_size}, {torch.get_num_threads()} compute thread(s) each")
    say(f"text    {corpus.source}")
    say(f"model   {elems / 1e6:.3g} M parameters\noptions {', '.join(given)}")
    trainer = Trainer(gpt, options, comm, corpus)
    losses, held_out = resume(trainer)
    first, steps_s = len(losses), []
    if first == options.steps:
        return say(f"done          all {options.steps} steps were done before")
    before = trainer.held_out_loss() if held_out is None else held_out
    shown = {first + round(i * (options.steps - 1 - first) / 9) for i in range(10)}
    shown_at_s = time.perf_counter()
    recording = zero.profiled(trainer.module) if options.profile else nullcontext(trainer.profile)
    with recording as trainer.profile:
        for index in range(first, options.steps):
            began = time.perf_counter()
            losses.append(trainer.mean_over_ranks(trainer.step(index)).item())
            steps_s.append(time.perf_counter() - began)
            if index in shown or time.perf_counter() - shown_at_s >= HEARTBEAT_S:
                shown_at_s = time.perf_counter()
                speed, held_mb = tokens_per_s(options, steps_s), trainer.held_bytes[-1] / 1e6
                told = f"{speed:>11,.0f} tokens/s {held_mb:>9,.1f} MB"
                left_s = (options.steps - 1 - index) * sum(steps_s) / len(steps_s)
                say(f"step {index:>6}   loss {losses[-1]:.4f} {told} {left_s:>6,.0f} s left")
            is_last = index + 1 == options.steps
            if options.save and (is_last or (index + 1) % options.save_every == 0):
                data = {"options": asdict(options), "losses": losses, "held_out": before}
                zero.save(options.save, index + 1, trainer.module, trainer.optimizer, data=data)
    memory = gathered(comm, [before_bytes, *trainer.held_bytes])
    outcome = {
        "first_step": first,
        "losses": losses,
        "held_out_before": before,
        "held_out_after": trainer.held_out_loss(),
        "tokens_per_s": tokens_per_s(options, steps_s),
        "steps_s": steps_s,
        "memory": [{"before_bytes": each[0], "steps_bytes": each[1:]} for each in memory],
        "skipped_steps": int(trainer.optimizer.skipped_steps),
        "loss_scale": trainer.scaler.current.item() if trainer.scaler else None,
    }
    if options.profile:
        path = Path(options.profile, f"rank{comm.rank}.json")
        with writing("profile", options.profile):
            path.parent.mkdir(parents=True, exist_ok=True)
            trainer.profile.write(path, comm.rank)
    if comm.rank == 0:
        report(options, comm.world_size, outcome)


def tokens_per_s(options: Options, steps_s: list[float]) -> float:
    """Returns the tokens per second of all ranks without the first step, which includes setup."""
    timed = steps_s[1:] or steps_s
    return options.batch * options.context * len(timed) / sum(timed)


def report(options: Options, ranks: int, outcome: dict[str, Any]) -> None:
    """Prints the outcome of a run, and writes its record."""
    before, after = outcome["held_out_before"], outcome["held_out_after"]
    bits = after / math.log(2)
    print(f"held-out loss {before:.4f} -> {after:.4f} nats per byte ({bits:.3f} bits)")
    print(f"speed         {outcome['tokens_per_s']:,.0f} tokens/s")
    if outcome["loss_scale"] is not None:
        skipped = f"{outcome['skipped_steps']} of {options.steps} steps were skipped"
        print(f"loss scale    {outcome['loss_scale']:g} at the end; {skipped} for an overflow")
    for rank, held in enumerate(outcome["memory"]):
        most, before = max(held["steps_bytes"]) / 1e6, held["before_bytes"] / 1e6
        print(
            f"memory        rank {rank}: {most:,.1f} MB at most, {most - before:,.1f} by training"
        )
    if options.json:
        versions = {"ringcomm": ringcomm.__version__, "torch": torch.__version__}
        record = {"options": asdict(options), "ranks": ranks, "software": versions}
        text = json.dumps({**record, "outcome": outcome}, indent=2) + "\n"
        with writing("json", options.json):
            Path(options.json).write_text(text, encoding="utf-8")


@contextmanager
def writing(name: str, path: str) -> Iterator[None]:
    """Raises ArgumentError, which names the option, where the block raises OSError."""
    try:
        yield
    except OSError as error:
        told = f"{argument(name)} {path}: cannot be written: {error.strerror}"
        raise ArgumentError(told) from error


def main() -> None:
    """Trains with the command line's options, as a rank of torchrun, mpirun or Slurm, or alone."""
    about = "Trains a byte-level GPT, data-parallel."
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False)
    add_options(parser)
    options = Options(**vars(parser.parse_args()))
    if options.device == "cuda":
        expect("LOCAL_RANK" in os.environ, "--device cuda: expected LOCAL_RANK: use torchrun")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with Communicator.from_env(device=options.device) as comm:
        check(options, comm.world_size)
        train(options, comm)
        comm.barrier()  # rank 0 serves the store of the ranks, so it leaves last


if __name__ == "__main__":
    try:
        main()
    except ringcomm.RingcommError as error:
        sys.exit(f"train_gpt: {error}")
