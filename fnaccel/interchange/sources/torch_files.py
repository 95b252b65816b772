"""Files of `torch.save`: state dicts, read with torch's loader that builds tensors and plain data only."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from fnaccel.checkpoint.format.found import Found, Numbered, Source, damaged, held
from fnaccel.errors import CheckpointError
from fnaccel.interchange.sources.safetensors_files import indexed, indices_in, suffixes_of

_MODELS = ("model", "state_dict", "model_state_dict", "module")
_OPTIMIZERS = ("optimizer", "optim", "optimizer_state_dict")
_INDEX = "pytorch_model.bin.index.json"
_NAME = re.compile(r"[^/\\\0]+")
SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


def open_torch(path: Path, index: Path | None = None) -> Source:
    """A file of `torch.save`, or a directory of them with the index of Hugging Face.

    Args:
        path: of the file or of the directory.
        index: which index of the directory. By default the usual one, or else any.

    Raises:
        CheckpointError: it holds more than tensors and plain data, is damaged, or holds no weights.
    """
    weights: dict[str, Found] = {}
    optimizer: Any = None
    files, listed = _files_of(path, index)
    for file in files:
        content = load_plain(file)
        part, beside = _weights_in(content, file)
        weights |= part
        optimizer = beside if beside is not None else optimizer
    lost = sorted(name for name in listed - weights.keys() if not name.endswith("_extra_state"))
    if lost:
        raise damaged(f"{lost[0]} is in the index, and in none of its files ({len(lost)} in all)", path)
    source = Source(format="torch", path=path, weights=weights)
    return source if optimizer is None else with_optimizer(source, optimizer, path)


def load_plain(file: Path) -> Any:
    """The contents of a file of `torch.save`. Its pickle may name only tensors and plain data.

    Raises:
        CheckpointError: it names something else, or is damaged.
    """
    with warnings.catch_warnings():
        # torch warns of legacy storages, and of requests of a hostile pickle
        warnings.simplefilter("ignore")
        try:
            try:
                return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as error:
                if "mmap" not in str(error):
                    raise
                return torch.load(file, map_location="cpu", weights_only=True)  # written before torch 1.6
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{file.name} asks to build more than tensors and plain data, which could run any code: "
                + _reason(str(error)),
                where=f"reading {file}",
                fix="if you trust it, load it with torch on the machine that made it, "
                "and save the weights alone: safetensors.torch.save_file(model.state_dict(), ...)",
            ) from error
        except Exception as error:  # of a damaged pickle, torch's reader raises many kinds
            raise damaged(
                f"{file.name} is no whole file of torch.save: {_reason(str(error)) or 'it ends too early'}",
                file,
            ) from error


def _is_archive(file: Path) -> bool:
    """Whether a file was written by torch 1.6 or later. torch maps only these."""
    with file.open("rb") as stream:
        return stream.read(4) == b"PK\x03\x04"


def _reason(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    chosen = next(
        (line for line in lines if "Unsupported" in line or "GLOBAL" in line), lines[0] if lines else ""
    )
    return chosen[:200]


def _files_of(path: Path, index: Path | None = None) -> tuple[list[Path], set[str]]:
    """The files, and the tensors that an index says are in them."""
    if path.is_file():
        return [path], set()
    index = path / _INDEX if index is None else index
    if index.is_file():
        return indexed(index, _NAME)
    main = path / "pytorch_model.bin"
    others = [] if main.is_file() else torch_indices(path)
    if others:
        return indexed(others[0], _NAME)
    files = [main] if main.is_file() else sorted(p for p in path.iterdir() if p.suffix in SUFFIXES)[:1]
    return files, set()


def torch_indices(folder: Path) -> list[Path]:
    """The indices of a folder that list files of `torch.save` and no others."""
    return [index for index in indices_in(folder) if set(suffixes_of(index) or [""]) <= set(SUFFIXES)]


def _weights_in(content: Any, file: Path) -> tuple[dict[str, Found], Any]:
    """The tensors of a state dict, by itself or under a usual key, and the optimizer beside it."""
    if isinstance(content, Mapping):
        inner = next((content[key] for key in _MODELS if isinstance(content.get(key), Mapping)), None)
        if inner is not None:
            beside = next(
                (content[key] for key in _OPTIMIZERS if isinstance(content.get(key), Mapping)), None
            )
            return tensors_in(inner, file), beside
        if any(isinstance(value, torch.Tensor) for value in content.values()):
            return tensors_in(content, file), None
    contents = list(content) if isinstance(content, Mapping) else type(content).__name__
    raise CheckpointError(
        f"{file.name} holds no state dict, nor one under {', '.join(_MODELS)}: it has {str(contents)[:200]}",
        where=f"reading {file}",
        fix="save model.state_dict() by itself",
    )


def tensors_in(state: Mapping[Any, Any], file: Path) -> dict[str, Found]:
    """The tensors of a state dict by name.

    Raises:
        CheckpointError: a value is no dense tensor.
    """
    tensors: dict[str, Found] = {}
    mapped = _is_archive(file)
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.is_meta:
            raise damaged(f"{name} in {file.name} has no values: it was saved from the device meta", file)
        strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
        if not strided or value.is_quantized or value.is_nested:
            if str(name).endswith("_extra_state"):  # a module's extra state, no tensor
                continue
            raise damaged(f"{name} in {file.name} is a {type(value).__name__}, not a dense tensor", file)
        tensors[str(name)] = held(value, mapped=mapped)
    return tensors


def with_optimizer(source: Source, content: Mapping[str, Any], file: Path) -> Source:
    """A source with the state of `torch.optim.Optimizer.state_dict()` beside its weights.

    Raises:
        CheckpointError: it is no such state.
    """
    state, groups = content.get("state"), content.get("param_groups")
    if not isinstance(state, Mapping) or not isinstance(groups, list):
        raise damaged(f"{file.name} is no state of a torch optimizer: it has {list(content)}", file)
    slots: dict[Any, dict[str, Found]] = {
        key: {str(slot): held(x, mapped=False) for slot, x in entry.items() if isinstance(x, torch.Tensor)}
        for key, entry in state.items()
        if isinstance(entry, Mapping)
    }
    for group in groups:
        numbers = {
            f"group.{name}": held(torch.tensor(x, dtype=torch.float64), mapped=False)
            for name, x in group.items()
            if type(x) in (int, float)
        }
        for key in group.get("params", ()):
            slots[key] = {**slots.get(key, {}), **numbers}
    names = _names_of(groups)
    if all(isinstance(key, int) for key in slots) and names:
        slots = {names[key]: entry for key, entry in slots.items() if key in names}
    counts = {str(key): entry["step"] for key, entry in slots.items() if "step" in entry}
    if any(isinstance(key, int) for key in slots):
        numbers = tuple(tuple(group.get("params", ())) for group in groups)
        return attrs.evolve(source, numbered=Numbered(numbers, slots), counts=counts)
    return attrs.evolve(source, slots=slots, counts=counts)


def _names_of(groups: list[Any]) -> dict[int, str]:
    """Names by number, if the optimizer was made of named parameters."""
    by_number: dict[int, str] = {}
    for group in groups:
        names = group.get("param_names") if isinstance(group, Mapping) else None
        if not isinstance(names, list) or len(names) != len(group.get("params", ())):
            return {}
        by_number |= dict(zip(group["params"], map(str, names), strict=True))
    return by_number
