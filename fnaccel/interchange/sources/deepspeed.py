"""Checkpoints of DeepSpeed's engine, ZeRO 0 to 3: fp32 weights, put together by DeepSpeed's own converter.

Its pickles name classes of DeepSpeed, so it has to be installed, and trusted: see `trusting`. Moments are
not read: they lie flattened over ranks, and its converter leaves them out.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fnaccel.checkpoint.format.boxes import Box, whole
from fnaccel.checkpoint.format.found import Found, Source, damaged
from fnaccel.errors import CheckpointError, FnaccelError, MissingBackendError, install_line
from fnaccel.interchange.sources.torch_files import tensors_in
from fnaccel.interchange.sources.trusting import require_trust
from fnaccel.tree import Tree

_STATES = "*_model_states.pt"
_OPTIMIZERS = "*_optim_states.pt"
_MODULE = "mp_rank_00_model_states.pt"  # ZeRO 3 has one for each rank instead


def find_tag(path: Path) -> tuple[Path, str] | None:
    """(root, tag) of a DeepSpeed checkpoint, from its root or one tag's directory, or None."""
    latest = path / "latest"
    if latest.is_file() and latest.stat().st_size < 4096:
        tag = latest.read_text(encoding="utf-8", errors="replace").strip()
        if tag and Path(tag).name == tag and (path / tag).is_dir() and any((path / tag).glob(_STATES)):
            return path, tag
    return (path.parent, path.name) if any(path.glob(_STATES)) else None


def open_deepspeed(path: Path, *, trust: bool) -> Source:
    """The weights of a DeepSpeed checkpoint, in fp32 if ZeRO stored fp32.

    Raises:
        CheckpointError: it is not trusted, damaged, or of a layout that the converter does not know.
        MissingBackendError: deepspeed is not installed.
    """
    require_trust("deepspeed", path, trust=trust)
    root_and_tag = find_tag(path)
    if root_and_tag is None:
        raise damaged("no directory with *_model_states.pt is here", path)
    root, tag = root_and_tag
    convert = _converter()
    try:
        state = _merged(convert, root, tag) if any((root / tag).glob(_OPTIMIZERS)) else _plain(root / tag)
    except FnaccelError:
        raise
    except Exception as error:  # its converter raises anything
        raise CheckpointError(
            f"DeepSpeed can't put this checkpoint together: {type(error).__name__}: {error}",
            where=f"reading {path}",
            fix="see the error above. engine.save_16bit_model(directory) writes weights without ZeRO",
        ) from error
    return Source(format="deepspeed", path=path, weights=state)


def _converter() -> Any:
    try:
        return importlib.import_module(
            "deepspeed.utils.zero_to_fp32"
        ).get_fp32_state_dict_from_zero_checkpoint
    except ImportError as error:
        raise MissingBackendError(
            "a DeepSpeed checkpoint is read by DeepSpeed, which is not installed",
            where="reading a DeepSpeed checkpoint",
            fix=f"{install_line('deepspeed')}, or run zero_to_fp32.py from the checkpoint",
        ) from error


def _merged(convert: Any, root: Path, tag: str) -> dict[str, Found]:
    output = io.StringIO()  # the converter prints its progress
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        state: Mapping[str, Any] = convert(str(root), tag=tag, lazy_mode=True)
    weights = {str(name): _lazy(value) for name, value in state.items()}
    if (root / tag / _MODULE).is_file():
        # ZeRO 1 leaves frozen parameters out of its parts (seen with 0.19.8), but the module has them
        weights = {**_plain(root / tag), **weights}
    return weights


def _lazy(value: Tree) -> Found:
    """A tensor that the converter puts together from the ranks' parts when it is asked to."""
    shape = tuple(value.shape)

    def read(box: Box, out: torch.Tensor) -> None:
        out.copy_(value.contiguous()[box.within(whole(shape))])

    return Found(value.dtype, shape, read, at_once=True)


def _plain(directory: Path) -> dict[str, Found]:
    """The weights as the engine saved them, without ZeRO."""
    file = directory / _MODULE
    if not file.is_file() or len(list(directory.glob(_STATES))) > 1:
        raise damaged("it is split over several model-parallel ranks, or over pipeline stages", directory)
    content = torch.load(
        file, map_location="cpu", weights_only=False, mmap=True
    )  # trusted: see open_deepspeed
    return tensors_in(content["module"], file)
