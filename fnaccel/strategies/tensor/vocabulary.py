"""Embeddings and logits whose vocabulary is cut over ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from fnaccel import _torch
from fnaccel.errors import CapabilityError


def check_within(tokens: torch.Tensor, vocabulary: int, what: str) -> None:
    """Raise IndexError for a token that no rank has, as torch does. On CUDA it is a device assertion."""
    if torch.compiler.is_compiling() or tokens.device.type not in ("cpu", "cuda"):
        return
    inside = ((tokens >= 0) & (tokens < vocabulary)).all()
    if tokens.device.type == "cuda":
        _torch.assert_on_device(inside)
    elif not inside:
        least, largest = (int(value) for value in tokens.aminmax())
        raise IndexError(f"a {what} is outside of the vocabulary of {vocabulary}: from {least} to {largest}")


def embedded(module: nn.Embedding, tokens: torch.Tensor, start: int) -> torch.Tensor:
    """The rows of tokens that this rank has, and zeros for other tokens.

    Args:
        module: holds this rank's rows.
        tokens: of the whole vocabulary, of any shape.
        start: this rank's first token.
    """
    rows = module.weight.shape[0]
    check_within(tokens, module.num_embeddings, "token")
    local = tokens - start
    elsewhere = (local < 0) | (local >= rows)
    padding = module.padding_idx
    own = None if padding is None or not start <= padding < start + rows else padding - start
    values = F.embedding(
        local.masked_fill(elsewhere, 0), module.weight, own, scale_grad_by_freq=module.scale_grad_by_freq
    )
    return values.masked_fill(elsewhere.unsqueeze(-1), 0)


def unable(what: str) -> CapabilityError:
    """The error for a use of logits whose columns lie on several ranks."""
    return CapabilityError(
        f"the ranks have different columns of the logits, and {what} needs all of them",
        where='fa.tensor(plan={head: "vocab"})',
        fix='"colwise_gather" in place of "vocab" gathers the logits',
    )
