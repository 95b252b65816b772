"""The formats whose pickles can run code, and the error without `trust_pickle=True`."""

from __future__ import annotations

from pathlib import Path

from fnaccel.errors import CheckpointError

_WHY = {
    "dcp": "the .metadata of a torch.distributed.checkpoint directory is a pickle",
    "deepspeed": "the files of a DeepSpeed checkpoint are pickles of its own classes",
}


def require_trust(form: str, path: Path, *, trust: bool) -> None:
    """Raise CheckpointError if a format needs trust and has none."""
    if not trust:
        raise CheckpointError(
            f"{_WHY[form]}, and loading a pickle can run any code that its author chose",
            where=f"reading {path}",
            fix="trust_pickle=True (--trust-pickle) if you know who wrote it, "
            "or convert it to safetensors on the machine that made it",
        )
