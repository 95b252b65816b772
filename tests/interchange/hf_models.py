"""Tiny models of transformers, built from configs: tied and untied, with buffers that are not saved."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before it is imported: nothing is ever asked for

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from fnaccel.optim import adamw
from fnaccel.program.train_step import train_step
from fnaccel.strategies import distribute, strategy
from fnaccel.transforms import with_ema

logging.set_verbosity_error()
logging.disable_progress_bar()

IDS = torch.arange(24).reshape(4, 6) % 17


def gpt2():
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=2, n_head=2, n_embd=8, vocab_size=17, n_positions=12, bos_token_id=0, eos_token_id=1
        )
    )


def llama():
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            hidden_size=8,
            intermediate_size=12,
            vocab_size=17,
            max_position_embeddings=12,
        )
    )


MODELS = {"gpt2": gpt2, "llama": llama}


def loss(model, ids):
    return model(input_ids=ids, labels=ids).loss


def logits(model, ids):
    return model.eval()(input_ids=ids).logits


def trained(name, layout, updates=2):
    """A train step and its state after some updates."""
    step = train_step(
        with_ema(loss, 0.5), model=distribute(MODELS[name], strategy(layout)), optimizer=adamw(1e-2)
    )
    state = step.init(seed=1)
    for _ in range(updates):
        state, _ = step(state, IDS)
    return step, state
