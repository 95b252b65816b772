"""fp8 linear layers of torchao: https://github.com/pytorch/ao/tree/main/torchao/float8."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from fnaccel.errors import MissingBackendError, install_line

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def backend(where: str) -> Any:
    """`torchao.float8`.

    Raises:
        MissingBackendError: torchao is not installed.
    """
    try:
        return importlib.import_module("torchao.float8")
    except ImportError as error:
        raise MissingBackendError(
            f"torchao can't be imported: {error}",
            where=where,
            fix=install_line("quantize"),
        ) from error


def convert(
    module: nn.Module,
    chosen: Collection[str],
    *,
    recipe: str,
    emulate: bool,
    all_gather: bool,
    pad: bool,
    where: str,
) -> None:
    """Replace the linear layers at these paths by fp8 layers. Parameters stay the same ones.

    Args:
        module: the model, changed in place.
        chosen: paths of linear layers.
        recipe: how tensors are scaled: one of `RECIPES`.
        emulate: compute with values rounded to fp8, without hardware for it.
        all_gather: send weights as fp8 under fsdp.
        pad: pad the inner dimension of a product to a multiple of 16.
        where: the location in error messages.
    """
    float8 = backend(where)
    config = dataclasses.replace(
        float8.Float8LinearConfig.from_recipe_name(recipe),
        emulate=emulate,
        enable_fsdp_float8_all_gather=all_gather,
        pad_inner_dim=pad,
    )
    paths = frozenset(chosen)

    def keep(_: nn.Module, path: str) -> bool:
        return path in paths

    float8.convert_to_float8_training(module, config=config, module_filter_fn=keep)
    if emulate:
        for path in paths:
            module.get_submodule(path).register_forward_pre_hook(_cast_input)


def _cast_input(_: nn.Module, args: tuple[Any, ...]) -> Any:
    """Cast as torchao's layer does under a GPU's autocast. It ignores the CPU's autocast (0.18)."""
    first = args[0]
    if first.device.type == "cuda" or not torch.is_autocast_enabled(first.device.type):
        return None
    return first.to(torch.get_autocast_dtype(first.device.type)), *args[1:]
