"""`config.json` and `generation_config.json` beside exported weights, without importing transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fnaccel.checkpoint.format.dtypes import name_of
from fnaccel.errors import ArgumentError


def files_for(
    config: object, model: nn.Module | None, dtype: torch.dtype | None, where: str
) -> dict[str, str]:
    """The JSON files to write, by name.

    Args:
        config: a dict, or an object with `to_json_string()` or `to_dict()`. By default the model's own.
        model: the exported module, if there is one.
        dtype: the dtype of the converted weights, or None if they were not converted.
        where: the public function, for messages.

    Raises:
        ArgumentError: it is none of these, or a value is no JSON.
    """
    model_config = getattr(model, "config", None)
    if config is None and not hasattr(model_config, "to_json_string"):
        return {}
    content = _content(model_config if config is None else config, where)
    if model is not None and not content.get("architectures"):
        content["architectures"] = [class_of(model)]
    if dtype is not None:
        content["torch_dtype" if "torch_dtype" in content else "dtype"] = name_of(dtype)
    files = {"config.json": _text(content, where)}
    generation = getattr(model, "generation_config", None)
    if hasattr(generation, "to_json_string"):
        files["generation_config.json"] = _text(_content(generation, where), where)
    return files


def author_class(model: nn.Module) -> type[nn.Module]:
    """A module's class, as its author wrote it, also of a module that `torch.compile` wraps."""
    model = getattr(model, "_orig_mod", model)
    for kind in type(model).__mro__:
        # FSDP2 puts a class of its own before the author's
        if kind.__name__ != "FSDPModule" and "FSDPModule" not in {base.__name__ for base in kind.__bases__}:
            return kind
    return type(model)


def class_of(model: nn.Module) -> str:
    """The name of a module's class, as its author wrote it."""
    return author_class(model).__name__


def _content(config: Any, where: str) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    content: Any = None
    if hasattr(config, "to_json_string"):  # leaves out defaults and values that are no JSON
        content = json.loads(config.to_json_string())
    elif hasattr(config, "to_dict"):
        content = config.to_dict()
    if not isinstance(content, dict):
        raise ArgumentError(
            f"config= is a {type(config).__name__}",
            where=where,
            fix="give a dict, or a config of transformers",
        )
    return dict(content)


def _text(content: Mapping[str, Any], where: str) -> str:
    try:
        return json.dumps(content, indent=2, sort_keys=True) + "\n"
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"config= holds a value that is no JSON: {error}",
            where=where,
            fix="keep numbers, strings, lists and dicts in it",
        ) from None
