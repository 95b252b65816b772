"""`export_adapter`: peft loads what any layout wrote, and computes the same."""

from __future__ import annotations

import copy
import json
import warnings

import pytest
import torch
from safetensors.torch import load_file
from schedulefree import AdamWScheduleFree

import fnaccel as fa
from fnaccel.errors import ArgumentError, CheckpointError, StaleStateError
from tests.checkpoint.training import make
from tests.interchange.hf_models import IDS, MODELS, logits, loss

peft = pytest.importorskip("peft")

RANKS = [("local()", 1), ("ddp()", 2), ("fsdp()", 2)]
CONFIGS = {
    "gpt2": {"target_modules": ["c_attn"], "fan_in_fan_out": True, "task_type": "CAUSAL_LM"},
    "llama": {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"], "use_dora": True},
}


def base(name):
    torch.manual_seed(5)
    return MODELS[name]()


def adapted(name):
    # in the ranks, too
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
    return peft.get_peft_model(base(name), peft.LoraConfig(r=2, **CONFIGS[name]))


def trained(factory, layout, updates=2, transform=lambda step: step, optimizer=None):
    step = fa.train_step(
        transform(loss),
        model=fa.distribute(factory, fa.strategy(layout)),
        optimizer=optimizer or fa.adamw(1e-2),
    )
    state = step.init(seed=1)
    for _ in range(updates):
        state, _ = step(state, IDS)
    return step, state


def exported(name, layout, directory):
    step, state = trained(lambda: adapted(name), layout)
    fa.interchange.export_adapter(directory, state)
    return step.look(state, logits, IDS)


@pytest.mark.parametrize("layout", RANKS, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_peft_loads_it(pools, tmp_path, name, layout):
    target = tmp_path / "adapter"
    wanted = pools.run(layout[1], exported, name, layout[0], target)[0]
    model = peft.PeftModel.from_pretrained(base(name), target)
    torch.testing.assert_close(logits(model, IDS), wanted, rtol=0, atol=1e-6)
    assert not torch.allclose(logits(base(name), IDS), wanted, rtol=0, atol=1e-4)
    names = load_file(target / "adapter_model.safetensors").keys()
    # the very names and settings that peft itself writes
    adapted(name).save_pretrained(tmp_path / "peft")
    assert names == load_file(tmp_path / "peft" / "adapter_model.safetensors").keys()
    found, expected = (
        json.loads((tmp_path / folder / "adapter_config.json").read_text()) for folder in ("adapter", "peft")
    )
    for config in (found, expected):  # sets, in any order
        config["target_modules"] = sorted(config["target_modules"])
    assert found == expected
    assert not list(tmp_path.glob(".*"))


def test_it_is_written_as_its_optimizer_evaluates(tmp_path):
    with fa.start():
        schedule_free = fa.optim.from_torch(AdamWScheduleFree, lr=1e-2)
        step, state = trained(lambda: adapted("gpt2"), "local()", 4, optimizer=schedule_free)
        fa.interchange.export_adapter(tmp_path / "adapter", state)
        wanted = step.look(state, logits, IDS)
        assert not torch.allclose(step.look(state, logits, IDS, train=True), wanted, rtol=0, atol=1e-5)
    model = peft.PeftModel.from_pretrained(base("gpt2"), tmp_path / "adapter")
    torch.testing.assert_close(logits(model, IDS), wanted, rtol=0, atol=1e-6)


def test_an_adapter_of_transformers(tmp_path):
    """A model of transformers with `add_adapter` has other names for its parameters, and the same in the file."""

    def factory():
        model = base("gpt2")
        model.add_adapter(peft.LoraConfig(r=2, **CONFIGS["gpt2"]))
        return model

    with fa.start(device="cpu"):
        step, state = trained(factory, "local()")
        fa.interchange.export_adapter(tmp_path / "adapter", state)
        wanted = step.look(state, logits, IDS)
    model = peft.PeftModel.from_pretrained(base("gpt2"), tmp_path / "adapter")
    torch.testing.assert_close(logits(model, IDS), wanted, rtol=0, atol=1e-6)


def test_one_of_several_averages_and_dtypes(tmp_path):
    def factory():
        model = adapted("gpt2")
        model.add_adapter("second", peft.LoraConfig(r=3, **CONFIGS["gpt2"]))
        return model

    with fa.start(device="cpu"):
        _, state = trained(factory, "local()", transform=lambda step: fa.with_ema(step, 0.5))
        fa.interchange.export_adapter(tmp_path / "second", state, adapter="second", dtype="bf16")
        fa.interchange.export_adapter(tmp_path / "ema", state, ema=True)
        fa.interchange.export_adapter(tmp_path / "plain", state)
        with pytest.raises(ArgumentError, match="no adapter is called 'third'"):
            fa.interchange.export_adapter(tmp_path / "third", state, adapter="third")
    second, ema, plain = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("second", "ema", "plain")
    )
    assert {x.dtype for x in second.values()} == {torch.bfloat16}
    assert all(3 in x.shape for x in second.values())
    assert ema.keys() == plain.keys() == second.keys()
    assert any(not torch.equal(ema[name], plain[name]) for name in ema)


def test_what_is_no_adapter(tmp_path):
    with fa.start(device="cpu"):
        with pytest.raises(ArgumentError, match="a Net, which has no adapter"):
            fa.interchange.export_adapter(tmp_path / "a", make("local()").init())
        step, state = trained(lambda: adapted("gpt2"), "local()", 1)
        with pytest.raises(ArgumentError, match="not the live state"):
            fa.interchange.export_adapter(tmp_path / "a", fa.snapshot(state))
        with pytest.raises(ArgumentError, match="state is a ReadOnlyDict"):
            fa.interchange.export_adapter(tmp_path / "a", state.params)
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "notes.txt").write_text("mine")
        with pytest.raises(CheckpointError, match="is not empty"):
            fa.interchange.export_adapter(tmp_path / "full", state)
        fa.interchange.export_adapter(tmp_path / "full", state, overwrite=True)
        assert (tmp_path / "full" / "notes.txt").read_text() == "mine"
        step(state, IDS)
        with pytest.raises(StaleStateError):
            fa.interchange.export_adapter(tmp_path / "a", state)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_values_that_are_computed(tmp_path):
    def factory():
        config = peft.PrefixTuningConfig(
            num_virtual_tokens=2, task_type="CAUSAL_LM", prefix_projection=True, encoder_hidden_size=4
        )
        return peft.get_peft_model(copy.deepcopy(base("gpt2")), config)

    with fa.start(device="cpu"):
        step = fa.train_step(loss, model=fa.distribute(factory, "local"), optimizer=fa.adamw(1e-2))
        with pytest.raises(ArgumentError, match=r"PREFIX_TUNING.* no parameters of the model"):
            fa.interchange.export_adapter(tmp_path / "a", step.init(seed=1))
    assert not any(tmp_path.iterdir())
