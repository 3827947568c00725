# SPDX-License-Identifier: Apache-2.0
"""Trainer and Accelerate on ringcomm.zero train bit for bit like a loop, resumed runs included."""

import contextlib
import functools
import io
import os
import runpy
from contextlib import closing
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ringcomm
from ringcomm import zero
from ringcomm.errors import ArgumentError, UnsupportedError
from ringcomm.optim import SGD, AdamW
from ringcomm.zero import Precision, ZeroOptions
from tests.packaging.documents import DOCS, blocks_of
from tests.support.covering import in_test_all
from tests.support.rank_pool import RankPool, launched, same

PAGE = DOCS / "integrations" / "hugging-face.md"
BATCH, ACCUMULATED, STEPS, SAVED = 2, 2, 6, 4
MIXED = ZeroOptions(precision=Precision.preset("bf16-mixed"))
IMPORTS = ("accelerate", "transformers.trainer", "transformers.models.llama.modeling_llama")


@pytest.fixture(scope="module")
def ranks():
    for package in ("accelerate", "transformers"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install {package}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with closing(RankPool(2, imports=IMPORTS)) as pool:
        yield pool


class Net(nn.Module):
    """A model that returns its loss, as the Trainer requires."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x, labels):
        out = self.layers(x)
        return {"loss": nn.functional.mse_loss(out.float(), labels), "out": out}


def samples():
    """Returns exactly the samples that the steps use, in order."""
    x = torch.randn(2 * BATCH * ACCUMULATED * STEPS, 8, generator=torch.Generator().manual_seed(1))
    return x, x.sin().sum(dim=1, keepdim=True)


def decaying(net):
    weights = [param for name, param in net.named_parameters() if name.endswith("weight")]
    biases = [param for name, param in net.named_parameters() if name.endswith("bias")]
    return [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]


def sharded(stage, options, seed=0):
    """Returns a sharded model with its optimizer and a schedule."""
    from transformers import get_linear_schedule_with_warmup

    net = zero.shard(Net(seed), stage, options=options)
    optimizer = AdamW(decaying(net), lr=0.01)
    return net, optimizer, get_linear_schedule_with_warmup(optimizer, 1, STEPS)


def by_hand(stage, options, rank):
    """Returns the weights after the loop that the libraries must reproduce."""
    net, optimizer, schedule = sharded(stage, options)
    batches = list(zip(*(each.split(BATCH) for each in samples()), strict=True))[rank::2]
    for number, (x, labels) in enumerate(batches, 1):
        loss = net(x, labels)["loss"] / ACCUMULATED
        if number % ACCUMULATED:
            with zero.no_sync(net):
                loss.backward()
            continue
        loss.backward()
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return zero.full_state_dict(net)


CASES = [(1, None), (3, None), (2, MIXED)]
IDS = ["1", "3", "2-bf16"]


# ---- Accelerate ---------------------------------------------------------------------------------


def forget_accelerators():
    """Resets Accelerate's process-wide state, which separate checks must not share."""
    from accelerate import state

    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()


def make_accelerator(**settings):
    from ringcomm.extras.accelerate import ZeroAccelerator

    forget_accelerators()
    return ZeroAccelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED, **settings)


def run_loop(accelerator, things, folder=None):
    """Trains the remaining steps, or the first ones with a folder, in which it saves."""
    net, optimizer, schedule, data = things
    begin = 0 if folder is not None else SAVED
    batches = list(data)[begin * ACCUMULATED : (SAVED if folder else STEPS) * ACCUMULATED]
    for x, labels in batches:
        with accelerator.accumulate(net):
            accelerator.backward(net(x, labels)["loss"])
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            if accelerator.sync_gradients:
                schedule.step()
            optimizer.zero_grad()
    if folder is not None:
        accelerator.save_state(folder)
        accelerator.save_state(folder)  # saves once more to the same place


def accelerate(stage, options, folder, rank, world_size):
    expected = by_hand(stage, options, rank)
    for seed in (0, 5):
        # Otherwise Accelerate would step the schedule once per rank.
        accelerator = make_accelerator(step_scheduler_with_optimizer=False)
        data = DataLoader(TensorDataset(*samples()), batch_size=BATCH)
        net, optimizer, schedule = sharded(stage, options, seed)
        things = accelerator.prepare(net, optimizer, schedule, data)
        if seed == 0:
            run_loop(accelerator, things, folder)
        else:
            accelerator.load_state(folder)
        assert things[0] is net
        run_loop(accelerator, things)
        found = accelerator.get_state_dict(net)
        same(found, expected if rank == 0 else {})
    accelerator.save_model(net, folder / "model")
    if rank == 0:
        from safetensors.torch import load_file

        same(load_file(folder / "model" / "model.safetensors"), dict(sorted(expected.items())))


@pytest.mark.parametrize(("stage", "options"), CASES, ids=IDS)
def test_accelerate_as_the_loop_of_torch(ranks, tmp_path, stage, options):
    check = functools.partial(accelerate, stage, options, tmp_path)
    ranks.run(functools.partial(launched, check))


def accelerate_refusals(rank, world_size):
    with pytest.raises(UnsupportedError, match=r"mixed_precision: expected 'no', got 'bf16'"):
        make_accelerator(mixed_precision="bf16")
    accelerator = make_accelerator()
    with pytest.raises(ArgumentError, match=r"prepare: expected a module that .* got a Net that"):
        accelerator.prepare(Net())
    net, optimizer, _ = sharded(3, None)
    with pytest.raises(ArgumentError, match=r"an optimizer of ringcomm\.optim, got SGD"):
        accelerator.prepare(net, torch.optim.SGD([torch.ones(1, device="cpu")]))
    net, optimizer = accelerator.prepare(net, optimizer)
    with pytest.raises(ArgumentError, match="got 1 that do not belong to one optimizer"):
        accelerator.clip_grad_norm_(torch.ones(2, requires_grad=True, device="cpu"), 1.0)
    # Sets gradients of some parameters, and of single elements.
    optimizer.optimizer.prepare()
    accelerator.backward(net(torch.ones(2, 8), torch.ones(2, 1))["loss"])
    whole = zero.get_gradient(dict(net.named_parameters())["layers.2.weight"])
    norm = accelerator.clip_grad_norm_(net.layers[2].parameters(), 1e9)
    accelerator.clip_grad_value_(net.parameters(), 0.01)
    clipped = zero.get_gradient(dict(net.named_parameters())["layers.2.weight"])
    same(clipped, whole.clamp(-0.01, 0.01))
    assert norm >= whole.norm() > 0
    # A module without gradients is prepared as by Accelerate alone.
    assert accelerator.prepare(Net().requires_grad_(False)).layers


def test_what_accelerate_is_refused(ranks):
    ranks.run(functools.partial(launched, accelerate_refusals))


# ---- Trainer ------------------------------------------------------------------------------------


def make_trainer(model, folder, stage, options=None, settings=None, **changes):
    from torch.utils.data import SequentialSampler
    from transformers import TrainingArguments

    from ringcomm.extras.transformers import ZeroTrainer

    class InOrder(ZeroTrainer):
        def _get_train_sampler(self, train_dataset=None):
            return SequentialSampler(self.train_dataset)

    arguments = {
        "output_dir": str(folder),
        "per_device_train_batch_size": BATCH,
        "max_steps": STEPS,
        "gradient_accumulation_steps": ACCUMULATED,
        "learning_rate": 0.01,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "warmup_steps": 1,
        "save_steps": SAVED,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_strategy": "no",
        **(settings or {}),
    }
    x, labels = samples()
    data = [{"x": one, "labels": other} for one, other in zip(x, labels, strict=True)]
    changes = {"train_dataset": data, **changes}
    arguments = TrainingArguments(**arguments)
    return InOrder(model, arguments, stage=stage, zero_options=options, **changes)


def trainer(stage, options, folder, rank, world_size):
    expected = by_hand(stage, options, rank)
    for seed, resumed in ((0, None), (5, str(folder / f"checkpoint-{SAVED}"))):
        made = make_trainer(Net(seed), folder, stage, options)
        made.train(resume_from_checkpoint=resumed)
        same(zero.full_state_dict(made.model), expected)
        assert made.state.global_step == STEPS
    made.save_model(str(folder / "last"))
    if rank == 0:
        from safetensors.torch import load_file

        same(load_file(folder / "last" / "model.safetensors"), dict(sorted(expected.items())))


@pytest.mark.parametrize(("stage", "options"), CASES, ids=IDS)
def test_trainer_as_the_loop_of_torch(ranks, tmp_path, stage, options):
    check = functools.partial(trainer, stage, options, tmp_path)
    ranks.run(functools.partial(launched, check))


def compiled_trainer(folder, rank, world_size):
    """Trainer clears the gradients of a compiled module, and logs the norm of all gradients."""
    settings = {"torch_compile": True, "torch_compile_backend": "eager", "logging_steps": 1}
    settings |= {"logging_strategy": "steps", "save_strategy": "no"}
    norms = []
    for stage in (0, *in_test_all(1, 2), 3):
        made = make_trainer(Net(), folder, stage, settings=settings)
        made.train()
        torch.testing.assert_close(zero.full_state_dict(made.model), by_hand(stage, None, rank))
        history = made.state.log_history
        norms.append([each["grad_norm"] for each in history if "grad_norm" in each])
    assert len(norms[0]) == STEPS and all(each == norms[0] for each in norms)


def test_a_compiled_model_has_its_gradients_cleared(ranks, tmp_path):
    ranks.run(functools.partial(launched, functools.partial(compiled_trainer, tmp_path)))


def llama(folder, rank, world_size):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
    data = [{"input_ids": (torch.arange(8) + each) % 32} for each in range(16)]
    data = [{**each, "labels": each["input_ids"]} for each in data]
    settings = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_steps": 1,
        "max_steps": 3,
        "optim": "sgd",
    }
    settings |= {"load_best_model_at_end": True, "save_total_limit": 1}
    made = make_trainer(*(model, folder, 3, None, settings), train_dataset=data, eval_dataset=data)
    made.train()
    best = LlamaForCausalLM.from_pretrained(made.state.best_model_checkpoint)
    same(dict(best.state_dict()), zero.full_state_dict(made.model))
    # The model stays sharded: the next training uses it with a new optimizer.
    made.train()
    # Moving a model to its device, as Trainer does, leaves a sharded model in place.
    placed = zero.shard(Net(), 1)
    for _ in range(2):
        optimizer = SGD(placed.parameters(), lr=0.01)
        settings = {"max_steps": 1, "save_strategy": "no"}
        make_trainer(placed, folder, 1, settings=settings, optimizers=(optimizer, None)).train()
    with pytest.raises(ArgumentError, match="optimizers: expected None, or an optimizer of"):
        net = Net()
        make_trainer(net, folder, 1, optimizers=(SGD(net.parameters()), None)).train()
    with pytest.raises(ArgumentError, match="optimizers: expected an optimizer of ringcomm"):
        make_trainer(net, folder, 1, optimizers=(torch.optim.SGD(net.parameters()), None))
    with pytest.raises(UnsupportedError, match="ZeroTrainer: mixed_precision: expected 'no'"):
        make_trainer(net, folder, 1, settings={"bf16": True})


def test_a_model_of_the_library(ranks, tmp_path):
    ranks.run(functools.partial(launched, functools.partial(llama, tmp_path)))


def program(number, folder, rank, world_size):
    os.chdir(folder)
    block = blocks_of(PAGE, "python")[number]
    exec(compile(block.text, str(block), "exec"), {"__name__": "__main__"})


# ---- the examples of docs/ ----------------------------------------------------------------------


def printed_losses(name):
    """Returns the losses that an example prints on this rank, run in the present group."""
    printed = io.StringIO()
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        mock.patch.object(ringcomm, "init_process_group"),
        mock.patch.object(ringcomm, "destroy_process_group"),
        contextlib.redirect_stdout(printed),
    ):
        runpy.run_path(str(DOCS / "examples" / name))["main"]()
    return [float(line.split()[-1]) for line in printed.getvalue().splitlines()]


def losses_of_one_process(example):
    """Returns the losses of one process that averages the gradients of two ranks' batches."""
    model, found = example["make_model"](), []
    optimizer = AdamW(model.parameters(), lr=example["LEARNING_RATE"], comm="alone")
    for step in range(example["STEPS"]):
        means, gradients = [], []
        for rank in range(2):
            tokens = example["make_batch"](step, rank, 2)
            loss = model(input_ids=tokens, labels=tokens).loss
            means.append(loss.detach())
            gradients.append(torch.autograd.grad(loss, list(model.parameters())))
        for parameter, one, other in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = (one + other) / 2
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        found.append(float(f"{(sum(means) / 2).item():.6f}"))
    return found


def transformers_example(rank, world_size):
    found = printed_losses("transformers_adamw.py")
    if rank == 0:
        assert len(found) == 30 and found[-1] < found[0] / 8
        path = str(DOCS / "examples" / "transformers_adamw.py")
        assert found == losses_of_one_process(runpy.run_path(path))


def test_the_example_of_transformers(ranks):
    ranks.run(functools.partial(launched, transformers_example))


def accelerate_example(rank, world_size):
    forget_accelerators()
    found = printed_losses("accelerate_ddp.py")
    assert bool(found) == (rank == 0)
    assert not found or (len(found) == 10 and found[-1] < found[0] / 4)
    return found


def test_the_example_of_accelerate_as_on_gloo(ranks):
    ranks.compare(functools.partial(launched, accelerate_example))


@pytest.mark.parametrize("number", [0, 1])
def test_the_programs_of_the_page(ranks, tmp_path, number):
    assert len(blocks_of(PAGE, "python")) == 2
    ranks.run(functools.partial(launched, functools.partial(program, number, tmp_path)))
