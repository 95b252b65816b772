"""`export_hf`: a state, a checkpoint or a module as the safetensors that Hugging Face's libraries load."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

from fnaccel.checkpoint.all_ranks import together
from fnaccel.checkpoint.choosing import Patterns, Rename
from fnaccel.checkpoint.disk import durable, placing
from fnaccel.checkpoint.format.found import Source, unescaped
from fnaccel.checkpoint.format.items import Item, check_items, of_found, of_tensors, pick
from fnaccel.checkpoint.format.safetensors import Progress, drain, spread, write_items
from fnaccel.checkpoint.format.torch_file import write_torch_file
from fnaccel.checkpoint.format.walk import child
from fnaccel.errors import ArgumentError, NoWorldError, OwnershipError, UnleasedStateError, nearest
from fnaccel.interchange.model_config import files_for
from fnaccel.interchange.parameter_names import unwrapped
from fnaccel.interchange.sources.detect import opened
from fnaccel.interchange.targets import (
    check_exportable,
    check_full_width,
    modules_of,
    persistent_paths,
    tensors_of,
    tied_paths,
)
from fnaccel.models.building import is_owned
from fnaccel.state import TrainState, lease_of
from fnaccel.step.choices import DtypeName
from fnaccel.step.precision_policy import dtype_of
from fnaccel.texts import bytes_in
from fnaccel.world.paths import local_path
from fnaccel.world.world import World, current

_WHERE = "fa.interchange.export_hf"


@attrs.frozen
class Style:
    """How weights are written: for users, see the arguments of `export_hf`."""

    max_shard_size: int | str = "5GB"
    dtype: Any = None
    ema: bool = False
    model: str | None = None
    only: Patterns = None
    skip: Patterns = None
    rename: Rename = None
    safetensors: bool = True
    where: str = _WHERE

    def write(self, path: Path, items: Sequence[Item], progress: Progress | None = None) -> None:
        """Write one file of weights."""
        (write_items if self.safetensors else write_torch_file)(path, items, progress)

    def names(self, count: int) -> list[str]:
        """The names of that many files, as Hugging Face's libraries expect them."""
        stem, suffix = ("model", "safetensors") if self.safetensors else ("pytorch_model", "bin")
        if count == 1:
            return [f"{stem}.{suffix}"]
        return [f"{stem}-{number:05d}-of-{count:05d}.{suffix}" for number in range(1, count + 1)]

    @property
    def index(self) -> str:
        """The name of the file that says where each tensor lies."""
        return f"{'model.safetensors' if self.safetensors else 'pytorch_model.bin'}.index.json"


def export_hf(
    directory: str | os.PathLike[str],
    source: Any,
    *,
    max_shard_size: int | str = "5GB",
    dtype: DtypeName | torch.dtype | None = None,
    ema: bool = False,
    config: object = None,
    model: str | None = None,
    only: Patterns = None,
    skip: Patterns = None,
    rename: Rename = None,
    overwrite: bool = False,
    safetensors: bool = True,
    world: World | None = None,
) -> Path:
    """Write weights as Hugging Face's libraries load them: safetensors, their index and the config.

    If a world was started, every rank must call it. Rank 0 writes. A live state is gathered one tensor
    at a time, and a checkpoint is read in blocks of a few megabytes (without a world too), so the whole
    model is nowhere in memory. The directory appears when all of it is on the device.

    Args:
        directory: a new or empty one. Made if it is missing.
        source: a state, of any strategy. Or the path of a checkpoint of `fa.save`, a root or one step. Or a
            module that no train step owns: dispatched by `fa.big`, it stays so, and each weight is read from
            where it lies. On several ranks that of rank 0 is written.
            Buffers with `persistent=False` are left out, unless the state is a snapshot: it has no
            module that could tell which these are.
        max_shard_size: the largest file, in bytes or as `"5GB"`. A larger tensor has its own file.
        dtype: floating-point values are converted to it: `"bf16"`, `torch.float16`. By default they stay.
        ema: the averages of `with_ema` instead of the parameters. Otherwise a live state whose optimizer has
            `train()` and `eval()` (schedule-free) is written as it evaluates, a checkpoint as it trains.
        config: the content of `config.json`: a dict, or a config of transformers. A model of transformers
            in a live state brings its own.
        model: the name of the model, if there are several.
        only, skip: shell patterns of names to be written, or not: `"encoder.*"`.
        rename: regular expressions and their replacements, in order, or a function, for names.
        overwrite: replace an earlier export: `model*.safetensors`, `pytorch_model*.bin` and their index.
            All other files, such as a tokenizer's, are kept.
        safetensors: False writes `pytorch_model.bin` by `torch.save`. A whole file is in memory then, and
            loading it safely needs `weights_only=True`.
        world: the world, if none was started in this context.

    Returns:
        The directory.

    Raises:
        CheckpointError: the directory is not empty, the disk is full, there is no such checkpoint.
        ArgumentError: several models and none chosen, no averages, patterns that match nothing, a module
            without values.
        OwnershipError: a module that a train step owns.
        StaleStateError: the state was donated.

    Example:
        >>> path = fa.interchange.export_hf("exported", state, dtype="bf16", config={"model_type": "gpt2"})
        >>> sorted(file.name for file in path.iterdir())
        ['config.json', 'model.safetensors']
    """
    target = local_path(directory, _WHERE)
    style = Style(max_shard_size, dtype, ema, model, only, skip, rename, safetensors)
    if isinstance(source, str | os.PathLike):
        active = world_of(world)
        path = local_path(source, _WHERE)

        def convert() -> None:
            if active.is_main:
                with opened(path, "fnaccel") as checkpoint:
                    export_source(target, checkpoint, style, config=config, overwrite=overwrite)

        together(active, _WHERE, convert)
        return target
    return _export_live(target, source, style, config, overwrite=overwrite, world=world)


def export_source(
    target: Path,
    source: Source,
    style: Style,
    *,
    config: object = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write the weights of an opened checkpoint, in this process alone."""
    items = items_of(source, style)
    files = files_for(config, None, dtype_in(style), style.where)
    target = placing.check_free(target, overwrite=overwrite, where=style.where)
    staged = placing.stage(target)
    try:
        shards = spread(items, bytes_in(style.max_shard_size, style.where, least=1))
        source.verify(0, 1)
        for name, shard in zip(style.names(len(shards)), shards, strict=True):
            style.write(staged / name, shard, progress)
        source.check_unchanged()
        finish(staged, target, shards, files, style)
    except BaseException:
        placing.discard(staged)
        raise


def items_of(source: Source, style: Style) -> list[Item]:
    """The items to write of an opened checkpoint.

    Raises:
        ArgumentError: no averages, no such model, patterns that match nothing.
    """
    weights = {name: tensor for name, tensor in source.weights.items() if name not in source.transient}
    if style.ema:
        _check_averages(source.averages, style)
        weights |= source.averages
    is_own = source.format == "fnaccel"
    if is_own or style.model is not None:
        several = is_own and all("/" in path for path in weights)  # paths: a "/" leads into a dict
        keys = {unescaped(path.partition("/")[0]) for path in weights} if several else set[str]()
        weights = one_model(weights, keys, style)
    items = of_found(pick(weights, style.only, style.skip, style.rename, style.where), dtype_in(style))
    check_items(items, style.where)
    return items


def _export_live(
    target: Path,
    source: object,
    style: Style,
    config: object,
    *,
    overwrite: bool,
    world: World | None,
) -> Path:
    if isinstance(source, nn.Module):
        active = world_of(world)
    elif isinstance(source, TrainState):
        check_exportable(source, _WHERE, anchor=not style.ema)
        active = world_of(world, source)
    else:
        raise ArgumentError(
            f"source is a {type(source).__name__}",
            where=_WHERE,
            fix="give a state, a module, or the path of a checkpoint of fa.save",
        )
    shards: list[list[Item]] = []
    files: dict[str, str] = {}
    place: list[Path] = []
    staged: list[Path] = []

    def begin() -> None:
        if isinstance(source, TrainState):
            modules = modules_of(source)
            module = (modules or {}).get(style.model)
            check_full_width(module, style.where)
            tensors = one_model(weights_of(source, modules, style), keys_of(source), style)
        else:
            module = source
            tensors = weights_in(source, style)
        picked = pick(tensors, style.only, style.skip, style.rename, _WHERE)
        items = of_tensors(picked, dtype_in(style), keep=active.is_main)
        check_items(items, _WHERE)
        shards.extend(spread(items, bytes_in(style.max_shard_size, _WHERE, least=1)))
        files.update(files_for(config, module, dtype_in(style), _WHERE))
        if active.is_main:
            place.append(placing.check_free(target, overwrite=overwrite, where=_WHERE))
            staged.append(placing.stage(place[0]))

    try:
        with values_of(source, style):
            together(active, _WHERE, begin)
            for name, shard in zip(style.names(len(shards)), shards, strict=True):
                together(active, _WHERE, writer(staged[0] / name if staged else None, shard, style.write))
        together(
            active, _WHERE, lambda: finish(staged[0], place[0], shards, files, style) if staged else None
        )
    except BaseException:
        for directory in staged:
            placing.discard(directory)
        raise
    return target


def values_of(source: object, style: Style) -> contextlib.AbstractContextManager[None]:
    """In the body the parameters of a live state are those of evaluation, if they are exported."""
    point = None
    if isinstance(source, TrainState) and not style.ema:
        with contextlib.suppress(UnleasedStateError):
            point = lease_of(source, _WHERE).owner.evaluation_point()
    return point or contextlib.nullcontext()


def writer(
    path: Path | None, items: Sequence[Item], write_file: Callable[[Path, Sequence[Item]], Any] = write_items
) -> Callable[[], None]:
    """Writes one file on the rank that has a path. All ranks gather the same tensors, even if it fails."""

    def write() -> None:
        if path is None:
            drain(items)
            return
        started: list[Item] = []

        def noted(item: Item) -> Item:
            def blocks() -> Any:
                started.append(item)
                return item.blocks()

            return attrs.evolve(item, blocks=blocks)

        try:
            write_file(path, [noted(item) for item in items])
        except Exception:
            drain(items[len(started) :])
            raise

    return write


def finish(
    staged: Path, target: Path, shards: Sequence[Sequence[Item]], files: Mapping[str, str], style: Style
) -> None:
    """Write the index and the other files, and make the filled directory the target."""
    extra = dict(files)
    if len(shards) > 1:
        names = style.names(len(shards))
        tied = {name: item.name for shard in shards for item in shard for name in item.also}
        index = {
            "metadata": {
                "total_size": sum(item.nbytes for shard in shards for item in shard),
                **({"tied": tied} if tied else {}),
            },
            "weight_map": {
                item.name: name for name, shard in zip(names, shards, strict=True) for item in shard
            },
        }
        extra[style.index] = json.dumps(index, indent=2, sort_keys=True) + "\n"
    for name, text in extra.items():
        durable.write_file(staged / name, [memoryview(text.encode())])
    placing.commit(staged, target)


def weights_of(
    state: TrainState, modules: Mapping[str | None, nn.Module] | None, style: Style
) -> dict[str, torch.Tensor]:
    """Parameters (or their averages) and persistent buffers by path, the model's key first.

    A tied one stands under each of its names. A state without modules knows the first name only.
    """
    buffers = tensors_of(state.buffers, "", _WHERE)
    if modules is not None:
        persistent = persistent_paths(modules)
        buffers = {name: value for name, value in buffers.items() if name in persistent}
    weights = tensors_of(state.params, "", _WHERE) | buffers
    if style.ema:
        averages = {} if state.ema is None else tensors_of(state.ema, "", _WHERE)
        _check_averages(averages, style)
        weights |= averages  # frozen parameters have no average, and buffers need not have one
    tied = {} if modules is None else tied_paths(modules)
    return weights | {path: weights[first] for path, first in tied.items() if first in weights}


def weights_in(module: nn.Module, style: Style) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers of a module without a train step, by their names in the plain module.

    A tied one is the same object under each of its names, also if a dispatch reads it from the disk.

    Raises:
        ArgumentError: a model or averages are asked for, or a tensor has no values.
        OwnershipError: a train step owns the module.
    """
    what = f"source is a module, a {type(module).__name__}"
    if style.ema or style.model is not None:
        word = "averages" if style.ema else "models by name"
        raise ArgumentError(
            f"{what}, and has no {word}", where=style.where, fix="give the state of its train step"
        )
    if is_owned(module):
        raise OwnershipError(
            f"{what} that a train step owns", where=style.where, fix="give the state of its train step"
        )
    check_full_width(module, style.where)
    weights: dict[str, torch.Tensor] = {}
    first: dict[tuple[object, ...], torch.Tensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            continue  # an extra state, which safetensors can't hold
        if value.is_meta:
            raise ArgumentError(
                f"{what} without values: {name} is on the meta device",
                where=style.where,
                fix="load it first: fa.big.load(module, path), or fa.interchange.adopt",
            )
        place = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride(), value.device)
        weights[unwrapped(name)] = first.setdefault(place if value.numel() else (id(value),), value)
    return weights


def keys_of(state: TrainState) -> set[str]:
    """The keys of the models in a state. Empty if there is one model without a key."""
    return {key for key, value in state.params.items() if isinstance(value, dict)}


def one_model(weights: Mapping[str, Any], keys: set[str], style: Style) -> dict[str, Any]:
    """The weights of the selected model: from paths to names of its plain module, without the model's key."""
    if not keys and style.model is None:
        return {unwrapped(unescaped(path)): tensor for path, tensor in weights.items()}
    if style.model is None or style.model not in keys:
        count = f"there are {len(keys)} models" if len(keys) > 1 else "the model has a key"
        problem = count if style.model is None else f"no model is called {style.model!r}"
        raise ArgumentError(
            problem, where=f"{style.where}(model=...)", fix=nearest(style.model or "", keys or {"(one)"})
        )
    prefix = child("", style.model) + "/"
    return {
        unwrapped(unescaped(path.removeprefix(prefix))): tensor
        for path, tensor in weights.items()
        if path.startswith(prefix)
    }


def _check_averages(averages: Mapping[str, Any], style: Style) -> None:
    if not averages:
        raise ArgumentError(
            "there are no averages",
            where=f"{style.where}(ema=True)",
            fix="train with fa.with_ema(step), or ema=False",
        )


def dtype_in(style: Style) -> torch.dtype | None:
    """The dtype for floating-point values, or None to keep theirs.

    Raises:
        ArgumentError: it is no floating-point one.
        UnknownNameError: no dtype has that name.
    """
    if style.dtype is None:
        return None
    where = f"{style.where}(dtype=...)"
    if not isinstance(style.dtype, str | torch.dtype):
        raise ArgumentError(
            f"dtype={style.dtype!r} is a {type(style.dtype).__name__}",
            where=where,
            fix='give a name, such as "bf16", or a dtype, such as torch.float16',
        )
    dtype = dtype_of(style.dtype, where)
    if not dtype.is_floating_point:
        raise ArgumentError(
            f"{dtype} can't hold floating-point values, and it is those that dtype= converts",
            where=where,
            fix='give a floating-point one, such as "bf16", or leave dtype= out',
        )
    return dtype


def world_of(world: World | None, state: TrainState | None = None) -> World:
    """The given world, the owner's, or the current world. Without a world: this process alone."""
    if world is None and state is not None:
        try:
            return lease_of(state, _WHERE).owner.mesh.world
        except UnleasedStateError:
            pass
    try:
        return current(world)
    except NoWorldError:
        cpu = torch.device("cpu")
        return World(
            rank=0, size=1, local_rank=0, local_size=1, machine=0, machines=1, device=cpu, backend="none"
        )
