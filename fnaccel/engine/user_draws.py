"""Random numbers that a user's GRADS and UPDATE functions draw: the same on every rank, under every layout.

A sharded gradient is a DTensor, and each rank would fill its own part with the same numbers. Here the whole
tensor is drawn on every rank, and each rank takes its part of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fnaccel import _torch, tree
from fnaccel.errors import CapabilityError
from fnaccel.world.random_streams import fold
from fnaccel.world.undo import StreamStates

_LIKE = (torch.rand_like, torch.randn_like, torch.randint_like)
_IN_PLACE = tuple(
    getattr(torch.Tensor, name)
    for name in ("normal_", "uniform_", "exponential_", "geometric_", "cauchy_", "log_normal_", "random_")
)
_FACTORIES = (torch.rand, torch.randn, torch.randint, torch.randperm)
_BY_VALUE = (
    torch.bernoulli,
    torch.Tensor.bernoulli,
    torch.Tensor.bernoulli_,
    torch.multinomial,
    torch.normal,
    torch.poisson,
    torch.dropout,
    torch.nn.functional.dropout,
)
_ALL = frozenset((*_LIKE, *_IN_PLACE, *_FACTORIES, *_BY_VALUE))
_HOOKS = 1 << 32  # beyond every micro-batch's number


class WholeDraws(TorchFunctionMode):
    """In the body a random tensor with the layout of a DTensor is the part of one whole tensor.

    Args:
        seeded: whether the default generators are equal on all ranks.
    """

    only_draws = True
    paused = False  # while a model runs in the body, which draws as it does outside

    def __init__(self, *, seeded: bool) -> None:
        super().__init__()
        self._shared = seeded

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func`, or draw the whole tensor in its place."""
        options = kwargs or {}
        if func not in _ALL or WholeDraws.paused:
            return func(*args, **options)
        if not self._shared and options.get("generator") is None:
            raise CapabilityError(
                f"{func.__name__} draws from a generator that differs between ranks: they would drift apart",
                where='a GRADS or UPDATE function under fa.train_step(rng="stream")',
                fix='pass generator=, seeded alike on all ranks; or leave rng="fold"',
            )
        sharded = [x for x in (*args, *options.values()) if hasattr(x, "placements")]
        if not sharded:
            return func(*args, **options)
        if len(sharded) > 1 or not hasattr(args[0], "placements") or func in _BY_VALUE:
            raise CapabilityError(
                f"{func.__name__} of a sharded tensor would draw other numbers on each layout",
                where="a GRADS or UPDATE function",
                fix="draw with torch.rand_like or torch.randn_like, and compare or combine afterwards",
            )
        return _drawn(func, args, options)


@contextlib.contextmanager
def pausing() -> Generator[None]:
    """In the body random tensors are drawn as they are outside of a user's hook."""
    before, WholeDraws.paused = WholeDraws.paused, True
    try:
        with _torch.without_draws():
            yield
    finally:
        WholeDraws.paused = before


def _drawn(func: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    like: Any = args[0]
    whole = torch.empty(like.shape, dtype=like.dtype, device=_torch.local_of(like).device)
    whole = func(whole, *args[1:], **options)
    part = tree.laid_out(whole, like)
    return like.copy_(part) if func in _IN_PLACE else part


@contextlib.contextmanager
def drawing(
    root: int | None, step: int, streams: Sequence[torch.Generator], ranks: int, *, sharded: bool = True
) -> Generator[None]:
    """In the body user functions draw numbers that are equal on all ranks. The streams end as they were.

    Args:
        root: the root seed. None for PyTorch's own streams.
        step: calls of the train step before this one.
        streams: those that they draw from.
        ranks: how many ranks there are.
        sharded: whether the functions see DTensors.
    """
    states = StreamStates(() if root is None else streams)
    try:
        if root is not None:
            states.reseed(fold(root, step, _HOOKS))
        seeded = root is not None or ranks == 1
        # a function mode makes each operation in the body slower, and whole tensors need none
        with WholeDraws(seeded=seeded) if sharded or not seeded else contextlib.nullcontext():
            yield
    finally:
        states.put_back()
