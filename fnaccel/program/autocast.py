"""Autocast before a step, so that it can be put back after an interrupt."""

from __future__ import annotations

import torch


def autocast_state(kind: str) -> tuple[bool, torch.dtype, bool, int]:
    """Whether autocast is on for a kind of device, its dtype, its cache, and how deep contexts are nested."""
    torch.autocast_increment_nesting()
    return (
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind),
        torch.is_autocast_cache_enabled(),
        torch.autocast_decrement_nesting(),
    )


def restore_autocast(kind: str, state: tuple[bool, torch.dtype, bool, int]) -> None:
    """Put autocast back: an interrupt may have cut off the end of a context. (2.9 to 2.13)"""
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
