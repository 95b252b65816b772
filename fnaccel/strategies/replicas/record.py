"""`local_sgd()` and `diloco()`: the options of replicas along `dp_replicate` that train apart."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

import attrs

from fnaccel.errors import require
from fnaccel.extend import (
    Axis,
    CapabilityError,
    Optimizer,
    Spec,
    Strategy,
    Traffic,
    check_degree,
    maker,
    runtime_in,
)
from fnaccel.strategies.replicas.outer import outer_text, read_outer
from fnaccel.texts import counted, size_of

Slots = Literal["local", "average"]
Weighting = Literal["replicas", "rows"]
Send = Literal["float32", "bfloat16"]
Anchor = Literal["device", "host"]
Metrics = Literal["steps", "boundary"]


@attrs.frozen(kw_only=True)
class Replicas(Axis):
    """The axis `dp_replicate` of replicas that train apart: see `local_sgd` and `diloco`."""

    mesh_axis: ClassVar[str] = "dp_replicate"
    averages: ClassVar[bool] = False

    degree: int = attrs.field(default=-1, kw_only=False)
    every: int = 8
    warmup: int = 0
    slots: Slots = "local"
    weighting: Weighting = "replicas"
    metrics: Metrics = "steps"

    def next_whole(self, step: int) -> int:
        """The first step, from this one on, after which replicas average."""
        if step <= self.warmup:
            return step
        return self.warmup + -(-(step - self.warmup) // self.every) * self.every

    def check(self, spec: Spec) -> None:
        """Raise for a runtime beside it, which averages gradients by itself."""
        runtime = runtime_in(spec)
        if runtime:
            raise CapabilityError(
                f"{runtime} averages gradients by itself, and replicas of {self.maker} train apart",
                where=f"strategy {spec.strategy}",
                fix=f"multiply {self.maker} with fsdp, tensor or context",
            )
        if self.metrics == "boundary" and any(t.name == "on_spike" for t in spec.step.transforms):
            raise CapabilityError(
                "on_spike decides by the loss of all rows, which ranks do not know between averages",
                where=f"strategy {spec.strategy}",
                fix=f'fa.{self.maker}(metrics="steps"); or leave out on_spike',
            )

    def held(self, parameters: int) -> int:  # noqa: ARG002
        """The bytes of the anchor and its slots: none without an outer optimizer."""
        return 0

    def averages_of(self, parameters: int, slots: int) -> list[Traffic]:
        """The all-reduce after each `every` steps, as its share of a step."""
        peak = self._sent(parameters) + (slots if self.slots == "average" else 0)
        peak += 16 if self.metrics == "boundary" else 0  # the loss and its weight
        what = f"its share of {size_of(peak)}, sent after each {self.every} steps"
        share = -(-peak // self.every)
        return [Traffic(axis=self.mesh_axis, kind="all_reduce", count=1, size=share, per="step", what=what)]

    def _sent(self, parameters: int) -> int:
        """The bytes of parameters, or of their changes, as they are sent."""
        return parameters

    def obstacle_to_capture(self, spec: Spec) -> str:  # noqa: ARG002
        """Why a step is not one graph."""
        return f"replicas of {self.maker} weigh gradients by their own rows, and metrics by those of all"

    def plan_notes(self, spec: Spec) -> list[str]:
        """When replicas average, and what."""
        count = spec.mesh.degrees[self.mesh_axis]
        first = f", and after each of the first {self.warmup}" if self.warmup else ""
        replicas = counted(count, "replica trains apart, and averages", "replicas train apart, and average")
        notes = [f"{self.maker}: {replicas} after each {self.every} steps{first}"]
        if self.slots == "local":
            notes.append(f"{self.maker}: each replica keeps optimizer slots of its own")
        if self.metrics == "boundary":
            notes.append(f"{self.maker}: between averages metrics are those of this rank's replica")
            notes.append(f"{self.maker}: ranks learn of a stop request at the next average")
        return notes


@attrs.frozen(kw_only=True)
class LocalSgd(Replicas):
    """See `local_sgd`."""

    maker: ClassVar[str] = "local_sgd"


@attrs.frozen(kw_only=True)
class Diloco(Replicas):
    """See `diloco`."""

    maker: ClassVar[str] = "diloco"

    every: int = 64
    outer: str = "sgd(0.7, momentum=0.9, nesterov=True)"
    send: Send = "float32"
    anchor: Anchor = "device"

    def held(self, parameters: int) -> int:
        """The bytes of the anchor and its slots in the memory of the device."""
        if self.anchor == "host":
            return 0
        outer = read_outer(self.outer)
        slots = 2 if outer.name != "sgd" else int(dict(outer.options)["momentum"] > 0)
        return parameters * (1 + slots)

    def _sent(self, parameters: int) -> int:
        return parameters if self.send == "float32" else parameters // 2

    def plan_notes(self, spec: Spec) -> list[str]:
        """The notes of all replicas, and where the anchor is."""
        host = "diloco: the anchor and the slots of the outer optimizer are in host memory"
        return super().plan_notes(spec) + [host] * (self.anchor == "host")

    def check(self, spec: Spec) -> None:
        """Raise for averages of parameters, which would follow a replica and not the anchor."""
        super().check(spec)
        if spec.step.settings.ema_decay is not None:
            raise CapabilityError(
                "averages would follow the parameters of a replica, and the outer optimizer moves the anchor",
                where=f"strategy {spec.strategy}",
                fix="leave out fa.with_ema; or fa.local_sgd(), whose averages are those of the mean",
            )


@maker
def local_sgd(
    degree: int = -1,
    *,
    every: int = 8,
    warmup: int = 0,
    slots: Slots = "local",
    weighting: Weighting = "replicas",
    metrics: Metrics = "steps",
) -> Strategy:
    """Replicas train apart, and average their parameters after each `every` steps (Stich 2019).

    Between two averages a replica updates by the gradient of the weighted mean of its own rows. Parameters,
    floating-point buffers and `with_ema`'s averages become means over replicas; of integer buffers and
    counts the largest is kept. https://arxiv.org/abs/1805.09767

    Multiply it with `fsdp`, `tensor` or `context`: the ranks of one replica average each gradient.

    Metrics `loss`, `weight` and aux are those of all rows. `grad_norm` and `skipped` are of this rank's
    replica, which is clipped, and left out, by itself.

    Args:
        degree: how many replicas. -1 takes the ranks that are left.
        every: steps from one average to the next.
        warmup: steps at the start that average each time.
        slots: `"local"`: each replica keeps its own optimizer slots. `"average"` averages them, too.
        weighting: `"replicas"`: a replica's gradient is that of its own mean. `"rows"`: it is divided by the
            mean weight of a replica, so that a replica with more rows takes larger steps. The mean of all
            gradients is that of all rows then, and averages after each step of SGD are those of `ddp`.
        metrics: `"steps"`: metrics are those of all rows, by one small all-reduce a step. `"boundary"`:
            replicas send nothing between averages. Metrics of these steps are those of this rank's replica,
            so do not end a loop by them. A stop request waits for the next average.

    Raises:
        ArgumentError: a degree or a number of steps that can't be.

    Example:
        >>> fa.distribute(GPT, fa.local_sgd(every=16))
    """
    axis = LocalSgd(degree, every=every, warmup=warmup, slots=slots, weighting=weighting, metrics=metrics)
    _check("fa.local_sgd", axis)
    return Strategy((axis,))


@maker
def diloco(
    degree: int = -1,
    *,
    every: int = 64,
    outer: str | Optimizer = "sgd(0.7, momentum=0.9, nesterov=True)",
    warmup: int = 0,
    send: Send = "float32",
    anchor: Anchor = "device",
    slots: Slots = "local",
    weighting: Weighting = "replicas",
    metrics: Metrics = "steps",
) -> Strategy:
    """Replicas train apart, and an outer optimizer moves all by their mean change (Douillard et al. 2023).

    After each `every` steps the change of a replica, anchor - parameters, is averaged over replicas. The
    outer optimizer takes it as the gradient of the anchor, and all go on from there. The state shows anchor
    and slots in `state.transforms["diloco"]`. https://arxiv.org/abs/2311.08105

    All else is as for `local_sgd`.

    Args:
        degree: how many replicas. -1 takes the ranks that are left.
        every: steps from one outer update to the next.
        outer: the outer optimizer, or a text that makes it, of literals.
        warmup: steps at the start after which parameters are averaged. The outer optimizer begins after them.
        send: the dtype in which changes are summed. `"bfloat16"` halves the bytes, and rounds each change to
            8 bits: an error of at most 2**-8 of it for each replica.
        anchor: `"host"` keeps the anchor and the outer slots in CPU memory, pinned beside an accelerator. The
            outer update runs there, on the mean change, and its result is copied to the device.
        slots, weighting, metrics: as for `local_sgd`, of the inner updates.

    Raises:
        ArgumentError: a degree or a number of steps that can't be.
        ConfigError: `outer` is no optimizer, or has arguments that are no literals.

    Example:
        >>> fa.distribute(GPT, fa.diloco(every=32, outer=fa.sgd(0.8, momentum=0.9)))
    """
    require(send in get_args(Send), f"send={send!r}", "fa.diloco", '"float32" or "bfloat16"')
    require(anchor in get_args(Anchor), f"anchor={anchor!r}", "fa.diloco", '"device" or "host"')
    text = outer_text(outer) if isinstance(outer, Optimizer) else outer
    read_outer(text)
    axis = Diloco(
        degree,
        every=every,
        outer=text,
        warmup=warmup,
        send=send,
        anchor=anchor,
        slots=slots,
        weighting=weighting,
        metrics=metrics,
    )
    _check("fa.diloco", axis)
    return Strategy((axis,))


def _check(where: str, axis: Replicas) -> None:
    check_degree(axis.degree, where)
    for name, least in (("every", 1), ("warmup", 0)):
        value = getattr(axis, name)
        require(
            type(value) is int and value >= least,
            f"{name}={value!r} is no number of steps",
            where,
            f"a whole number from {least} on",
        )
    for name, kind in (("slots", Slots), ("weighting", Weighting), ("metrics", Metrics)):
        value, choices = getattr(axis, name), get_args(kind)
        require(value in choices, f"{name}={value!r}", where, " or ".join(map(repr, choices)))
    require(
        (axis.metrics, axis.weighting) != ("boundary", "rows"),
        'weighting="rows" needs the weight of all rows in each step, and metrics="boundary" sends nothing',
        where,
        'metrics="steps", or weighting="replicas"',
    )
