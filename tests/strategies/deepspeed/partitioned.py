"""Models that are built and loaded under `zero3_init`; runs inside ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fnaccel as fa
from fnaccel.world.world import current
from tests.parity.rows import whole


def pretrained(kind: str, path: Any) -> Callable[[], Any]:
    """A factory of a tiny model; of the one that is saved at `path` if there is one."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config: Any
        if kind == "gpt2":
            cls, config = (
                GPT2LMHeadModel,
                GPT2Config(vocab_size=33, n_positions=8, n_embd=12, n_layer=2, n_head=2),
            )
        else:
            cls, config = LlamaForCausalLM, LlamaConfig(
                vocab_size=33, hidden_size=12, intermediate_size=20, num_hidden_layers=2,
                num_attention_heads=2, pad_token_id=0,
            )  # fmt: skip
        config.use_cache = False
        for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
            setattr(config, name, 0.0)
    return (lambda: cls(config)) if path is None else (lambda: cls.from_pretrained(path))


def trained(factory: Callable[[], Any], strategy: Any) -> dict[str, Any]:
    """First values, parameters that some rank holds whole, losses and last values of two steps."""

    def loss_fn(model: Any, rows: torch.Tensor) -> fa.Mean:
        logits = model(input_ids=rows).logits[:, :-1].flatten(0, 1)
        total = nn.functional.cross_entropy(logits, rows[:, 1:].flatten(), reduction="sum")
        return fa.Mean(total, weight=rows[:, 1:].numel())

    train_step = fa.train_step(loss_fn, model=fa.distribute(factory, strategy), optimizer=fa.sgd(0.3))
    state = train_step.init(seed=0)
    first = {name: whole(value) for name, value in state.params.items()}
    held = [
        name
        for module in train_step.engine.layout.modules
        for name, param in module.named_parameters()
        if hasattr(param, "ds_id") and param.ds_tensor.numel() > -(-param.ds_numel // current().size)
    ]
    losses: list[float] = []
    for number in range(2):
        rows = torch.arange(10 * (number + 1)).view(-1, 5) * (3 + current().rank) % 33
        state, metrics = train_step(state, rows)
        losses.append(float(metrics["loss"]))
    last = {name: whole(value) for name, value in state.params.items()}
    train_step.close()
    return {"first": first, "losses": losses, "last": last, "held": held}


def compare(kind: str, path: Any) -> dict[str, Any]:
    """A run under `zero3_init` beside one under ddp, and whether transformers is as it was afterwards."""
    from transformers.integrations import deepspeed as integration

    factory = pretrained(kind, path)
    partitioned = trained(factory, fa.deepspeed(3, zero3_init=True))
    known = integration.is_deepspeed_zero3_enabled()
    plain = trained(factory, "ddp")
    return {"partitioned": partitioned, "plain": plain, "known": known}


class Initialised(nn.Module):
    """Initialises in its constructor what its children's constructors have made."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.wide = nn.Linear(4, 6)
        self.narrow = nn.Linear(6, 4)
        if how == "functions":
            nn.init.normal_(self.wide.weight, std=0.02)
            nn.init.zeros_(self.wide.bias)
            nn.init.xavier_uniform_(self.narrow.weight)
            nn.init.kaiming_normal_(self.narrow.weight)
        elif how == "methods":
            with torch.no_grad():
                self.wide.weight *= 0.5
                self.wide.weight[0] = 1.0
                self.narrow.bias.copy_(torch.arange(4.0))
        elif how == "shape":
            for param in self.parameters():
                if param.dim() > 1:
                    nn.init.xavier_uniform_(param)
        elif how == "apply":
            self.apply(lambda module: module.weight.data.normal_() if isinstance(module, nn.Linear) else None)
        elif how == "data":
            self.wide.weight.data.normal_()
        elif how == "orthogonal":
            nn.init.orthogonal_(self.wide.weight)
        elif how == "read":
            self.narrow.weight.copy_(self.wide.weight[0])


def first_values(how: str) -> list[str]:
    """The parameters whose first values differ from those of the seeded construction."""

    def made(strategy: Any) -> dict[str, torch.Tensor]:
        train_step = fa.train_step(
            lambda model, batch: model(batch),
            model=fa.distribute(lambda: Initialised(how), strategy),
            optimizer=fa.sgd(0.1),
        )
        found = {name: whole(value) for name, value in train_step.init(seed=4).params.items()}
        train_step.close()
        return found

    wanted, found = made("ddp"), made(fa.deepspeed(3, zero3_init=True))
    return [name for name, value in wanted.items() if not torch.equal(value, found[name])]


def refused(what: str) -> str:
    """What is said of a factory that returns something else, or of one that fails."""
    built = nn.Linear(3, 2)
    factories: dict[str, Any] = {
        "built": lambda: built,
        "nothing": lambda: None,
        "pair": lambda: (nn.Linear(3, 2), {}),
        "fails": lambda: nn.Linear(3, 2).weight[1, 1] or None,
    }
    factory = factories.get(what) or (lambda: Initialised(what))
    train_step = fa.train_step(
        lambda model, batch: model(batch),
        model=fa.distribute(factory, fa.deepspeed(3, zero3_init=True)),
        optimizer=fa.sgd(0.1),
    )
    try:
        train_step.init()
    except fa.errors.FnaccelError as error:
        return str(error)
    finally:
        train_step.close()
    return ""
