"""Models of transformers, random weights: dispatched, offloaded to host memory and to the disk, they generate the same."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_model

import fnaccel as fa
from tests.big.movers import Devices, Simulated

pytestmark = pytest.mark.filterwarnings("ignore")
SMALL = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
KINDS = ("gpt2", "llama", "bert", "t5", "mixtral")


def built(kind):
    import transformers as hf

    if kind == "gpt2":
        return hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=32, n_layer=3, n_head=4, n_positions=64, **SMALL))
    if kind == "bert":
        config = hf.BertConfig(
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=64,
            is_decoder=True,
            **SMALL,
        )
        return hf.BertLMHeadModel(config)
    if kind == "t5":
        return hf.T5ForConditionalGeneration(
            hf.T5Config(
                d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0, **SMALL
            )
        )
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    if kind == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **SMALL))
    return hf.MixtralForCausalLM(hf.MixtralConfig(num_local_experts=4, **sizes, **SMALL))


def model_of(kind):
    torch.manual_seed(0)
    return built(kind).eval()


def saved(kind, folder):
    """Shards of transformers. It renames the experts of Mixtral as it saves, and only it reads these names."""
    if kind != "mixtral":
        model_of(kind).save_pretrained(folder, max_shard_size="20KB")
    else:
        folder.mkdir()
        save_model(model_of(kind), str(folder / "model.safetensors"))


def generated(model):
    prompt = torch.arange(2, 14).reshape(2, 6)
    mask = torch.ones_like(prompt)
    return model.generate(prompt, attention_mask=mask, max_new_tokens=10, min_new_tokens=10, do_sample=False)


@pytest.mark.long_except("disk")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("home", ["cpu", "disk", "devices"])
def test_the_same_tokens(kind, home, tmp_path):
    expected = generated(model_of(kind))
    saved(kind, tmp_path / "hf")
    with fa.big.empty():
        model = built(kind).eval()
    mover = Simulated()
    if home == "devices":
        total, (_, largest) = fa.big.sizes(model).total, fa.big.sizes(model).largest
        placed = fa.big.device_map(model, {0: largest * 2, 1: largest, "cpu": total // 4})
        assert {0, 1} <= set(placed.devices)
        run = fa.big.load(model, tmp_path / "hf", placed, mover=mover)
    else:
        run = fa.big.load(model, tmp_path / "hf", {"": home}, device=0, mover=mover)
    with Devices():
        assert torch.equal(generated(model), expected)
    if home != "devices":
        # the head of BERT holds a bias itself, and layers inside of it come while that is there
        assert run.counts.most <= 2 + (kind == "bert")
        assert run.counts.ahead > 0.5 * run.counts.fetched
    run.remove()
    assert torch.equal(generated(model), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_used_where_they_are(kind, tmp_path):
    saved(kind, tmp_path / "hf")
    before = {file.name: file.read_bytes() for file in (tmp_path / "hf").iterdir()}
    with fa.big.empty():
        model = built(kind).eval()
    fa.big.load(model, tmp_path / "hf", "disk")
    assert torch.equal(generated(model), generated(model_of(kind)))
    assert {file.name: file.read_bytes() for file in (tmp_path / "hf").iterdir()} == before


def test_names_that_transformers_changes_get_a_hint(tmp_path):
    model_of("mixtral").save_pretrained(tmp_path / "hf")
    with fa.big.empty():
        model = built("mixtral")
    with pytest.raises(fa.errors.TreeMismatchError) as error:
        fa.big.load(model, tmp_path / "hf")
    assert "MixtralForCausalLM.from_pretrained(path), then fa.big.dispatch" in error.value.fix
