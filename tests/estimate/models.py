"""Models whose activations and parameters are some MB, and the bytes that a rank really holds in a step."""

from __future__ import annotations

import gc

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fnaccel as fa

WIDTH, VOCABULARY, LENGTH, ROWS = 96, 400, 48, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Seven blocks: three are counted, and not traced."""

    def __init__(self, blocks: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Shrinking(GPT):
    """Equal blocks, with fewer tokens each time."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)[:, 4:]
        return self.head(self.norm(F.pad(x, (0, 0, LENGTH - x.shape[1], 0))))


class Parallel(GPT):
    """Equal blocks that all take the same input."""

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(self.norm(torch.stack([block(x) for block in self.blocks]).mean(0)))


class Checkpointed(GPT):
    """Blocks that the model itself recomputes."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


class Joined(GPT):
    """The head reads the outputs of all blocks."""

    def __init__(self, blocks: int = 7) -> None:
        super().__init__(blocks)
        self.head = nn.Linear(blocks * WIDTH, VOCABULARY)

    def forward(self, tokens):
        x, outputs = self.embed(tokens), []
        for block in self.blocks:
            x = block(x)
            outputs.append(self.norm(x))
        return self.head(torch.cat(outputs, -1))


class EverySecond(GPT):
    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks[::2]:
            x = block(x)
        return self.head(self.norm(x))


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 700), nn.Linear(700, VOCABULARY)
        )

    def forward(self, tokens):
        return self.layers(F.one_hot(tokens.flatten() % 64, 64).float()).view(*tokens.shape, VOCABULARY)


class Llama(nn.Module):
    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=256, num_hidden_layers=6,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)

    def forward(self, tokens):
        return self.model(input_ids=tokens, use_cache=False).logits


class GPT2(nn.Module):
    def __init__(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        config = GPT2Config(
            vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=6, n_head=4, n_positions=64, bos_token_id=0,
            eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        self.model = GPT2LMHeadModel(config)

    def forward(self, tokens):
        return self.model(input_ids=tokens, use_cache=False).logits


def loss_fn(model, tokens):
    logits = model(tokens)[:, :-1].flatten(0, 1).float()
    return fa.Mean(F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum"), weight=logits.shape[0])


def step_of(precision=None, remat=False, accumulate=1):
    step = loss_fn if precision is None else fa.with_precision(loss_fn, precision)
    step = fa.remat(step) if remat else step
    return fa.accumulate(step, accumulate) if accumulate > 1 else step


def tokens_of(device="cpu", rows=ROWS):
    return torch.zeros(rows, LENGTH, dtype=torch.long, device=device)


def peak_of(step, model, strategy, optimizer):
    """The live bytes of this rank at the peak of a step, without the garbage of earlier steps."""
    train_step = fa.train_step(step, model=fa.distribute(model, strategy), optimizer=optimizer)
    state, tokens = train_step.init(seed=0), tokens_of()
    state, metrics = train_step(state, tokens)
    with fa.estimate.LiveStorages(arguments=True) as storages:
        state, metrics = train_step(state, tokens)  # to know the storages of states and buckets
        del metrics
        peaks = []
        for _ in range(3):
            gc.collect()
            storages.begin()
            state, _ = train_step(state, tokens)
            peaks.append(storages.peak)
    return min(peaks)
