"""Communication hooks of ddp, by name: how a gradient is compressed for the all-reduce."""

# no `from __future__ import annotations` here: torch checks the annotations of hooks themselves
import importlib
from collections.abc import Callable
from typing import Any, Literal, TypedDict, Unpack

import attrs
import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.parallel import DistributedDataParallel

from fnaccel.errors import UnknownNameError, nearest, require
from fnaccel.step.callables import name_of
from fnaccel.strategies._torch import mend_batched_powersgd

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
    """A hook by name, and for PowerSGD its settings. Or a function of the user's, and its state."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()
    function: Callable[[Any, Any], Any] | None = None
    state: Any = None

    def __repr__(self) -> str:
        """The hook as an argument of `ddp` in the text of a strategy."""
        if self.function is not None:
            return self.name
        if not self.options:
            return repr(self.name)
        wrap, _, name = self.name.rpartition("+")
        first = [("batched", True)] * name.startswith("batched") + [("wrap", wrap)] * bool(wrap)
        return f"powersgd({', '.join(f'{key}={value!r}' for key, value in (*first, *self.options))})"

    @property
    def casts_only(self) -> bool:
        """Whether it sends the gradient itself, in another dtype."""
        return self.function is None and self.name in ("fp16", "bf16")


def comm_hook(function: Callable[[Any, Any], Any], state: object = None) -> Hook:
    """A communication hook of your own for `fa.ddp(hook=...)`.

    Args:
        function: `(state, bucket) -> torch.futures.Future`, as torch's `register_comm_hook` takes it. The
            future holds the gradients of `bucket.buffer()`, averaged over the ranks.
            https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
        state: its first argument. None: the process group of the replicas.

    Raises:
        ArgumentError: not a function.

    Example:
        >>> def average(group, bucket):
        ...     tensor = bucket.buffer().div_(torch.distributed.get_world_size(group))
        ...     work = torch.distributed.all_reduce(tensor, group=group, async_op=True)
        ...     return work.get_future().then(lambda done: done.value()[0])
        >>> fa.distribute(GPT, fa.ddp(hook=average))  # as fa.strategies.comm_hook(average)
    """
    require(
        callable(function),
        f"{function!r} is no function",
        "fa.strategies.comm_hook",
        "comm_hook(lambda state, bucket: ...)",
    )
    name = name_of(function)
    return Hook(name, function=function, state=state)


def named_hook(reference: str) -> Hook:
    """The hook that `"module:function"` names.

    Raises:
        UnknownNameError: the module can't be imported, or has no such function.
    """
    module, _, name = reference.partition(":")
    try:
        function: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UnknownNameError(
            f"the hook {reference!r} can't be imported: {error}",
            where="fa.ddp(hook=)",
            fix="write module:function, of a module that can be imported",
        ) from error
    return attrs.evolve(comm_hook(function), name=repr(reference))


class PowerSgdOptions(TypedDict, total=False):
    """The options of torch's `PowerSGDState`, for type checkers of a call of `powersgd`."""

    matrix_approximation_rank: int
    start_powerSGD_iter: int
    min_compression_rate: float
    use_error_feedback: bool
    warm_start: bool
    orthogonalization_epsilon: float
    random_seed: int
    compression_stats_logging_frequency: int
    batch_tensors_with_same_shape: bool


def powersgd(
    *,
    batched: bool = False,
    wrap: "Literal['fp16', 'bf16'] | None" = None,
    **options: "Unpack[PowerSgdOptions]",
) -> Hook:
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


def register_simulated(wrapped: DistributedDataParallel) -> None:
    """Register the plain all-reduce of a simulated world, whose collectives complete without a result."""
    group = wrapped.process_group

    def reduced(_: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        dist.all_reduce(bucket.buffer(), group=group)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped.register_comm_hook(None, reduced)


def register(hook: Hook, wrapped: DistributedDataParallel) -> None:
    """Register a hook on torch's DistributedDataParallel."""
    if hook.function is not None:
        function = hook.function
        # without annotations: torch compares them with its classes, and they may be text
        wrapped.register_comm_hook(
            wrapped.process_group if hook.state is None else hook.state,
            lambda state, bucket: function(state, bucket),
        )
        return
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
        wrapped.register_comm_hook(wrapped.process_group, plain[hook.name])
        return
    wrapper, _, name = hook.name.rpartition("+")
    inner: Any = powerSGD_hook.powerSGD_hook
    if name == "batched_powersgd":
        mend_batched_powersgd()
        inner = powerSGD_hook.batched_powerSGD_hook
    if wrapper == "fp16":
        inner = default_hooks.fp16_compress_wrapper(inner)
    elif wrapper == "bf16":
        inner = bf16_wrapped(inner)
    state = powerSGD_hook.PowerSGDState(process_group=wrapped.process_group, **dict(hook.options))
    wrapped.register_comm_hook(state, inner)
