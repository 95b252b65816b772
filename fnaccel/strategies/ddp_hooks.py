"""Communication hooks of ddp, by name: how a gradient is compressed for the all-reduce."""

# no `from __future__ import annotations` here: torch checks the annotations of hooks themselves
from typing import Any

import attrs
import torch
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.parallel import DistributedDataParallel

from fnaccel import _torch
from fnaccel.errors import UnknownNameError, nearest

HOOKS = (
    "fp16",
    "bf16",
    "powersgd",
    "batched_powersgd",
    "fp16+powersgd",
    "bf16+powersgd",
    "fp16+batched_powersgd",
    "bf16+batched_powersgd",
)


@attrs.frozen(repr=False)
class Hook:
    """A hook by name, and for PowerSGD its settings."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    def __repr__(self) -> str:
        """The hook as an argument of `ddp` in the text of a strategy."""
        if not self.options:
            return repr(self.name)
        wrap, _, name = self.name.rpartition("+")
        first = [("batched", True)] * name.startswith("batched") + [("wrap", wrap)] * bool(wrap)
        return f"powersgd({', '.join(f'{key}={value!r}' for key, value in (*first, *self.options))})"

    @property
    def casts_only(self) -> bool:
        """Whether it sends the gradient itself, in another dtype."""
        return self.name in ("fp16", "bf16")


def powersgd(*, batched: bool = False, wrap: str | None = None, **options: Any) -> Hook:
    """Low-rank gradient compression (Vogels et al. 2019) for `fa.ddp(hook=...)`.

    Args:
        batched: compress a bucket as one matrix: faster, less exact.
        wrap: `"fp16"` or `"bf16"`: send the factors in that dtype.
        options: as torch's `PowerSGDState` takes them (`matrix_approximation_rank`,
            `start_powerSGD_iter`, ...).

    Raises:
        UnknownNameError: no such wrapper.

    Example:
        >>> fa.ddp(hook=fa.strategies.powersgd(matrix_approximation_rank=2))
    """
    if wrap not in (None, "fp16", "bf16"):
        raise UnknownNameError(
            f"no wrapper is called {wrap!r}",
            where="fa.strategies.powersgd",
            fix=nearest(str(wrap), ("fp16", "bf16")),
        )
    name = "batched_powersgd" if batched else "powersgd"
    return Hook(f"{wrap}+{name}" if wrap else name, tuple(sorted(options.items())))


def register(hook: Hook, wrapped: DistributedDataParallel) -> None:
    """Register a hook on torch's DistributedDataParallel."""
    from torch.distributed.algorithms.ddp_comm_hooks import (  # noqa: PLC0415 - slow to import
        default_hooks,
        powerSGD_hook,
    )

    def bf16(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        # torch refuses its own function on the CPU by name, although gloo reduces bf16
        return default_hooks.bf16_compress_hook(state, bucket)

    def bf16_wrapped(inner: Any) -> Any:
        run = default_hooks.bf16_compress_wrapper(inner)

        def wrapper(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            return run(state, bucket)

        return wrapper

    plain = {"fp16": default_hooks.fp16_compress_hook, "bf16": bf16}
    if hook.name in plain:
        wrapped.register_comm_hook(None, plain[hook.name])
        return
    wrapper, _, name = hook.name.rpartition("+")
    inner: Any = powerSGD_hook.powerSGD_hook
    if name == "batched_powersgd":
        _torch.mend_batched_powersgd()
        inner = powerSGD_hook.batched_powerSGD_hook
    if wrapper == "fp16":
        inner = default_hooks.fp16_compress_wrapper(inner)
    elif wrapper == "bf16":
        inner = bf16_wrapped(inner)
    state = powerSGD_hook.PowerSGDState(process_group=wrapped.process_group, **dict(hook.options))
    wrapped.register_comm_hook(state, inner)
