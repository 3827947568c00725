# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer on ringcomm.zero trains bit for bit like a loop, resumed runs included."""

import functools
import logging
import os
import warnings
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ringcomm import zero
from ringcomm.errors import ArgumentError, UnsupportedError
from ringcomm.optim import AdamW
from ringcomm.zero import Precision, ZeroOptions
from tests.packaging.documents import DOCS, blocks_of
from tests.support.rank_pool import RankPool, launched, same

PAGE = DOCS / "integrations" / "lightning.md"
BATCH, ACCUMULATED, EPOCHS, SAMPLES = 4, 2, 3, 32
MIXED = ZeroOptions(precision=Precision.preset("bf16-mixed"))


@pytest.fixture(scope="module")
def ranks():
    if find_spec("lightning") is None:
        pytest.skip("Lightning is not installed: make integrations installs it")
    with closing(RankPool(2, imports=("lightning.pytorch",))) as pool:
        yield pool


def make_net(seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
    return net.append(nn.Linear(16, 1))


def make_data():
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sin().sum(dim=1, keepdim=True))


def make_module(seed=0, **changes):
    """Makes a LightningModule; ``changes`` replace its methods."""
    from lightning.pytorch import LightningModule

    class Regression(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = make_net(seed)

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, number):
            x, y = batch
            return nn.functional.mse_loss(self(x), y)

        def validation_step(self, batch, number):
            self.log("error", self.training_step(batch, number), sync_dist=True)

        def predict_step(self, batch, number):
            return self(batch[0])

        def configure_optimizers(self):
            optimizer = AdamW(self.parameters(), lr=0.01)
            return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, 1, gamma=0.5)}

    return type("Changed", (Regression,), changes)()


def make_trainer(strategy, folder, epochs=EPOCHS, **settings):
    from lightning.pytorch import Trainer

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Trainer(
            **{
                "accelerator": "cpu",
                "devices": 2,
                "strategy": strategy,
                "max_epochs": epochs,
                "accumulate_grad_batches": ACCUMULATED,
                "gradient_clip_val": 0.5,
                **dict(default_root_dir=folder, **quiet),
                **settings,
            }
        )


def fit(trainer, module, **more):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the number of loader workers
        trainer.fit(module, DataLoader(make_data(), batch_size=BATCH), **more)


def looped(stage, options, rank):
    """Returns the weights after the loop that the Trainer must reproduce."""
    net = make_net()
    zero.shard(net, stage, options=options)
    optimizer = AdamW(net.parameters(), lr=0.01)
    schedule = StepLR(optimizer, 1, gamma=0.5)
    # Lightning inserts this sampler, which shuffles.
    sampler: DistributedSampler = DistributedSampler(make_data(), 2, rank)
    batches = DataLoader(make_data(), batch_size=BATCH, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(batches, 1):
            loss = nn.functional.mse_loss(net(x), y) / ACCUMULATED
            if number % ACCUMULATED:
                with zero.no_sync(net):
                    loss.backward()
                continue
            loss.backward()
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
    return zero.full_state_dict(net)


def weights_of(module):
    """Returns the whole weights of the module's net, by their names in the net."""
    with zero.unsharded(list(module.parameters())):
        return {name: value.clone() for name, value in module.net.state_dict().items()}


def train(stage, settings, folder, rank, world_size):
    from ringcomm.extras.lightning import RingcommStrategy

    strategy = functools.partial(RingcommStrategy, stage, **settings)
    expected = looped(stage, settings.get("options"), rank)
    module = make_module()
    trainer = make_trainer(strategy(), folder, enable_checkpointing=False)
    fit(trainer, module)
    same(weights_of(module), expected)
    found = trainer.predict(module, DataLoader(make_data(), batch_size=SAMPLES))
    assert len(found) == 1 and found[0].shape == (SAMPLES // 2, 1)

    # Trains two epochs, saved twice in one place; then resumes the third with another module.
    first = make_module()
    trainer = make_trainer(strategy(), folder, epochs=2, enable_checkpointing=False)
    fit(trainer, first)
    trainer.save_checkpoint(folder / "x.ckpt")
    trainer.save_checkpoint(folder / "x.ckpt")
    resumed = make_module(seed=5)
    trainer = make_trainer(strategy(), folder, enable_checkpointing=False)
    fit(trainer, resumed, ckpt_path=folder / "x.ckpt")
    assert trainer.global_step == EPOCHS * SAMPLES // 2 // BATCH // ACCUMULATED
    same(weights_of(resumed), expected)


@pytest.mark.parametrize(
    ("stage", "settings"),
    [
        (1, {}),
        (2, {"checkpoint": "sharded"}),
        (3, {}),
        (3, {"checkpoint": "sharded", "submodule": "net", "options": MIXED}),
        (2, {"submodule": "net", "options": MIXED}),
    ],
    ids=["1-full", "2-sharded", "3-full", "3-sharded-bf16", "2-full-bf16"],
)
def test_as_the_loop_of_torch(ranks, tmp_path, stage, settings):
    ranks.run(functools.partial(launched, functools.partial(train, stage, settings, tmp_path)))


def full_file(folder, rank, world_size):
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    from ringcomm.extras.lightning import RingcommStrategy

    module = make_module()
    best = ModelCheckpoint(folder, "best", monitor="error", save_last=True)
    calls = [best, EarlyStopping("error", patience=1)]
    trainer = make_trainer(RingcommStrategy(3), folder, callbacks=calls)
    fit(trainer, module, val_dataloaders=DataLoader(make_data(), batch_size=BATCH))
    saved = torch.load(folder / "best.ckpt", weights_only=True)
    # torch's own optimizer and a module without ringcomm can load the file.
    alone = make_module(seed=4)
    alone.load_state_dict(saved["state_dict"])
    torch.optim.AdamW(alone.parameters()).load_state_dict(saved["optimizer_states"][0])
    same({k.removeprefix("net."): v for k, v in saved["state_dict"].items()}, weights_of(module))
    # Fitting the sharded module once more shards it again.
    trainer = make_trainer(RingcommStrategy(2), folder, callbacks=[], epochs=1)
    fit(trainer, module)
    zero.remove_sharding(module)
    module.state_dict()


def test_a_file_of_whole_weights_and_callbacks(ranks, tmp_path):
    ranks.run(functools.partial(launched, functools.partial(full_file, tmp_path)))


def by_hand(self, batch, number):
    optimizer = self.optimizers()
    optimizer.zero_grad()
    self.manual_backward(nn.functional.mse_loss(self(batch[0]), batch[1]))
    self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="value")
    optimizer.step()


def steps_by_hand(folder, rank, world_size):
    from ringcomm.extras.lightning import RingcommStrategy

    ends = []
    for stage in (1, 3):
        module = make_module(training_step=by_hand, automatic_optimization=False)
        usual_settings = {"accumulate_grad_batches": 1, "gradient_clip_val": None}
        strategy = RingcommStrategy(stage, accumulate_locally=False)
        fit(
            make_trainer(strategy, folder, enable_checkpointing=False, **usual_settings),
            module,
        )
        ends.append(weights_of(module))
    same(*ends)
    assert not torch.equal(ends[0]["0.weight"], make_net()[0].weight)


def test_steps_by_hand(ranks, tmp_path):
    ranks.run(functools.partial(launched, functools.partial(steps_by_hand, tmp_path)))


def norms_of(strategy, folder):
    """Returns the norms that Lightning's own function computes before each step."""
    from lightning.pytorch.utilities import grad_norm

    found = []

    def look(self, optimizer):
        found.append({name: float(norm) for name, norm in grad_norm(self, 2).items()})

    def torch_optimizer(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    changes: Any = {"on_before_optimizer_step": look}
    if strategy == "ddp":
        changes["configure_optimizers"] = torch_optimizer
    trainer = make_trainer(strategy, folder, epochs=1, enable_checkpointing=False)
    fit(trainer, make_module(**changes))
    return found


def logged_norms(folder, rank, world_size):
    from ringcomm.extras.lightning import RingcommStrategy

    wanted = norms_of("ddp", folder)
    assert len(wanted[0]) == 7  # one norm per parameter, and the norm of all
    for stage in (0, 1, 2, 3):
        torch.testing.assert_close(norms_of(RingcommStrategy(stage), folder), wanted)


def test_logged_norms_are_those_of_ddp(ranks, tmp_path):
    ranks.run(functools.partial(launched, functools.partial(logged_norms, tmp_path)))


def refusals(folder, rank, world_size):
    from ringcomm.extras.lightning import RingcommStrategy

    def attempt(strategy=None, module=None, **settings):
        trainer = make_trainer(
            strategy or RingcommStrategy(1), folder, enable_checkpointing=False, **settings
        )
        fit(trainer, module or make_module())

    with pytest.raises(UnsupportedError, match=r"precision: .* got MixedPrecision: autocast"):
        attempt(precision="bf16-mixed")
    from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging

    for stage in (0, 1, 2, 3):
        for average in (StochasticWeightAveraging(swa_lrs=0.1), WeightAveraging()):
            name = type(average).__name__
            with pytest.raises(UnsupportedError, match=f"{name}: expected no callback"):
                attempt(RingcommStrategy(stage), callbacks=[average])
    with pytest.raises(UnsupportedError, match="convert_sync_batchnorm"):
        attempt(sync_batchnorm=True)
    with pytest.raises(ArgumentError, match="find_unused_parameters: expected settings for"):
        attempt(RingcommStrategy(1, find_unused_parameters=True))
    with pytest.raises(ArgumentError, match=r'"full" or "sharded", got .both'):
        RingcommStrategy(1, checkpoint="both")  # type: ignore[arg-type]

    def torch_optimizer(self):
        return torch.optim.AdamW(self.parameters())

    with pytest.raises(ArgumentError, match=r"expected an optimizer of ringcomm.optim, got AdamW"):
        attempt(module=make_module(configure_optimizers=torch_optimizer))

    def two_optimizers(self):
        return [AdamW(self.net[0].parameters()), AdamW(self.net[2:].parameters())]

    module = make_module(configure_optimizers=two_optimizers, automatic_optimization=False)
    with pytest.raises(UnsupportedError, match="expected one optimizer, got 2"):
        attempt(module=module, gradient_clip_val=None, accumulate_grad_batches=1)
    module = make_module()
    module.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(ArgumentError, match="in 'net', but scale is outside"):
        attempt(RingcommStrategy(1, submodule="net"), module)


def test_what_cannot_be_is_refused(ranks, tmp_path):
    ranks.run(functools.partial(launched, functools.partial(refusals, tmp_path)))


def program(folder, rank, world_size):
    os.chdir(folder)
    (block,) = blocks_of(PAGE, "python")
    exec(compile(block.text, str(block), "exec"), {"__name__": "__main__"})


def test_the_program_of_the_page(ranks, tmp_path):
    ranks.run(functools.partial(launched, functools.partial(program, tmp_path)))
    assert [path.name for path in Path(tmp_path).glob("*.ckpt")] == ["run.ckpt"]
