"""The private names of torch that offloading and quantization need, with the versions each was checked on."""

# pyright: reportPrivateUsage=false
# ruff: noqa: SLF001
from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch


def without_overrides(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function of torch as if no argument had a `__torch_function__`. (2.9 to 2.13)"""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)


def hand_hooks_on(module: torch.nn.Module, other: torch.nn.Module) -> None:
    """Give another module the hooks of a module. Their handles remove them there. (2.9 to 2.13)"""
    for name in _HOOKS:
        setattr(other, name, getattr(module, name))


def drop_hooks(module: torch.nn.Module, ids: Collection[int]) -> None:
    """Take the hooks with these ids away from a module. (2.9 to 2.13)"""
    for name in _HOOKS:
        hooks = getattr(module, name)
        for key in ids:
            if isinstance(hooks, dict):
                hooks.pop(key, None)


def save_own(module: torch.nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Write the entries of a module itself, without those of its children, into a state dict."""
    module._save_to_state_dict(state, prefix, False)
