"""A model's modules without values, to look at their structure before the model is built."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def modules_without_values(model: object) -> dict[str | None, nn.Module | str]:
    """The modules of a model by key, made on the meta device, or the reason why one can't be.

    A factory runs once more than `init` runs it. Nothing is allocated, and torch's generator is left
    as it was. A built module is returned itself.

    Args:
        model: a factory, a module, or a dict of them.
    """
    parts = model if isinstance(model, dict) else {None: model}
    return {key: _one(source) for key, source in parts.items()}


def _one(source: Any) -> nn.Module | str:
    if isinstance(source, nn.Module):
        return source
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            module = source()
    except Exception as error:  # the user's own code: init will raise it again, or not
        return f"the factory can't run without values ({type(error).__name__})"
    return module if isinstance(module, nn.Module) else f"the factory returns {type(module).__name__}"
