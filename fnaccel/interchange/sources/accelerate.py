"""Directories of Accelerate's `save_state`: weights and optimizer, plain or sharded by FSDP.

Schedulers, random states and samplers are left: a schedule here is a function of the updates, randomness
follows from the seed, and the position in the data is not in them.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import attrs

from fnaccel.checkpoint.format.found import Source
from fnaccel.errors import CheckpointError
from fnaccel.interchange.sources.dcp import open_dcp
from fnaccel.interchange.sources.safetensors_files import open_safetensors
from fnaccel.interchange.sources.torch_files import load_plain, open_torch, with_optimizer

_SHARDED = "pytorch_model_fsdp_0"
_FULL = "pytorch_model_fsdp.bin"


def is_accelerate(path: Path) -> bool:
    """Whether a directory was written by `save_state`."""
    if (path / _SHARDED).is_dir() or (path / _FULL).is_file():
        return True
    return (path / "optimizer.bin").is_file() or any(path.glob("random_states_*.pkl"))


def open_accelerate(path: Path, stack: ExitStack, *, trust: bool) -> Source:
    """The weights, and the optimizer's moments if there are any.

    Raises:
        CheckpointError: several models, no weights, or shards of FSDP that are not trusted.
    """
    several = [file.name for file in path.glob("*_1*") if file.name.startswith(("model_1.", "pytorch_model"))]
    if several:
        raise CheckpointError(
            f"this directory holds several models: {several[0]} beside the first",
            where=f"reading {path}",
            fix="adopt one at a time: give the file of its weights, such as "
            f"{path / 'model_1.safetensors'}, and like=state.params['its key']",
        )
    source = attrs.evolve(_weights(path, stack, trust=trust), format="accelerate", path=path)
    sharded, file = path / "optimizer_0", path / "optimizer.bin"
    if sharded.is_dir():
        moments = open_dcp(sharded, trust=trust)
        return attrs.evolve(source, slots=moments.slots, counts=moments.counts)
    return with_optimizer(source, load_plain(file), file) if file.is_file() else source


def _weights(path: Path, stack: ExitStack, *, trust: bool) -> Source:
    if (path / _SHARDED).is_dir():
        return open_dcp(path / _SHARDED, trust=trust)
    if any(path.glob("*.safetensors")):
        return open_safetensors(path, stack)
    for name in (_FULL, "pytorch_model.bin"):
        if (path / name).is_file():
            return open_torch(path / name)
    if (path / "pytorch_model.bin.index.json").is_file():
        return open_torch(path)
    raise CheckpointError(
        "this directory of Accelerate's save_state holds no weights that are known: "
        f"{', '.join(sorted(file.name for file in path.iterdir())[:20])}",
        where=f"reading {path}",
        fix="save with safe_serialization, or FSDP's FULL_STATE_DICT or SHARDED_STATE_DICT",
    )
