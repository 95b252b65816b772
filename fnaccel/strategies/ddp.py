"""`ddp()`: every rank holds the whole model, gradients are averaged in buckets during backward.

torch's DistributedDataParallel does the work (https://docs.pytorch.org/docs/stable/notes/ddp.html), with
fixed buckets (see `_torch.DataParallel`). The wrapper is around the host module, so the loss may call
any method of the model.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, get_args

import attrs
import torch
import torch.distributed as dist
from torch import nn

from fnaccel import _torch
from fnaccel.engine.engine import Engine, Hooks
from fnaccel.errors import CapabilityError, UnknownNameError, nearest, require
from fnaccel.models.building import Built, construct
from fnaccel.models.constant_buffers import constant_buffers
from fnaccel.step.spec import Spec
from fnaccel.strategies.axis import Build, finisher
from fnaccel.strategies.captured_buckets import MIB, TORCH_SIZES, Buckets, bucket_bytes, lay_out
from fnaccel.strategies.ddp_hooks import (
    HOOKS,
    Hook,
    comm_hook,
    named_hook,
    powersgd,
    register,
    register_simulated,
)
from fnaccel.strategies.local import capture_whole, place, whole_engine
from fnaccel.strategies.strategy import ARGUMENT_MAKERS, Axis, Strategy, check_degree, maker
from fnaccel.texts import first_of
from fnaccel.world.mesh import ensure_group

ARGUMENT_MAKERS["powersgd"] = powersgd
BucketLayout = Literal["fixed", "torch"]
_REDUCE = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_SENT = {name: dtype for dtype, name in _REDUCE.items()}


@attrs.frozen
class Ddp(Axis):
    """The axis `dp_replicate`: see `ddp`."""

    mesh_axis: ClassVar[str] = "dp_replicate"
    maker: ClassVar[str] = "ddp"

    degree: int = -1
    bucket_mb: float | None = None
    static_graph: bool = False
    unused_parameters: bool = False
    sync_buffers: bool = True
    hook: Hook | None = None
    gradient_as_bucket_view: bool = True
    buckets: BucketLayout = "fixed"

    def bucket_sizes(self, gradients: int) -> tuple[float, float]:
        """The bytes of the first bucket and of the others, for so many bytes of gradients."""
        if self.bucket_mb is None and self.buckets == "torch":
            return TORCH_SIZES
        size = bucket_bytes(gradients, self.bucket_mb)
        return size, size

    def check(self, spec: Spec) -> None:
        """Raise CapabilityError if sums over a batch would be sent in fp16, which ends at 65,504."""
        settings = spec.step.settings
        named = "" if self.hook is None else self.hook.name
        own = self.hook is not None and self.hook.function is not None
        half = (named.startswith("fp16") and not own) or settings.precision.reduce is torch.float16
        if half and settings.weight_fn is None:
            raise CapabilityError(
                "gradients of a total, not yet divided by its weight, would be sent in fp16 and overflow",
                where=f"strategy {spec.strategy}",
                fix="fa.with_weight(step, weight_fn) divides up front (weight 1 for a mean); "
                "or reduce in bf16",
            )

    def plan_notes(self, spec: Spec) -> list[str]:
        """Notes if each rank keeps its own buffers, and if torch lays out the buckets."""
        if spec.mesh.gradient_size == 1:
            return []
        notes: list[str] = []
        if not self.sync_buffers:
            notes.append(
                "sync_buffers=False: each rank keeps its own buffers, and a checkpoint holds the first rank's"
            )
        if self.buckets == "torch":
            notes.append(
                "buckets='torch': a run that is resumed may differ in its last bits on three ranks or more"
            )
        return notes

    def obstacle_to_capture(self, spec: Spec) -> str:  # noqa: ARG002
        """Hooks that a graph can't hold."""
        if self.buckets == "torch":
            return "ddp(buckets='torch') lays out buckets while the first backward runs"
        if self.unused_parameters:
            return "ddp(unused_parameters=True) looks for parameters without a gradient in each step"
        if self.hook is not None and not self.hook.casts_only:
            return f"the hook {self.hook.name!r} of ddp keeps state outside of the graph"
        return ""


@maker
def ddp(
    degree: int = -1,
    *,
    bucket_mb: float | None = None,
    static_graph: bool = False,
    unused_parameters: bool = False,
    sync_buffers: bool = True,
    hook: str | Hook | Callable[[Any, Any], Any] | None = None,
    gradient_as_bucket_view: bool = True,
    buckets: BucketLayout = "fixed",
) -> Strategy:
    """Replicate the model and average gradients (Li et al. 2020).

    Args:
        degree: how many replicas. -1 takes the ranks that are left.
        bucket_mb: size of a gradient bucket in MiB. By default an eighth of the gradients, 1 to 25 MiB.
        static_graph: the same parameters get gradients every step (allows more overlap).
        unused_parameters: search each step for parameters that get no gradient.
        sync_buffers: broadcast the first replica's buffers after each update, as far as forwards change them.
        hook: communication hook: `"fp16"`, `"bf16"`, `"powersgd"`, `"batched_powersgd"`, a wrapper
            such as `"fp16+powersgd"`, or `fa.strategies.powersgd(...)` with its settings. Or a function
            `(group, bucket) -> Future` of yours: see `fa.strategies.comm_hook`. In the text of a strategy
            it is `"module:function"`.
        gradient_as_bucket_view: gradients are views of the buckets, which saves a copy of them in memory.
        buckets: `"fixed"` lays them out before the first step, last parameter first, so that a run that is
            resumed is the run that went on, to the bit. `"torch"` leaves it to DistributedDataParallel:
            25 MiB by default, laid out again after the first backward in the order in which gradients came.
            That overlaps more if parameters are used in another order than they were made.

    Raises:
        ArgumentError: a degree, a size or a layout of buckets that can't be.
        UnknownNameError: no such hook.

    Example:
        >>> fa.distribute(GPT, fa.ddp(hook="bf16"))
    """
    check_degree(degree, "fa.ddp")
    require(
        bucket_mb is None or bucket_mb > 0,
        f"a bucket can't hold {bucket_mb} MiB",
        "fa.ddp",
        "bucket_mb is positive, or None",
    )
    require(
        buckets in get_args(BucketLayout), f"buckets={buckets!r} is no layout", "fa.ddp", '"fixed" or "torch"'
    )
    if isinstance(hook, str) and ":" in hook:
        hook = named_hook(hook)
    elif isinstance(hook, str):
        if hook not in HOOKS:
            raise UnknownNameError(f"no hook is called {hook!r}", where="fa.ddp", fix=nearest(hook, HOOKS))
        hook = Hook(hook)
    elif callable(hook):
        hook = comm_hook(hook)
    require(
        hook is None or isinstance(hook, Hook),
        f"a hook is not {type(hook).__name__}",
        "fa.ddp",
        'hook="bf16"',
    )
    return Strategy(
        (
            Ddp(
                degree,
                bucket_mb,
                static_graph,
                unused_parameters,
                sync_buffers,
                hook,
                gradient_as_bucket_view,
                buckets,
            ),
        )
    )


@finisher(Ddp)
def build_ddp(build: Build, options: Ddp) -> tuple[Engine, Built]:
    """The engine of replicas. No wrapper if there is one replica and no hook."""
    mesh = build.spec.mesh
    built = construct(build.spec.model, build.seed)
    place(built, build)
    hook = options.hook
    if hook is None and build.settings.precision.reduce in _REDUCE:
        hook = Hook(_REDUCE[build.settings.precision.reduce])
    trainable = any(p.requires_grad for _, p in built.named("parameters"))
    complexes = [name for name, p in built.named("parameters") if p.requires_grad and p.is_complex()]
    if complexes and hook is not None and hook.function is None:
        raise CapabilityError(
            f"{complexes[0]} is complex, and the hook {hook} sends real numbers",
            where=f"strategy {build.spec.strategy}",
            fix="leave out hook=, and reduce= of fa.transforms.Precision",
        )
    if not trainable or (mesh.gradient_size == 1 and hook is None):
        alone = capture_whole(built, build) if build.settings.captured and trainable else None
        return whole_engine("ddp", built, build, capture=alone), built
    ensure_group(mesh.world)
    if build.settings.captured:
        return _captured(built, build, options, hook), built
    _send_small(built, mesh.group("gradient") or dist.group.WORLD)
    size = sum(p.numel() * p.element_size() for _, p in built.named("parameters") if p.requires_grad)
    sizes = options.bucket_sizes(size)
    wrapped = _torch.DataParallel(
        built.host,
        process_group=mesh.group("gradient") or dist.group.WORLD,
        fixed=options.buckets == "fixed",
        # with None torch makes the first one smaller
        bucket_cap_mb=None if sizes == TORCH_SIZES else sizes[0] / MIB,
        static_graph=options.static_graph,
        find_unused_parameters=options.unused_parameters,
        **_torch.buffer_sync(False),  # the train step shares them, once an update
        gradient_as_bucket_view=options.gradient_as_bucket_view,
    )
    if mesh.world.backend == "fake":
        register_simulated(wrapped)
    elif hook is not None:
        register(hook, wrapped)
    torn: list[bool] = []
    finds = options.unused_parameters or options.static_graph
    trained = [(name, param) for name, param in built.named("parameters") if param.requires_grad]

    def looks() -> bool:
        return engine.unfinished == {"look"}

    engine = whole_engine(
        "ddp",
        built,
        build,
        run=_guarded(wrapped, torn),
        hooks=Hooks(
            # in a look no rank waits for another, and one that failed prepared nothing
            abandon=lambda error: None if looks() else mesh.world.abandon(error),
            recover=lambda: None if looks() else torn.append(True),
            finish=None if finds else functools.partial(_check_reduced, wrapped, trained),
        ),
        sync=_syncer(wrapped, options.static_graph),
        nests=False,  # the wrapper prepares its buckets in a forward, for the backward that follows
        shares_buffers=options.sync_buffers,
    )
    return engine, built


def _captured(built: Built, build: Build, options: Ddp, hook: Hook | None) -> Engine:
    """The engine without hooks: the wrapper's all-reduces are part of the graph."""
    mesh = build.spec.mesh
    group: Any = mesh.group("gradient") or dist.group.WORLD
    with torch.no_grad():
        _share([value for kind in ("parameters", "buffers") for _, value in built.named(kind)], group)
    trained = [param for _, param in built.named("parameters") if param.requires_grad]
    buckets = Buckets(
        members=lay_out(trained, options.bucket_mb),
        group=group,
        size=mesh.gradient_size,
        dtype=None if hook is None else _SENT[hook.name],
    )
    capture = capture_whole(
        built,
        build,
        average=buckets.average,
        complete=mesh.gradient_size > 1,
        graph_pass=buckets.graph_pass(),
    )
    return whole_engine("ddp", built, build, capture=capture, shares_buffers=options.sync_buffers)


def _send_small(built: Built, group: Any) -> None:
    """Broadcast what the wrapper then skips: rank 0's fp8 weights, since gloo sends no fp8, and constants."""
    named = list(built.host.named_parameters())
    constant = dict(constant_buffers(built.host))
    small = {n: p for n, p in named if p.is_floating_point() and p.itemsize == 1 and not p.requires_grad}
    with torch.no_grad():
        if small:
            _share([param.view(torch.uint8) for param in small.values()], group)
        for value in constant.values():  # one by one, since `_share` copies all of them
            _share([value], group)
    if small or constant:
        _torch.leave_to_others(built.host, [*small, *constant])


def _share(values: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Broadcast rank 0's values to all ranks: one broadcast for each dtype."""
    alike: dict[torch.dtype, list[torch.Tensor]] = {}
    for value in values:
        alike.setdefault(value.dtype, []).append(value)
    for same in alike.values():
        flat = torch.cat([value.reshape(-1) for value in same])
        dist.broadcast(flat, group=group, group_src=0)
        parts = flat.split([value.numel() for value in same])
        for value, part in zip(same, parts, strict=True):
            value.copy_(part.view_as(value))


def _syncer(
    wrapped: _torch.DataParallel, static_graph: bool
) -> Callable[[bool], contextlib.AbstractContextManager[Any]]:
    """The context of a micro-batch: gradients are averaged in its backward, or not.

    With a static graph torch learns the graph in the first backward, and asserts that it reduces there. An
    average in every micro-batch of the first step is the same sum.
    """
    learning = static_graph

    def sync(communicate: bool) -> contextlib.AbstractContextManager[Any]:
        nonlocal learning
        if communicate or learning:
            learning = learning and not communicate
            return contextlib.nullcontext()
        return wrapped.no_sync()

    return sync


def _check_reduced(wrapped: _torch.DataParallel, trained: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Raise CapabilityError if gradients were not averaged, since one that shares their bucket did not come.

    The wrapper itself says so in the forward of the next step, after a wrong update.
    """
    try:
        wrapped.check_reduced()
    except RuntimeError as error:
        names = [name for name, param in trained if param.grad is None]
        some = "some parameters got none in the last micro-batch"
        which = f"{first_of(names)} got no gradient" if names else some
        raise _unreached(f"{which} in this step, and ddp waits for it") from error


def _unreached(what: str) -> CapabilityError:
    return CapabilityError(
        what, where="fa.ddp()", fix="fa.ddp(unused_parameters=True), or use every parameter in the loss"
    )


def _guarded(wrapped: _torch.DataParallel, torn: list[bool]) -> Callable[..., Any]:
    """Run a function of the model inside the wrapper. `torn` is filled if the previous step failed."""

    def run(fn: Callable[..., Any], *args: Any) -> Any:
        if torn:
            # in the step after a failure, not at once: ranks that did not fail may be in a collective
            torn.clear()
            wrapped.begin_anew()
        try:
            return wrapped(fn, *args)
        except RuntimeError as error:
            if "finished reduction in the prior iteration" not in str(error):
                raise
            what = "some parameters got no gradient in the last step, and ddp waits for them"
            raise _unreached(what) from error

    return run
