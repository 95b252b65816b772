"""`attention`: which kernel of `scaled_dot_product_attention` a train step uses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import attrs
from torch.nn.attention import SDPBackend, sdpa_kernel

from fnaccel.errors import CapabilityError, UnknownNameError, nearest, require
from fnaccel.step.chain import takes_step
from fnaccel.step.step import Phase, Transform

Kernel = Literal["flash", "efficient", "math", "cudnn"]

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
_NONE_FITS = ("No available kernel", "No viable backend")


@attrs.frozen
class Attention:
    """The kernels that a step may use."""

    kernels: tuple[Kernel, ...]

    def describe(self) -> str:
        """The text in the plan."""
        return " or ".join(self.kernels)

    def __call__(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The train step under torch's switch. Around all of it: a recomputed block runs in backward."""

        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                with sdpa_kernel([_BACKENDS[name] for name in self.kernels]):
                    return call(*args, **kwargs)
            except RuntimeError as error:
                if not any(text in str(error) for text in _NONE_FITS):
                    raise
                raise CapabilityError(
                    f"{self.describe()} attention can't compute this: the device, the dtype or the mask "
                    "does not fit",
                    where="fa.transforms.attention",
                    fix="let torch fall back: fa.transforms.attention(step, 'flash', 'math'); on GPUs flash "
                    "takes no mask, and half precision only",
                ) from error

        return run


@takes_step
def attention(*kernels: Kernel) -> Transform:
    """Choose the kernels of `torch.nn.functional.scaled_dot_product_attention` in a train step.

    Forward, backward and recomputed blocks use them. `fa.evaluate` and `train_step.look` leave torch its
    choice. Under `fa.compile` the choice is part of the graph. It is torch's own switch, `sdpa_kernel`:
    https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.sdpa_kernel.html

    Args:
        step: a step or a loss function; or none, for `fa.chain`.
        kernels: `"flash"` (Dao 2023), `"efficient"` (Rabe and Staats 2021), `"cudnn"`, `"math"` (plain
            operations). torch takes one of them.

    Raises:
        UnknownNameError: no such kernel.
        ArgumentError: none is named.
        CapabilityError: in a step, if none of them can compute it. The state stays live.

    Example:
        >>> step = fa.transforms.attention(loss_fn, "flash", "math")
    """
    where = "fa.transforms.attention"
    require(bool(kernels), "no kernel is named", where, 'fa.transforms.attention(step, "flash")')
    for name in kernels:
        if name not in get_args(Kernel):
            raise UnknownNameError(
                f"no attention is called {name!r}", where=where, fix=nearest(str(name), get_args(Kernel))
            )
    return Transform("attention", Phase.CALL, apply=Attention(kernels))
