"""Names of tied tensors: what leaves fnaccel loads into the same module, as `Module.state_dict` does."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_model
from torch import nn

import fnaccel as fa

NAMES = ["head.weight", "inner.weight", "other.weight", "scale", "scales"]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Embedding(6, 3)
        self.head = nn.Linear(3, 6, bias=False)
        self.head.weight = self.inner.weight
        self.other = nn.Linear(3, 6, bias=False)
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("scales", self.scale)

    def forward(self, x):
        return self.head(self.inner(x)).sum() + self.other(self.inner(x)).square().sum()


def loss_fn(model, batch):
    return fa.Mean(model(batch), weight=len(batch))


def trained(strategy, models=Tied):
    model = fa.distribute(models, strategy)
    train_step = fa.train_step(fa.with_ema(loss_fn, 0.5), model=model, optimizer=fa.sgd(0.01))
    return train_step, train_step(train_step.init(seed=0), torch.arange(6))[0]


def leaving(strategy, folder):
    """A state dict, its averages, and exports of each kind."""
    train_step, state = trained(strategy)
    weights = fa.interchange.gather_state_dict(state)
    averages = fa.interchange.gather_state_dict(state, ema=True, rename={"^": "ema."})
    fa.interchange.export_hf(folder / "one", state)
    fa.interchange.export_hf(folder / "several", state, max_shard_size=80)
    fa.interchange.export_hf(folder / "torch", state, safetensors=False)
    train_step.close()
    return weights, averages


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "local"), (2, "ddp"), (2, "fsdp"), (3, "fsdp")])
def test_it_loads_into_the_same_module(pools, tmp_path, ranks, strategy):
    weights, averages = pools.run(ranks, leaving, strategy, tmp_path)[0]
    assert sorted(weights) == NAMES
    Tied().load_state_dict(weights)
    Tied().load_state_dict({name.removeprefix("ema."): value for name, value in averages.items()})
    assert torch.equal(weights["head.weight"], weights["inner.weight"])
    assert not torch.equal(averages["ema.head.weight"], weights["head.weight"])
    found = torch.load(tmp_path / "torch" / "pytorch_model.bin")
    Tied().load_state_dict(found)
    assert found["head.weight"].data_ptr() == found["inner.weight"].data_ptr()
    module = Tied()
    load_model(module, tmp_path / "one" / "model.safetensors")
    assert torch.equal(module.head.weight, weights["inner.weight"])
    with safe_open(tmp_path / "one" / "model.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["inner.weight", "other.weight", "scale"]
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["tied"] == {"head.weight": "inner.weight", "scales": "scale"}
    assert sorted(index["weight_map"]) == ["inner.weight", "other.weight", "scale"]


def test_a_name_can_be_picked():
    with fa.start(device="cpu"):
        _, state = trained("local")
        assert list(fa.interchange.gather_state_dict(state, only="head*")) == ["head.weight"]
        assert "head.weight" not in fa.interchange.gather_state_dict(state, skip="head*")


def test_of_several_models():
    with fa.start(device="cpu"):
        train_step = fa.train_step(
            lambda models, batch: fa.Mean(models["a"](batch) + models["b"](batch), weight=len(batch)),
            model=fa.distribute({"a": Tied, "b": Tied}, "local"),
            optimizer={"a": fa.sgd(0.01), "b": fa.sgd(0.01)},
        )
        state = train_step.init(seed=0)
        assert sorted(fa.interchange.gather_state_dict(state, model="b")) == NAMES


def test_an_export_is_read_back(tmp_path):
    with fa.start(device="cpu"):
        _, state = trained("local")
        fa.interchange.export_hf(tmp_path / "out", state, safetensors=False)
        other = fa.train_step(loss_fn, model=fa.distribute(Tied, "local"), optimizer=fa.sgd(0.01))
        adopted = fa.interchange.adopt(tmp_path / "out", like=other.init(seed=3))
        assert torch.equal(adopted.params["inner.weight"], state.params["inner.weight"])
