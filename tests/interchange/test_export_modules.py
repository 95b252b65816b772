"""`export_hf` of a module that no train step owns: plain, compiled by the user, or dispatched over CPU and disk."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

import fnaccel as fa
from fnaccel.errors import ArgumentError, OwnershipError
from fnaccel.world.world import current
from tests.big.movers import Simulated
from tests.interchange.hf_models import IDS, gpt2, logits, loss

EACH = {"transformer.h.0": 0, "transformer.wte": "disk", "lm_head": "disk", "": "cpu"}


@pytest.fixture
def world():
    with fa.start(device="cpu"):
        yield


def read_again(folder, wanted):
    """transformers finds each weight in an export, and computes with them what the module computed."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(logits(model, IDS), wanted)


@pytest.mark.parametrize("form", ["safetensors", "torch"])
@pytest.mark.parametrize("kind", ["plain", "compiled"])
def test_transformers_loads_a_module(tmp_path, kind, form):
    model = gpt2().eval()
    wanted = logits(model, IDS)
    source = torch.compile(model, backend="eager") if kind == "compiled" else model
    options = {"max_shard_size": "3KB", "safetensors": form == "safetensors"}
    fa.interchange.export_hf(tmp_path / "out", source, **options)
    stem = "model.safetensors" if form == "safetensors" else "pytorch_model.bin"
    assert (tmp_path / "out" / f"{stem}.index.json").exists()
    read_again(tmp_path / "out", wanted)


def test_a_dispatched_module_is_written_from_where_it_lies_and_stays_dispatched(tmp_path):
    model = gpt2().eval()
    wanted = logits(model, IDS)
    fa.interchange.export_hf(tmp_path / "plain", model)
    run = fa.big.dispatch(model, EACH, folder=tmp_path / "weights", device=0, mover=Simulated())
    fa.interchange.export_hf(tmp_path / "dispatched", model, max_shard_size="3KB")
    assert fa.big.dispatch_of(model) is run
    assert model.transformer.wte.weight.is_meta
    with torch.no_grad():
        assert torch.equal(logits(model, IDS), wanted)
    read_again(tmp_path / "dispatched", wanted)
    files = sorted((tmp_path / "dispatched").glob("*.safetensors"))
    assert len(files) > 1
    [whole] = (tmp_path / "plain").glob("*.safetensors")
    written = {name: value for file in files for name, value in load_file(file).items()}
    plain = load_file(whole)
    assert written.keys() == plain.keys()  # a tied weight once, though its two places are read from the disk
    assert all(torch.equal(written[name], plain[name]) for name in plain)


def on_each_rank(folder):
    torch.manual_seed(current().rank)  # ranks differ: that of rank 0 is written
    module = nn.Linear(3, 2)
    fa.interchange.export_hf(folder, module)
    return module.weight.detach()


def test_on_two_ranks_the_module_of_rank_0_is_written(pools, tmp_path):
    first, second = pools.run(2, on_each_rank, tmp_path / "out")
    assert not torch.equal(first, second)
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["weight"], first)


def test_modules_that_have_no_values_of_their_own_are_refused(world, tmp_path):
    model = gpt2()
    step = fa.train_step(loss, model=fa.distribute(model, fa.local()), optimizer=fa.sgd(0.1))
    state = step.init(seed=0)
    with pytest.raises(OwnershipError, match="a module, a GPT2LMHeadModel that a train step owns"):
        fa.interchange.export_hf(tmp_path / "out", model)
    with pytest.raises(ArgumentError, match="no averages"):
        fa.interchange.export_hf(tmp_path / "out", nn.Linear(3, 2), ema=True)
    with pytest.raises(ArgumentError, match="without values: weight is on the meta device"):
        fa.interchange.export_hf(tmp_path / "out", nn.Linear(3, 2, device="meta"))
    with pytest.raises(ArgumentError, match="there is no tensor to write"):
        fa.interchange.export_hf(tmp_path / "out", nn.ReLU())
    assert not (tmp_path / "out").exists()
    assert step(state, IDS)[0].step == 1
