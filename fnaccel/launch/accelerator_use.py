"""The line that first used CUDA in this process. A driver that is in use does not survive a fork."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

from fnaccel import _torch

_TORCH = str(Path(torch.__file__).parent)
_PACKAGE = str(Path(__file__).parent.parent)
_first_lines: list[str] = []


def watch() -> None:
    """Note the line that starts CUDA, from now on. Nothing is started, with or without CUDA."""
    if not torch.cuda.is_initialized():
        _torch.on_cuda_start(_note)


def first_use() -> str | None:
    """The accelerator that this process has used and, if it was noted, the line that used it first.

    Example:
        >>> first_use() is None
        True
    """
    if torch.cuda.is_initialized():
        return f"CUDA{_first_lines[0]}" if _first_lines else "CUDA"
    return "an XPU" if torch.xpu.is_initialized() else None


def _note() -> None:
    frames = [
        frame
        for frame in traceback.extract_stack()
        if not frame.filename.startswith((_TORCH, _PACKAGE, "<frozen"))
    ]
    if frames:
        last = frames[-1]
        place = f"line {last.lineno} of {Path(last.filename).name}"
        _first_lines.append(f", first by `{last.line}` ({place})")
