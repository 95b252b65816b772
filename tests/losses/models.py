"""Language models whose heads are trained without whole logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import transformers
from torch import nn

import fnaccel as fa
from tests.tiny_models import whole_params

VOCABULARY, LENGTH, WIDTH = 31, 8, 16
PLAIN = {"vocab_size": VOCABULARY, "pad_token_id": 0}
LLAMA = PLAIN | {
    "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16,
}  # fmt: skip


def gpt2():
    """With the weight of its embedding as head."""
    config = transformers.GPT2Config(
        n_embd=WIDTH, n_layer=2, n_head=4, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0, **PLAIN,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))


def gemma2():
    """With soft-capped logits."""
    config = transformers.Gemma2Config(**LLAMA, head_dim=4, final_logit_softcapping=0.5, sliding_window=8)
    config._attn_implementation = "eager"
    return transformers.Gemma2ForCausalLM(config)


def granite():
    """With scaled logits."""
    return transformers.GraniteForCausalLM(transformers.GraniteConfig(**LLAMA, logits_scaling=4.0))


def mixtral():
    """With a loss of its routers."""
    config = transformers.MixtralConfig(
        **LLAMA, num_local_experts=2, num_experts_per_tok=1, output_router_logits=True
    )
    return transformers.MixtralForCausalLM(config)


def bert():
    """Whose head has a bias, and predicts the tokens in their own places."""
    config = transformers.BertConfig(
        hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **PLAIN,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def t5():
    config = transformers.T5Config(
        d_model=WIDTH, d_ff=24, d_kv=4, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0,
        **PLAIN,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.mix(self.norm(x)))


class Own(nn.Module):
    """A model of one's own, tied, with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embed.weight

    def body(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, ids):
        return self.head(self.body(ids))


def rows_of(step, part, rows=(4, 3)):
    """Tokens of which the last ones are padding, of another number in each row."""
    generator = torch.Generator().manual_seed(10 * step + part)
    count = rows[part]
    tokens = torch.randint(1, VOCABULARY, (count, LENGTH), generator=generator)
    lengths = torch.randint(3, LENGTH + 1, (count, 1), generator=generator)
    mask = (torch.arange(LENGTH) < lengths).long()
    labels = (tokens * mask).masked_fill(mask == 0, -100)
    return {"input_ids": tokens * mask, "attention_mask": mask, "labels": labels}


def labelled(model, batch):
    """The loss that the model computes from its labels."""
    count = (batch["labels"][:, 1:] != -100).sum()
    return fa.Mean.of(model(**batch).loss, weight=count)


def summed(model, batch):
    """By the number of items, as the Trainer gives it."""
    count = (batch["labels"][:, 1:] != -100).sum()
    return fa.Mean.of(model(**batch, num_items_in_batch=count).loss, weight=count)


def indexed(model, batch):
    """By logits of positions that have a label, on a model of one's own."""
    at = batch["labels"][:, 1:] != -100
    logits = model(batch["input_ids"])[:, :-1]
    return fa.Mean(F.cross_entropy(logits[at], batch["labels"][:, 1:][at], reduction="sum"), weight=at.sum())


def capped(model, batch):
    """By logits that are scaled, and then capped."""
    labels = batch["labels"][:, 1:]
    logits = (3.0 * model(batch["input_ids"])[:, :-1] / 0.5).tanh() * 0.5
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return fa.Mean(total, weight=(labels != -100).sum())


def by_head(model, batch):
    """By the function itself."""
    labels = batch["labels"][:, 1:]
    hidden = model.body(batch["input_ids"])[:, :-1]
    total = fa.losses.linear_cross_entropy(hidden, model.head, labels, rows=5)
    return fa.Mean(total, weight=(labels != -100).sum())


def moved(model, batch):
    """By logits of parameters that are values of the loss, after the call that took them."""
    params = {name: value * 1.1 for name, value in fa.params(model).items()}
    logits = fa.call(model, params, batch["input_ids"])[:, :-1]
    labels = batch["labels"][:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return fa.Mean(total, weight=(labels != -100).sum())


def trained(make, loss_fn, strategy, *parts, steps=3, seed=0):
    """The losses of some steps, and the parameters after them."""
    step = fa.chain(*parts)(loss_fn) if parts else loss_fn
    train_step = fa.train_step(step, model=fa.distribute(make, strategy), optimizer=fa.sgd(0.1, momentum=0.9))
    state, losses = train_step.init(seed=seed), []
    for number in range(steps):
        rows = rows_of(number, train_step.mesh.batch_rank)
        state, metrics = train_step(state, rows)
        losses.append(float(metrics["loss"]))
    return losses, whole_params(state)
