"""Models by name: folders, files and ids of transformers, timm, references."""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch
import transformers
from torch import nn

import fnaccel as fa
from fnaccel import errors
from fnaccel.estimate import find_model


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # the variable is read at import


def trained(model, rows=2, length=None):
    return fa.estimate.training(
        model.loss_fn, model=fa.distribute(model.factory, "local"), optimizer=fa.sgd(0.1),
        batch=model.batch(rows, length),
    )  # fmt: skip


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
KINDS = [
    (transformers.BertConfig, "BertForMaskedLM", {**SMALL, "vocab_size": 60, "max_position_embeddings": 16}),
    (transformers.BertConfig, "BertForSequenceClassification", {**SMALL, "vocab_size": 60}),
    (transformers.ViTConfig, "ViTForImageClassification", {**SMALL, "image_size": 32, "patch_size": 8}),
    (
        transformers.T5Config, "T5ForConditionalGeneration",
        {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_heads": 2, "num_layers": 2, "vocab_size": 60,
         "decoder_start_token_id": 0},
    ),
    (transformers.GPT2Config, None, {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 60, "n_positions": 24}),
]  # fmt: skip


@pytest.mark.parametrize(("config", "kind", "options"), KINDS, ids=lambda value: str(value)[:60])
def test_kinds_of_transformers(tmp_path, config, kind, options):
    config(architectures=None if kind is None else [kind], **options).save_pretrained(tmp_path)
    model = find_model(str(tmp_path))
    module = model.factory()
    assert type(module).__name__ == (kind or "GPT2LMHeadModel")
    assert {param.device.type for param in module.parameters()} == {"meta"}
    parameters = sum(param.nbytes for param in module.parameters())
    assert trained(model, length=12).total > 2 * parameters


def test_a_file_and_the_default_length(tmp_path):
    transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=60, n_positions=24).save_pretrained(
        tmp_path
    )
    model = find_model(str(tmp_path / "config.json"))
    assert model.batch(3, None)["input_ids"].shape == (3, 24)


def test_an_id_that_is_not_there():
    with pytest.raises(errors.ConfigError, match="can't load the configuration of 'nobody/nothing'"):
        find_model("nobody/nothing")


def test_code_that_is_not_trusted(tmp_path):
    code = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnLM"}}
    (tmp_path / "config.json").write_text(json.dumps(code))
    with pytest.raises(errors.ConfigError, match="brings code of its own") as caught:
        find_model(str(tmp_path))
    assert "--trust-remote-code" in str(caught.value)


def test_code_that_is_trusted(tmp_path, monkeypatch):
    """It runs from transformers' folder of modules: that of a test here."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    code = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnLM"}}
    (tmp_path / "config.json").write_text(json.dumps(code))
    (tmp_path / "own.py").write_text(
        "import transformers\n"
        "class Own(transformers.GPT2Config):\n    model_type = 'own'\n"
        "class OwnLM(transformers.GPT2LMHeadModel):\n    config_class = Own\n"
    )
    model = find_model(str(tmp_path), trust_remote_code=True)
    assert type(model.factory()).__name__ == "OwnLM"


class Picture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, stride=2), nn.Linear(8, 10)

    def forward(self, pixels):
        return self.last(self.first(pixels).mean(dim=(2, 3)))


@pytest.fixture
def timm(monkeypatch):
    """timm is not part of the tests' environment: this has the calls that are made of it."""
    module = types.ModuleType("timm")
    module.calls = []

    def create_model(name, *, pretrained):
        module.calls.append((name, pretrained))
        return Picture()

    module.create_model = create_model
    module.is_model = lambda name: name == "picture"
    module.list_models = lambda *_, **__: ["picture"]
    module.data = types.SimpleNamespace(resolve_data_config=lambda *_, **__: {"input_size": (3, 20, 24)})
    monkeypatch.setitem(sys.modules, "timm", module)
    return module


def test_timm(timm):
    model = find_model("timm/picture")
    assert model.batch(5, None)[0].shape == (5, 3, 20, 24)
    assert trained(model, rows=5).total > 0
    assert set(timm.calls) == {("picture", False)}
    with pytest.raises(errors.ConfigError, match="timm has no model 'pixture'"):
        find_model("timm:pixture")


def test_a_library_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(errors.ConfigError, match="one of timm, which is not installed"):
        find_model("timm/resnet50")


def test_references():
    model = find_model("tests.tiny_models:Net")
    assert {param.device.type for param in model.factory().parameters()} == {"meta"}
    assert model.loss_fn is None
    with pytest.raises(errors.ConfigError, match="names nothing that can be imported"):
        find_model("tests.tiny_models:Nothing")
    with pytest.raises(errors.ArgumentError, match="not a module"):
        find_model("torch:Tensor").factory()


def test_an_instance_is_built_already():
    assert isinstance(find_model(f"{__name__}:READY").factory(), nn.Linear)


READY = nn.Linear(2, 2, device=torch.device("meta"))
