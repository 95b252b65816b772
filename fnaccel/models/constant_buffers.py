"""Buffers that never change and may be as large as the model, such as the codes of quantized weights.

A train step neither copies them before its first update nor broadcasts them before each forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fnaccel.errors import CapabilityError
from fnaccel.models.parameter import Select, takes


class ConstantBuffers(nn.Module):
    """A module whose own buffers are constant: they stand for a weight that no gradient changes.

    Attributes:
        constant_weight: a clause about the weight in error messages.
    """

    constant_weight: str = "is constant"


def constant_buffers(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of the constant buffers below a module."""
    for path, module in root.named_modules():
        if isinstance(module, ConstantBuffers):
            for name, value in module.named_buffers(recurse=False):
                yield (f"{path}.{name}" if path else name), value


def constant_weights(modules: Mapping[str | None, nn.Module]) -> dict[str, str]:
    """The weights that constant buffers stand for: canonical name -> its clause."""
    return {
        ("" if key is None else f"{key}/") + (f"{path}.weight" if path else "weight"): module.constant_weight
        for key, root in modules.items()
        for path, module in root.named_modules()
        if isinstance(module, ConstantBuffers)
    }


def check_not_trained(modules: Mapping[str | None, nn.Module], patterns: Iterable[Select]) -> None:
    """See that nobody expects constant weights to be trained.

    Args:
        modules: the models by key.
        patterns: the selections of `frozen=`. A function is not asked about constant weights.

    Raises:
        CapabilityError: in a model with such weights all parameters take a gradient, or none does, and no
            pattern names these weights.
    """
    listed = tuple(patterns)
    trained = {
        full: param.requires_grad and not _named(full, listed, param)
        for key, root in modules.items()
        for name, param in root.named_parameters()
        for full in [name if key is None else f"{key}/{name}"]
    }
    for key, root in modules.items():
        weights = {n: why for n, why in constant_weights({key: root}).items() if not _named(n, listed)}
        own = [flag for name, flag in trained.items() if key is None or name.startswith(f"{key}/")]
        if not weights or (any(trained.values()) and not all(own)):
            continue
        first, why = next(iter(weights.items()))
        more = f" (and {len(weights) - 1} more)" if len(weights) > 1 else ""
        raise CapabilityError(
            f"{first}{more} {why}, so no gradient changes it, and "
            + ("every other parameter is trained" if any(own) else "no other parameter is trained"),
            where="fa.train_step",
            fix="train an adapter: peft.get_peft_model(model, LoraConfig(...)); or all weights, in full "
            "width: fa.big.dequantize(model); or say which weights stay: frozen=('*.weight',)",
        )


def _named(name: str, patterns: Iterable[Select], param: Any = None) -> bool:
    return any(takes(each, name, param) for each in patterns if isinstance(each, str) or param is not None)
