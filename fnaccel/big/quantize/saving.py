"""`save_quantized`: a quantized model as safetensors and `config.json`, as transformers reads them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fnaccel.big.quantize.choosing import linear_layers, quantized_layers
from fnaccel.big.quantize.config import config_of
from fnaccel.big.quantize.layer import QuantizedLayer
from fnaccel.big.quantize.records import Record
from fnaccel.big.quantize.replacing import check_filled
from fnaccel.checkpoint.all_ranks import together
from fnaccel.checkpoint.disk import placing
from fnaccel.checkpoint.format.items import Item, check_items, of_tensors
from fnaccel.checkpoint.format.safetensors import spread, write_items
from fnaccel.errors import ArgumentError, require
from fnaccel.interchange.exporting import Style, finish, world_of, writer
from fnaccel.interchange.model_config import files_for
from fnaccel.interchange.targets import check_exportable, modules_of
from fnaccel.state import TrainState
from fnaccel.texts import bytes_in
from fnaccel.world.world import World

_WHERE = "fa.big.save_quantized"


def save_quantized(
    directory: str | os.PathLike[str],
    source: nn.Module | TrainState,
    *,
    config: object = None,
    max_shard_size: int | str = "5GB",
    model: str | None = None,
    overwrite: bool = False,
    world: World | None = None,
) -> Path:
    """Write a quantized model: codes and scales under the library's own names, and the record.

    `AutoModelForCausalLM.from_pretrained(directory)` of transformers reads it, and so does `fa.big.load`.
    Codes are written bit for bit. The directory appears when all of it is on the device. If a world was
    started, every rank must call it, and rank 0 writes.

    Args:
        directory: a new or empty one. Made if it is missing.
        source: a quantized module, or the live state of a train step with one.
        config: the content of `config.json`, a dict or a config of transformers. A model of transformers
            brings its own. `quantization_config` is added.
        max_shard_size: the largest file, in bytes or as `"5GB"`. A larger tensor has its own file.
        model: the name of the model, if the state has several.
        overwrite: replace an earlier export. Files other than weights are kept.
        world: the world, if none was started in this context.

    Returns:
        The directory.

    Raises:
        ArgumentError: no layer is quantized, layers of several records, or a model with an adapter.
        CapabilityError: quantized layers have no values yet.
        CheckpointError: the directory is not empty, or the disk is full.

    Example:
        >>> path = fa.big.save_quantized("small", fa.big.quantize(GPT(), fa.big.Int8()))
        >>> sorted(file.name for file in path.iterdir())
        ['config.json', 'model.safetensors']
    """
    target = Path(directory)
    state = source if isinstance(source, TrainState) else None
    ranks = world_of(world, state)
    if state is not None:  # before `together`, since ranks may talk in it
        check_exportable(state, _WHERE)
    style = Style(max_shard_size, model=model, where=_WHERE)
    shards: list[Any] = []
    metadata: dict[str, str] = {}
    files: dict[str, str] = {}
    places: list[tuple[Path, Path]] = []

    def begin() -> None:
        module = _module(source, model)
        record = _record(module)
        items = of_tensors(_tensors(module), None, keep=ranks.is_main)
        check_items(items, _WHERE)
        shards.extend(spread(items, bytes_in(max_shard_size, _WHERE, least=1)))
        files.update(_files(module, config, record))
        metadata.update(_metadata(module, [item.name for item in items]))
        if ranks.is_main:
            place = placing.check_free(target, overwrite=overwrite, where=_WHERE)
            places.append((placing.stage(place), place))

    def write(path: Path, items: Sequence[Item]) -> None:
        write_items(path, items, metadata=metadata)

    try:
        together(ranks, _WHERE, begin)
        for name, shard in zip(style.names(len(shards)), shards, strict=True):
            path = places[0][0] / name if places else None
            together(ranks, _WHERE, writer(path, shard, write))
        together(ranks, _WHERE, lambda: finish(*places[0], shards, files, style) if places else None)
    except BaseException:
        for staged, _ in places:
            placing.discard(staged)
        raise
    return target


def _module(source: Any, model: str | None) -> nn.Module:
    """The module that is meant.

    Raises:
        ArgumentError: neither a module nor a live state, or an adapter around it.
    """
    module = source
    if isinstance(source, TrainState):
        modules = modules_of(source) or {}
        require(
            model in modules,
            f"model={model!r}, and the state has {', '.join(map(repr, modules)) or 'no live model'}",
            _WHERE,
            "give the state that the train step returned, and the name of one of its models",
        )
        module = modules[model]
    require(
        isinstance(module, nn.Module),
        f"source is a {type(module).__name__}",
        _WHERE,
        "give a quantized module, or the state of a train step",
    )
    require(
        not getattr(module, "peft_config", None),
        "the model has an adapter of peft",
        _WHERE,
        "fa.interchange.export_adapter(directory, state) writes it. Save the base before get_peft_model",
    )
    return module


def _record(module: nn.Module) -> Record:
    layers = quantized_layers(module)
    require(
        bool(layers),
        f"no layer of this {type(module).__name__} is quantized",
        _WHERE,
        "fa.interchange.export_hf(...)",
    )
    check_filled(layers, _WHERE)
    records = {layer.record: path for path, layer in layers.items()}
    if len(records) > 1:
        raise ArgumentError(
            f"layers were quantized by {len(records)} records: {', '.join(map(str, records))}",
            where=_WHERE,
            fix="config.json has a place for one: quantize the whole model by one call",
        )
    return next(iter(records))


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """All tensors by the names of the file. A tensor that has several is written once."""
    seen: set[tuple[Any, ...]] = set()
    tensors: dict[str, torch.Tensor] = {}
    shared = _shared(module)
    for name, value in module.state_dict().items():
        if not isinstance(value, torch.Tensor) or name in shared:
            continue
        place = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() and place in seen:
            continue
        seen.add(place)
        tensors[name] = value
    return tensors


def _shared(module: nn.Module) -> set[str]:
    """The names of a quantized layer after its first: its packed numbers are made for each of them."""
    first: dict[int, str] = {}
    names: set[str] = set()
    for path, layer in quantized_layers(module).items():
        if first.setdefault(id(layer), path) != path:
            names |= {f"{path}.{suffix}" for suffix in layer.stored_shapes()}
    return names


def _metadata(module: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """The texts that torchao looks for in the header: one for each of the model's tensors."""
    layers = quantized_layers(module)
    headers = {
        f"{path}.weight": text for path, layer in layers.items() if (text := layer.header()) is not None
    }
    if not headers:
        return {}
    codes = {f"{path}.{suffix}" for path, layer in layers.items() for suffix in layer.stored_shapes()}
    headers |= {name: json.dumps({"_type": "Tensor"}) for name in names if name not in codes}
    return {**headers, "tensor_names": json.dumps(list(headers))}


def _files(module: nn.Module, config: object, record: Record) -> dict[str, str]:
    files = files_for(config, module, None, _WHERE)
    content: Mapping[str, Any] = json.loads(files.get("config.json", "{}"))
    first: QuantizedLayer = next(iter(quantized_layers(module).values()))
    skipped = [path for path, _ in linear_layers(module)]
    content = {**content, "quantization_config": config_of(record, skipped, first.weight_dtype)}
    return {**files, "config.json": json.dumps(content, indent=2, sort_keys=True) + "\n"}
