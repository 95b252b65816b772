"""Grad mode and autocast before a call, put back after an interrupt that cut off the end of a context."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import NamedTuple

import torch

AutocastState = tuple[bool, torch.dtype, bool, int]


class TorchModes(NamedTuple):
    """Grad mode, and autocast on a kind of device. "" if the call does not switch autocast."""

    kind: str
    grad: bool
    autocast: AutocastState | None

    def put_back(self) -> None:
        """Make both as they were."""
        torch.set_grad_enabled(self.grad)
        if self.autocast is not None:
            restore_autocast(self.kind, self.autocast)


def torch_modes(kind: str) -> TorchModes:
    """The modes of this moment."""
    return TorchModes(kind, torch.is_grad_enabled(), autocast_state(kind) if kind else None)


@contextlib.contextmanager
def keeping_modes(kind: str) -> Generator[None]:
    """If the body raises, the modes are as before."""
    modes = torch_modes(kind)
    try:
        yield
    except BaseException:
        modes.put_back()
        raise


def autocast_state(kind: str) -> AutocastState:
    """Whether autocast is on for a kind of device, its dtype, its cache, and how deep contexts are nested."""
    torch.autocast_increment_nesting()
    return (
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind),
        torch.is_autocast_cache_enabled(),
        torch.autocast_decrement_nesting(),
    )


def restore_autocast(kind: str, state: AutocastState) -> None:
    """Put autocast back. (2.9 to 2.13)"""
    enabled, dtype, cached, depth = state
    torch.clear_autocast_cache()
    now = torch.autocast_increment_nesting()
    while now > depth:
        now = torch.autocast_decrement_nesting()
    while now < depth:
        now = torch.autocast_increment_nesting()
    torch.set_autocast_enabled(kind, enabled)
    torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(cached)
