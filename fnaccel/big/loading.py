"""Checkpoints of any format into models without values: each tensor where a device map wants it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import attrs
import torch
from torch import nn

from fnaccel.big.budget import Budget, Device
from fnaccel.big.device_map import DeviceMap, as_map, device_map
from fnaccel.big.dispatch import Dispatch, check_free, dispatched
from fnaccel.big.mover import Mover
from fnaccel.big.placing import STRATEGIES
from fnaccel.big.planning import Options, Value
from fnaccel.big.quantize.choosing import quantized_layers
from fnaccel.big.quantize.config import quantization_of
from fnaccel.big.quantize.records import Record
from fnaccel.big.quantized_source import quantized, split_source
from fnaccel.big.reading import Reading, equal, sent_by_first
from fnaccel.checkpoint.all_ranks import together
from fnaccel.checkpoint.choosing import Patterns, Rename
from fnaccel.checkpoint.format.boxes import whole
from fnaccel.checkpoint.format.dtypes import NAMES
from fnaccel.checkpoint.format.found import Source, unescaped
from fnaccel.errors import ArgumentError, TreeMismatchError, UnknownNameError, nearest, require_counts
from fnaccel.interchange.fitting import Choice, Fit, fit, mismatch
from fnaccel.interchange.sources.detect import Format, opened
from fnaccel.interchange.targets import Targets
from fnaccel.world.paths import local_path, optional_path
from fnaccel.world.world import World, find_current

_WHERE = "fa.big.load"
_SHORT = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

ReadDtype = Literal[
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "fp32", "bf16", "fp16",
    "stored",
]  # fmt: skip


def load(
    model: nn.Module,
    path: str | os.PathLike[str],
    placed: DeviceMap | Mapping[str, Device] | Device = "cpu",
    *,
    budget: Budget | None = None,
    dtype: ReadDtype | torch.dtype | None = None,
    no_split: Collection[str] | None = None,
    quantization: Record | None = None,
    skip: Patterns = None,
    rename: Rename = None,
    format: Format | None = None,  # noqa: A002 - the word for it
    trust_pickle: bool = False,
    copy: bool = False,
    readers: int = 4,
    broadcast: bool = False,
    show_progress: bool = False,
    folder: str | os.PathLike[str] | None = None,
    device: Device | None = None,
    prefetch: int = 1,
    offload_buffers: bool | None = None,
    preload: Iterable[str] | str = (),
    skip_keys: Iterable[str] | str = (),
    mover: Mover | None = None,
    world: World | None = None,
) -> Dispatch:
    """Give a model the values of a checkpoint, and put each tensor where a map says.

    All names, shapes and kinds of dtype are compared before a value is read, and one error lists every path
    that differs. Values on the CPU and on the disk stay in the mapped file if it is one of safetensors or of
    `torch.save` and has the right dtype: nothing is copied, and pages are read when they are used. Others are
    read tensor by tensor, so the host holds at most one tensor a reader beside the model.

    For a model that a strategy trains, `fa.fsdp(init="meta")` with `fa.interchange.adopt` reads the part of
    each rank.

    Args:
        model: built without values (`fa.big.empty`), or with values that are replaced.
        path: a file, a directory, or the index of one, of any format that `fa.interchange.adopt` reads.
        placed: a device map, a dict of paths and devices, one device for all, or a strategy of
            `fa.big.device_map`: `"auto"`, `"balanced"`, `"balanced_low_0"`, `"sequential"`.
        budget: for a strategy: bytes by device. By default the free memory of this machine.
        dtype: the dtype of floating-point parameters and buffers, `torch.bfloat16` or `"bf16"`. `"stored"`:
            that of the checkpoint. By default that of the model.
        no_split: for a strategy: classes of modules that stay on one device.
        quantization: quantize the model as its weights stream in, or read a quantized checkpoint:
            `fa.big.Nf4()`, `fa.big.quantization_of(path)`. See `fa.big.quantize`.
        skip: shell patterns of paths that are not read: `"params/head.*"`. They must have values.
        rename: regular expressions and their replacements, from the checkpoint's paths (`params/NAME`).
        format: as in `fa.interchange.adopt`. By default detected from the files.
        trust_pickle: load pickles, which can run code: DCP and DeepSpeed need it.
        copy: read values on the CPU into memory, so that the files can be overwritten in use.
        readers: how many threads read.
        broadcast: with several ranks, the first one reads and sends to the others. By default each reads.
        show_progress: show a bar of bytes, on the main rank.
        folder: for values on the disk that can't stay where they are.
        device, prefetch, offload_buffers, preload, skip_keys, mover: as in `fa.big.dispatch`.
        world: the world, if none was started in this context.

    Returns:
        The dispatch of the model.

    Raises:
        TreeMismatchError: missing, unexpected or misshaped paths. Lists all of them.
        CheckpointError: nothing known is there, it is damaged or not trusted.
        ArgumentError, CapabilityError, OwnershipError: as in `fa.big.dispatch`. The model is as before.

    Example:
        >>> torch.save(torch.nn.Linear(4, 2).state_dict(), "linear.pt")
        >>> with fa.big.empty():
        ...     model = torch.nn.Linear(4, 2)
        >>> run = fa.big.load(model, "linear.pt", dtype="bf16")
        >>> model.weight.dtype
        torch.bfloat16
    """
    check_free(model)
    require_counts(_WHERE, readers=readers)
    source_path = local_path(path, _WHERE)
    _check_quantization(model, source_path, quantization)
    options = Options(
        folder=optional_path(folder, _WHERE),
        device=device,
        prefetch=prefetch,
        offload_buffers=bool(offload_buffers),
        preload=preload,
        skip_keys=skip_keys,
        mover=mover or Mover(),
    )
    kind = _dtype(dtype)
    ranks = world or find_current()
    with quantized(model, quantization), ExitStack() as stack:
        if isinstance(placed, str) and placed in STRATEGIES:
            width = kind if isinstance(kind, torch.dtype) else None
            placed = device_map(
                model,
                budget,
                placed,  # pyright: ignore[reportArgumentType]
                no_split=no_split,
                dtype=width,
                offload_buffers=options.offload_buffers,
            )
        whole_map = as_map(placed)
        if offload_buffers is None:
            options = attrs.evolve(options, offload_buffers=whole_map.offload_buffers)
        whole_map.check(model)
        for name in whole_map.devices:
            options.mover.check(name)
        targets = _targets(model)
        choice = Choice(None, skip, rename, _WHERE, "the model")
        bar = show_progress and (ranks is None or ranks.is_main)
        reading = Reading(whole_map, options, kind, copy, readers, bar)
        if broadcast and ranks is not None and ranks.size > 1:
            fits: list[Fit] = []

            def check() -> dict[str, torch.dtype]:
                if ranks.is_main:
                    source = stack.enter_context(opened(source_path, format, trust=trust_pickle))
                    fits.append(_fitted(source, model, targets, choice))
                return {name: entry.dtype for fitted in fits for name, entry in fitted.pairs.items()}

            stored = together(ranks, _WHERE, check)[0]
            values = sent_by_first(fits, stored, targets, reading, ranks)
        else:
            source = stack.enter_context(opened(source_path, format, trust=trust_pickle))
            remaining, parts = split_source(source, model)
            fitted = _fitted(remaining, model, targets, choice)
            reading.fill(parts)
            values = reading.values(fitted, targets)
        _check_filled(model, values)
        return dispatched(model, whole_map, values, options)


def _check_quantization(model: nn.Module, path: Path, record: Record | None) -> None:
    """See that a quantized checkpoint finds quantized layers."""
    if record is None and not quantized_layers(model) and (path / "config.json").is_file():
        stored = quantization_of(path)
        if stored is not None:
            raise ArgumentError(
                f"{path} holds codes of {stored}, and the model has full-width layers",
                where=_WHERE,
                fix="quantization=fa.big.quantization_of(path)",
            )


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | str | None:
    if dtype is None or dtype == "stored" or isinstance(dtype, torch.dtype):
        return dtype
    dtypes = NAMES | _SHORT
    if dtype not in dtypes or not dtypes[dtype].is_floating_point:
        names = [name for name, value in dtypes.items() if value.is_floating_point]
        raise UnknownNameError(
            f"no floating-point dtype is called {dtype!r}",
            where=_WHERE,
            fix=nearest(dtype, [*names, "stored"]),
        )
    return dtypes[dtype]


def _targets(model: nn.Module) -> Targets:
    """The tensors of a model by path, as `fit` takes them."""
    tensors: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for section, named in (
        ("params", model.named_parameters(remove_duplicate=False)),
        ("buffers", model.named_buffers(remove_duplicate=False)),
    ):
        for name, tensor in named:
            path = f"{section}/{name}"
            if first.setdefault(id(tensor), path) == path:
                tensors[path] = tensor
            else:
                tied[path] = first[id(tensor)]
    saved = set(model.state_dict(keep_vars=True))
    persistent = frozenset(path for path in tensors if path.partition("/")[2] in saved)
    plain = {unescaped(path): path for path in (*tied, *tensors)}
    return Targets(tensors, persistent, tied, plain)


def _fitted(source: Source, model: nn.Module, targets: Targets, choice: Choice) -> Fit:
    """Compare a checkpoint with a model, and see that it can be read."""
    try:
        fitted = fit(source, targets, choice)
    except TreeMismatchError as error:
        raise _with_hint(error, model) from None
    for entry in fitted.pairs.values():
        if entry.check is not None:
            entry.check(whole(entry.shape))
    differ = [path for path, other in fitted.doubled.items() if not equal(fitted.pairs[path], other)]
    if differ:
        problems = [f"{path}: tied in the model, and has two values in the source" for path in differ]
        raise mismatch(problems, source, _WHERE, target="the model")
    source.check_unchanged()
    return fitted


def _with_hint(error: TreeMismatchError, model: nn.Module) -> TreeMismatchError:
    """The error of other names. transformers changes those of some models as it saves and loads them."""
    if not type(model).__module__.startswith("transformers."):
        return error
    read = f"{type(model).__name__}.from_pretrained(path), then fa.big.dispatch(model, placed)"
    fix = f"{error.fix}. If transformers wrote it under other names: {read}"
    return TreeMismatchError(error.what, where=error.where, fix=fix)


def _check_filled(model: nn.Module, values: Mapping[str, Value]) -> None:
    """Raise TreeMismatchError if a tensor has no values, and the checkpoint has none for it."""
    named = itertools.chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    empty = [name for name, tensor in named if tensor.is_meta and name not in values]
    if empty:
        raise TreeMismatchError(
            f"{len(empty)} tensors would have no values: {', '.join(empty)}",
            where=_WHERE,
            fix="leave them in the checkpoint's part that is read, or build them with values: "
            "fa.big.empty() keeps buffers unless buffers=True",
        )
