"""`pipeline()`: ranks run parts of the model one after the other, on micro-batch after micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import attrs
from torch import nn

from fnaccel.errors import require
from fnaccel.extend import (
    EVERYTHING,
    Axis,
    Built,
    Capability,
    CapabilityError,
    Spec,
    Strategy,
    check_degree,
    maker,
    runtime_in,
)
from fnaccel.strategies.pipeline.halves import backward_of_inputs
from fnaccel.strategies.pipeline.schedules import (
    Timing,
    places,
    round_size,
    schedule_of,
    splits_backwards,
    timed,
)
from fnaccel.strategies.pipeline.split import Split, split_model
from fnaccel.strategies.strategy import Pairs
from fnaccel.texts import counted, size_of


@attrs.frozen
class Pipeline(Axis):
    """The axis `pp`: see `pipeline`."""

    mesh_axis: ClassVar[str] = "pp"
    maker: ClassVar[str] = "pipeline"

    degree: int = -1
    split: Any = "even"
    schedule: str = "1f1b"
    virtual: int = 1
    weights: Pairs | None = None

    @property
    def capabilities(self) -> frozenset[Capability]:
        """A stage waits for another one in the model's call: neither the loss nor the step is one graph."""
        none = {Capability.COMPILE_STEP, Capability.COMPILE_LOSS}
        return EVERYTHING - none - ({Capability.COMPILE_BLOCK} if self._splits_backwards else set())

    @property
    def _splits_backwards(self) -> bool:
        return splits_backwards(schedule_of(self.schedule), max(self.degree, 2), self.virtual)

    def check(self, spec: Spec) -> None:
        """Raise CapabilityError for what can't run on stages."""
        where = f"strategy {spec.strategy}"
        runtime = runtime_in(spec)
        if runtime:
            raise CapabilityError(
                f"{runtime} runs the step by itself, and knows nothing of stages",
                where=where,
                fix="multiply pipeline with ddp, fsdp, hsdp, tensor or context",
            )
        if self._splits_backwards and "dp_shard" in spec.mesh.degrees:
            raise CapabilityError(
                f"schedule {self.schedule!r} computes gradients of weights apart, after their shards "
                "have been let go",
                where=where,
                fix="schedule='1f1b' or 'interleaved' beside fsdp and hsdp; or ddp",
            )
        if spec.step.settings.sync_each:
            raise CapabilityError(
                "stages average gradients after the last micro-batch of an update",
                where=where,
                fix="fa.accumulate(step, n) without sync='each'",
            )
        if isinstance(spec.model, dict):
            raise CapabilityError(
                "a pipeline splits one model, and the train step has a dict of models",
                where=where,
                fix="give one module; or another strategy",
            )
        inits = {getattr(axis, "init", "seeded") for axis in spec.strategy.axes}
        if not inits <= {"seeded", "meta"}:
            raise CapabilityError(
                f"init={max(inits - {'seeded', 'meta'})!r} makes a whole model, and a stage has some of it",
                where=where,
                fix="init='seeded', which gives each stage its own values; or init='meta' and fa.restore",
            )

    def plan_notes(self, spec: Spec) -> list[str]:
        """The stages, and the share of time in which ranks wait."""
        ranks, n = spec.mesh.degrees[self.mesh_axis], max(spec.step.settings.micro_batches, 1)
        stages, timing = ranks * self.virtual, self.timing(ranks, n)
        parts = counted(n, "micro-batch", "micro-batches")
        most = max(timing.most_held)
        notes = [
            f"pipeline: {counted(stages, 'stage')} on {counted(ranks, 'rank')}, schedule {self.schedule}: "
            f"with {parts} ranks wait {timing.idle:.0%} of the time, and keep activations of {most} at most"
        ]
        if timing.length <= 40:
            notes.append(f"pipeline: micro-batches in time, backwards in brackets\n{timing.picture()}")
        if n < stages:
            fix = f"with fa.accumulate(step, {2 * stages}) ranks wait less"
            notes.append(f"pipeline: fewer micro-batches than stages: {fix}")
        if self.schedule == "interleaved" and not round_size(ranks, n):
            notes.append(
                f"pipeline: {parts} make no equal rounds of {ranks} or more, so all forwards run first"
            )
        return notes

    def stages(self, built: Built, size: int) -> tuple[dict[str, int], tuple[str, ...]]:
        """The stages over `size` ranks, for a footprint."""
        split = self.split_of(built.model, size)
        named = dict(built.named("parameters"))
        lines: list[str] = []
        for stage in range(split.stages):
            paths = [element.path for element in split.elements if element.stage == stage]
            own = [param for name, param in named.items() if split.parameters[name][0] == stage]
            count, held = sum(x.numel() for x in own), sum(x.nbytes for x in own)
            layers = paths[0] if len(paths) == 1 else f"{paths[0]} to {paths[-1]}"
            what = f"{layers}, {count:,} parameters, {size_of(held)}"
            lines.append(f"stage {stage} on rank {split.homes[stage]} of pp: {what}")
        homes = {name: users[0] for name, users in split.users.items()}
        return homes, tuple(lines)

    def timing(self, size: int, micro_batches: int) -> Timing:
        """The schedule on `size` ranks."""
        table = schedule_of(self.schedule)(size, self.virtual, micro_batches)
        return timed(table, size * self.virtual, micro_batches, self.schedule)

    def halves(self) -> Callable[..., Callable[[], None]] | None:
        """How a backward runs in two parts, or None."""
        return backward_of_inputs if self._splits_backwards else None

    def split_of(self, model: nn.Module, size: int) -> Split:
        """The model cut into the stages of `size` ranks."""
        homes = places(schedule_of(self.schedule), size, self.virtual)
        return split_model(model, self.split, dict(self.weights or ()), homes)

    def obstacle_to_capture(self, spec: Spec) -> str:  # noqa: ARG002
        """Why a step is not one graph."""
        return "a stage of a pipeline waits for others between its forwards and backwards"


@maker
def pipeline(
    degree: int = -1,
    split: str | Sequence[str] | Mapping[str, int] = "even",
    schedule: str = "1f1b",
    virtual: int = 1,
    weights: Mapping[str, float] | None = None,
) -> Strategy:
    """Split the layers of a model over ranks, which work on different micro-batches at the same time.

    For models that do not fit on one device, over connections that are too slow for `fsdp` or `tensor`:
    only activations travel, once for each micro-batch. The loss function and the model stay as they are. Each
    stage runs the model's own forward. It passes over the blocks of other stages, and the loss is computed on
    the last one. `fa.accumulate(step, n)` says how many micro-batches there are.

    Args:
        degree: how many ranks a model is split over. -1 takes the ranks that are left.
        split: `"even"` counts blocks, the members of a `ModuleList` or `Sequential`. `"size"` counts
            parameters as a measure of operations: those of an embedding, which is looked up, count as none,
            and a head counts its weight also if that is tied. All experts of a layer count. A sequence
            of paths names the modules where stages begin: `("blocks.4", "blocks.9")`. A dict gives the stage
            of modules: `{"embed": 0, "blocks.0": 1}`. Blocks that it does not name are on the stage of the
            block before, other parameters on that of the module after them.
        schedule: `"1f1b"`, `"gpipe"`, `"interleaved"`, `"zero_bubble"`, or `"module:function"`, a function
            `(ranks, virtual, micro_batches)`. It lists for each rank its actions, forwards `("F", stage, i)`
            and backwards `("B", stage, i)`. In the place of "B" may stand "I", the gradients of inputs, and
            later "W", those of weights. The lists say where stages lie, too.
        virtual: how many stages each rank has. Rank r of p has the stages r, p + r, 2p + r, ..., and under
            `"zero_bubble"` the two stages r and 2p - 1 - r. More of them wait less, and send more. For all
            schedules but `"1f1b"`.
        weights: of `"embedding"` and `"head"`, the parameters before and after the blocks, if a block weighs
            1. Both weigh 1 by default. For `split="even"`.

    Raises:
        ArgumentError: a degree, a number of stages, a split or a schedule that can't be.

    Example:
        >>> strategy = fa.pipeline(2) * fa.fsdp(2)
        >>> print(fa.pipeline(4, split=("blocks.2", "blocks.4", "blocks.7"), schedule="gpipe"))
        pipeline(4, split=('blocks.2', 'blocks.4', 'blocks.7'), schedule='gpipe')
    """
    where = "fa.pipeline"
    check_degree(degree, where)
    require(
        type(virtual) is int and virtual >= 1,
        f"a rank can't have {virtual!r} stages",
        where,
        "virtual=1 or more",
    )
    require(
        virtual == 1 or schedule != "1f1b",
        f"schedule '1f1b' has one stage a rank, and virtual={virtual}",
        where,
        "schedule='interleaved'",
    )
    require(
        not isinstance(split, str) or split in ("even", "size"),
        f"split={split!r} says not where stages begin",
        where,
        '"even", "size", a sequence of paths, or a dict of stages by path',
    )
    require(
        virtual == 2 or schedule != "zero_bubble",
        f"schedule 'zero_bubble' has two stages a rank, and virtual={virtual}",
        where,
        "virtual=2",
    )
    schedule_of(schedule)
    cut: Any = split
    if isinstance(split, Mapping):
        cut = Pairs(split.items())
    elif not isinstance(split, str):
        cut = tuple(split)
    for name, weight in (weights or {}).items():
        require(
            name in ("embedding", "head") and isinstance(weight, int | float) and weight >= 0,
            f"weights has {name!r}: {weight!r}",
            where,
            'weights={"embedding": 1, "head": 1}, numbers from 0 on',
        )
    pairs = None if weights is None else Pairs(weights.items())
    return Strategy((Pipeline(degree, cut, schedule, virtual, pairs),))
