"""`export_adapter`: the adapter of a peft model, as peft reads it.

peft says which tensors belong to an adapter, and gives them their names. Here they are gathered from any
strategy and written.
"""

from __future__ import annotations

import copy
import functools
import importlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fnaccel.checkpoint.all_ranks import together
from fnaccel.checkpoint.disk import durable, placing
from fnaccel.checkpoint.format.items import Item, check_items, of_tensors
from fnaccel.errors import ArgumentError, nearest
from fnaccel.interchange.exporting import (
    Style,
    dtype_in,
    keys_of,
    one_model,
    values_of,
    weights_of,
    world_of,
    writer,
)
from fnaccel.interchange.model_config import author_class
from fnaccel.interchange.targets import check_exportable, modules_of
from fnaccel.state import TrainState
from fnaccel.world.paths import local_path
from fnaccel.world.world import World

_WHERE = "fa.interchange.export_adapter"
_WEIGHTS = "adapter_model.safetensors"
_CONFIG = "adapter_config.json"
_PREFIX = "base_model.model."


def export_adapter(
    directory: str | os.PathLike[str],
    state: TrainState,
    *,
    adapter: str = "default",
    dtype: torch.dtype | None = None,
    ema: bool = False,
    model: str | None = None,
    overwrite: bool = False,
    world: World | None = None,
) -> Path:
    """Write the adapter of a peft model (LoRA and others), as `peft.PeftModel.from_pretrained` loads it.

    Every rank must call it. Tensors are gathered one at a time, and rank 0 writes two files,
    `adapter_model.safetensors` and `adapter_config.json`. The directory appears when both are on the device.
    Weights of the base model are not written. `fa.interchange.export_hf` writes all weights.

    Args:
        directory: a new or empty one. Made if it is missing.
        state: the live state of a train step whose model is a `peft.PeftModel`, or a model of transformers
            with `add_adapter`. Any strategy.
        adapter: which adapter, if the model has several.
        dtype: floating-point values are converted to it: `"bf16"`, `torch.float16`. By default they stay.
        ema: the averages of `with_ema` instead of the parameters.
        model: which model, if there are several.
        overwrite: replace an earlier export, and keep other files in the directory.
        world: the world, if none was started in this context.

    Returns:
        The directory.

    Raises:
        ArgumentError: the state has no peft model, or no such adapter. Also if the adapter's values are
            computed by its module (prompt learning), so that they are no parameters.
        CheckpointError: the directory is not empty, or the disk is full.
        StaleStateError: the state was donated.

    Example:
        >>> from peft import LoraConfig, get_peft_model
        >>> def adapted():
        ...     return get_peft_model(GPT(), LoraConfig(target_modules=["up", "down"]))
        >>> model = fa.distribute(adapted, fa.local())
        >>> train_step = fa.train_step(loss_fn, model=model, optimizer=fa.adamw(3e-4))
        >>> path = fa.interchange.export_adapter("adapter", train_step.init())
        >>> sorted(file.name for file in path.iterdir())
        ['adapter_config.json', 'adapter_model.safetensors']
    """
    target = local_path(directory, _WHERE)
    if not isinstance(state, TrainState):
        raise ArgumentError(
            f"state is a {type(state).__name__}",
            where=_WHERE,
            fix="give the state that the train step returned",
        )
    check_exportable(state, _WHERE, anchor=not ema)
    ranks = world_of(world, state)
    style = Style(dtype=dtype, ema=ema, model=model, where=_WHERE)
    items: list[Item] = []
    config: list[str] = []
    places: list[tuple[Path, Path]] = []  # rank 0: the target behind links, and the directory to fill

    def begin() -> None:
        module, tensors = _model(state, style)
        _check_adapter(module, adapter)
        named = _named(module, adapter, tensors)
        items.extend(of_tensors(named, dtype_in(style), keep=ranks.is_main))
        check_items(items, _WHERE)
        # widest first, so that each starts at a multiple of its own element size
        items.sort(key=lambda item: -item.dtype.itemsize)
        config.append(_config(module, adapter))
        if ranks.is_main:
            place = placing.check_free(target, overwrite=overwrite, where=_WHERE)
            places.append((place, placing.stage(place)))

    try:
        with values_of(state, style):
            together(ranks, _WHERE, begin)
            together(ranks, _WHERE, writer(places[0][1] / _WEIGHTS if places else None, items))
        together(ranks, _WHERE, functools.partial(_finish, places, config[0]))
    except BaseException:
        for _, staged in places:
            placing.discard(staged)
        raise
    return target


def _finish(places: list[tuple[Path, Path]], config: str) -> None:
    for place, staged in places:
        durable.write_file(staged / _CONFIG, [memoryview(config.encode())])
        placing.commit(staged, place)


def _model(state: TrainState, style: Style) -> tuple[Any, dict[str, torch.Tensor]]:
    """The module that is meant, and its tensors by name."""
    modules = modules_of(state)
    if modules is None:
        raise ArgumentError(
            "this state is not the live state of a train step, so no model says which tensors are an adapter",
            where=_WHERE,
            fix="give the state that the train step returned, or train_step.adopt(snapshot)",
        )
    tensors = one_model(weights_of(state, modules, style), keys_of(state), style)
    return modules[style.model], tensors


def _check_adapter(module: nn.Module, adapter: str) -> None:
    """Raise ArgumentError if a module has no adapter of that name."""
    adapters: Any = getattr(module, "peft_config", None)
    if not isinstance(adapters, dict) or not adapters:
        raise ArgumentError(
            f"the model is a {author_class(module).__name__}, which has no adapter of peft",
            where=_WHERE,
            fix="model=lambda: peft.get_peft_model(base, config), or fa.interchange.export_hf for all",
        )
    names = list(map(str, adapters))  # pyright: ignore[reportUnknownArgumentType] - of a class of peft
    if adapter not in names:
        raise ArgumentError(
            f"no adapter is called {adapter!r}", where=f"{_WHERE}(adapter=...)", fix=nearest(adapter, names)
        )


def _named(module: Any, adapter: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of an adapter, by their names in peft's file."""
    peft: Any = importlib.import_module("peft")
    # no embeddings of the base model: to find out whether they were resized, peft would ask the Hub
    chosen: Mapping[str, Any] = peft.get_peft_model_state_dict(
        module, state_dict=dict(tensors), adapter_name=adapter, save_embedding_layers=False
    )
    ours = {id(tensor) for tensor in tensors.values()}
    computed = sorted(name for name, value in chosen.items() if id(value) not in ours)
    if computed or not chosen:
        kind = getattr(module.peft_config[adapter].peft_type, "value", "unknown type")
        raise ArgumentError(
            f"the adapter {adapter!r} ({kind}) has "
            + (f"values that are no parameters of the model: {computed[0]}" if computed else "no tensors"),
            where=_WHERE,
            fix="on one rank, train_step.look(state, lambda model: model.save_pretrained(...)) writes it",
        )
    wrapped = isinstance(module, peft.PeftModel)  # or else a model of transformers, with add_adapter
    return {name if wrapped else _PREFIX + name: value for name, value in chosen.items()}


def _config(module: Any, adapter: str) -> str:
    """The contents of peft's `adapter_config.json`."""
    peft: Any = importlib.import_module("peft")
    config: Any = copy.copy(module.peft_config[adapter])
    base: nn.Module = module.get_base_model() if isinstance(module, peft.PeftModel) else module
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(base, "name_or_path", None) or None
    kind = author_class(base)
    mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder, auto_mapping_dict=mapping if config.task_type is None else None)
        return (Path(folder) / _CONFIG).read_text(encoding="utf-8") + "\n"
