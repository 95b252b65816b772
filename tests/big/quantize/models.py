"""Models and records of these tests."""

from __future__ import annotations

import torch
from torch import nn

import fnaccel as fa

BITSANDBYTES = [
    fa.big.Nf4(),
    fa.big.Nf4(double=True, block=32),
    fa.big.Fp4(),
    fa.big.Fp4(double=True, block=128),
    fa.big.Int8(),
    fa.big.Int8(threshold=0),
]

TORCHAO = [
    fa.big.Int8Weights(),
    fa.big.Int8Weights(group=16),
    fa.big.Int4Weights(group=16),
    fa.big.Int4Weights(group=None),
]
RECORDS = [*BITSANDBYTES, *TORCHAO]


class Net(nn.Module):
    """Two linear layers, with and without a bias, a norm, and a head called lm_head."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, 8)

    def forward(self, x):
        return self.lm_head(self.norm(x + self.down(torch.relu(self.up(x)))))


def made(kind=Net, seed=0, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind(**options)


def empty(kind=Net, **options):
    with fa.big.empty():
        return kind(**options)


def same(first, second):
    """Whether two dicts of tensors have the same names, dtypes and bits."""
    return list(first) == list(second) and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]) for name in first
    )


def llama(**options):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=128, max_position_embeddings=64, **options,
    )  # fmt: skip
    return made(lambda: LlamaForCausalLM(config).eval())


def gpt2(**options):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=64, **options)
    return made(lambda: GPT2LMHeadModel(config).eval())


def stream(model, folder):
    """Put the tensors of a folder into an empty quantized model, one at a time, as a loader does."""
    from safetensors import safe_open

    from fnaccel.big.quantize.filling import fill, stored_owner

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                owner = stored_owner(model, name)
                if owner is not None:
                    fill(*owner, file.get_tensor(name), "cpu")
                    continue
                owner, _, last = name.rpartition(".")
                param = nn.Parameter(file.get_tensor(name), requires_grad=False)
                setattr(model.get_submodule(owner), last, param)
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    return model.eval()
