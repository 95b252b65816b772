"""A model that transformers has put on several devices, or on the disk, is refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import fnaccel as fa
from fnaccel.errors import CapabilityError
from tests.interchange.hf_models import IDS, gpt2, loss


@pytest.fixture
def world():
    with fa.start(device="cpu"):
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    gpt2().save_pretrained(folder)
    return folder


def train(model, optimizer):
    step = fa.train_step(loss, model=fa.distribute(model, fa.local()), optimizer=optimizer)
    return step.init(seed=0), step


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner


NAMED = "GPT2LMHeadModel has by its hf_device_map transformer.wte on cpu, transformer.h on disk"
PARTS = {"transformer.wte": "cpu", "transformer.wpe": "cpu", "transformer.drop": "cpu", "lm_head": "cpu"}


@pytest.mark.parametrize("optimizer", [fa.sgd(0.1), None], ids=["training", "without"])
@pytest.mark.parametrize("wrap", [Around, lambda model: lambda: model], ids=["wrapped", "factory"])
def test_a_part_on_the_disk(world, saved, tmp_path, optimizer, wrap):
    placed = {**PARTS, "transformer.h": "disk", "transformer.ln_f": "disk"}
    model = AutoModelForCausalLM.from_pretrained(saved, device_map=placed, offload_folder=tmp_path)
    with pytest.raises(CapabilityError, match=NAMED) as e:
        train(wrap(model), optimizer)
    assert "fa.big.load" in e.value.fix


@pytest.mark.parametrize(
    "placed", [{"": "disk"}, {"transformer": 0, "lm_head": 1}, {"a": 0, "b": "cpu"}], ids=str
)
def test_maps_that_no_engine_can_move(world, placed):
    """Set by hand, as with two accelerators. A quantized model (`is_loaded_in_8bit`) is treated alike."""
    model = gpt2()
    model.hf_device_map, model.is_loaded_in_8bit = placed, True
    with pytest.raises(CapabilityError, match="a train step needs a model on one device"):
        train(model, fa.sgd(0.1))


@pytest.mark.parametrize("noted", [{"": torch.device("cpu")}, "auto"], ids=str)
def test_a_model_that_lies_whole_on_one_device_trains(world, saved, noted):
    model = AutoModelForCausalLM.from_pretrained(saved, device_map="cpu")
    model.hf_device_map = noted  # releases of transformers differ in what they note
    state, step = train(model, fa.sgd(0.1))
    assert step(state, IDS)[0].step == 1
