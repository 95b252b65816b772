"""Attention over all ranks' tokens, in the place of `F.scaled_dot_product_attention` while a loss runs.

Its name is replaced, in `torch.nn.functional` and in each module that imported it by name. A
TorchFunctionMode would not do: torch leaves the mode inside of `nn.MultiheadAttention`, every operation would
pay for it, and `torch.compile` can't trace `Tensor.unflatten` under one (torch 2.13). The names are replaced
until the backward pass has ended, since blocks may be recomputed there.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fnaccel.errors import CapabilityError
from fnaccel.strategies.context.gather import gather_attention
from fnaccel.strategies.context.heads import heads_attention
from fnaccel.strategies.context.kernels import scaled_dot_product
from fnaccel.strategies.context.masks import over_all_keys
from fnaccel.strategies.context.ring import ring_attention
from fnaccel.strategies.context.split import Split

_WHERE = "scaled_dot_product_attention under fa.context"
_torch_attention: Any = F.scaled_dot_product_attention
_torch_multi_head: Any = F.multi_head_attention_forward

METHODS: Mapping[str, Callable[..., torch.Tensor]] = {
    "gather": gather_attention,
    "ring": ring_attention,
    "heads": heads_attention,
}
"""How attention reaches the keys of other ranks, by name."""

# recomputation may run in a thread of autograd's: a thread-local variable would be empty there
_current: Split | None = None
_importers: list[tuple[types.ModuleType, str]] = []
_modules_seen = 0


def current() -> Split | None:
    """The ranks that share the sequences of the loss that runs now. None outside of one."""
    return _current


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`F.scaled_dot_product_attention` over the keys of all ranks, if `key` is a part of a sequence.

    Raises:
        CapabilityError: a mask over this rank's tokens alone, or keys whose number does not say of which
            sequence they are a part.
    """
    split = current()
    if split is None:
        return scaled_dot_product(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    rows, keys = query.shape[-2], key.shape[-2]
    if keys not in split.lengths:
        if rows == keys and keys not in split.uncut:
            raise _unknown_length(keys, split)
        # keys that every rank has whole, such as those of an encoder whose tokens are not cut
        return scaled_dot_product(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if keys in split.uncut:
        raise CapabilityError(
            f"attention over {keys} tokens: as many as this rank's part of a sequence has, and as many as a "
            "leaf of the batch that every rank has whole",
            where=_WHERE,
            fix="pad one of the two to another length, so that they can be told apart",
        )
    if is_causal and rows != keys:
        raise CapabilityError(
            f"is_causal=True of {rows} rows and {keys} keys, which are parts of one sequence",
            where=_WHERE,
            fix="give as many rows as keys, or a mask of rows by the keys of the whole sequence",
        )
    mask = None if attn_mask is None else over_all_keys(attn_mask, rows, keys, split)
    if is_causal and mask is not None:
        raise CapabilityError(
            "torch takes is_causal=True or a mask, not both", where=_WHERE, fix="leave one of the two out"
        )
    query, key, value = (_as_autocast(tensor) for tensor in (query, key, value))
    attend = METHODS[split.method]
    return attend(split, query, key, value, mask, is_causal, dropout_p, scale, enable_gqa)


def _unknown_length(keys: int, split: Split) -> CapabilityError:
    lengths = " or ".join(map(str, split.lengths))
    return CapabilityError(
        f"attention over {keys} tokens, and this rank's part of a sequence has {lengths}: nothing says "
        "whether other ranks have more of them",
        where=_WHERE,
        fix="let the model add or drop no tokens (a class token, pooling); if every rank has these tokens "
        "whole, give them as a leaf of the batch that cut= names with None",
    )


def _as_autocast(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as autocast would hand it to the kernel, so that no more is sent than is used."""
    device = tensor.device.type
    if torch.is_autocast_enabled(device) and tensor.dtype in (torch.float32, torch.float16, torch.bfloat16):
        return tensor.to(torch.get_autocast_dtype(device))
    return tensor


def _multi_head(*args: Any, **kwargs: Any) -> Any:
    """`F.multi_head_attention_forward`, which can't return the weights of other ranks' tokens."""
    if kwargs.get("need_weights", True):
        raise CapabilityError(
            "nn.MultiheadAttention returns its weights, and this rank has those of its own tokens only",
            where="nn.MultiheadAttention under fa.context",
            fix="call it with need_weights=False",
        )
    return _torch_multi_head(*args, **kwargs)


def check_modules(root: nn.Module) -> None:
    """Raise CapabilityError if a module keeps torch's function in an attribute: it can't be replaced."""
    for name, module in root.named_modules():
        for attribute, value in vars(module).items():
            if value is _torch_attention:
                raise CapabilityError(
                    f"{name or 'the model'}.{attribute} keeps scaled_dot_product_attention, which would see "
                    "this rank's tokens only",
                    where="fa.context",
                    fix="let forward call F.scaled_dot_product_attention by its name",
                )


def _find_importers() -> None:
    """Find the modules that imported torch's function by name, if modules were added."""
    global _modules_seen
    if len(sys.modules) == _modules_seen:
        return
    _modules_seen = len(sys.modules)
    _importers[:] = [
        (module, attribute)
        for name, module in list(sys.modules.items())
        if hasattr(module, "__dict__") and name != __name__ and not name.startswith("torch.")
        for attribute, value in list(vars(module).items())
        if value is _torch_attention
    ]


@contextlib.contextmanager
def attention_over(split: Split) -> Generator[None]:
    """In the body, attention reaches the tokens of all ranks."""
    global _current
    before = _current
    fast_path = torch.backends.mha.get_fastpath_enabled()
    if before is None:
        _find_importers()
    try:
        _current = split
        # in evaluation mode nn.MultiheadAttention calls a kernel of its own
        torch.backends.mha.set_fastpath_enabled(False)
        _replace(attention, _multi_head)
        yield
    finally:
        _current = before
        torch.backends.mha.set_fastpath_enabled(fast_path)
        if before is None:
            _replace(_torch_attention, _torch_multi_head)


def _replace(by: Any, multi_head_by: Any) -> None:
    F.scaled_dot_product_attention = by
    F.multi_head_attention_forward = multi_head_by
    for module, attribute in _importers:
        setattr(module, attribute, by)
