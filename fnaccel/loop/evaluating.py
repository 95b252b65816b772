"""`evaluate`: metrics over all of a data set."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import attrs

from fnaccel.collectives import gather_objects
from fnaccel.collectives.signature import meet
from fnaccel.data import Shards, open_on, steps_per_epoch
from fnaccel.data.cut import shapes_of
from fnaccel.engine.same_rows import checksum
from fnaccel.engine.scoring import Scores
from fnaccel.errors import ArgumentError, FnaccelError
from fnaccel.loop.progress import open_bar, ticking
from fnaccel.loop.scanning import check_shards
from fnaccel.program.train_step import TrainStep
from fnaccel.state import Position, TrainState, check_ema, check_state, lease_of
from fnaccel.step.loss_info import takes_info
from fnaccel.tree import Tree
from fnaccel.world.every_rank import every_rank


@every_rank
def evaluate(
    train_step: TrainStep,
    state: TrainState,
    metric_fn: Callable[[Any, Any], Any],
    shards: Shards,
    *,
    ema: bool = False,
    progress: bool = False,
) -> Any:
    """Metrics over all of a data set: every row counts once, whatever the ranks and the remainder.

    Totals of an `fa.Mean` are not checked: `train_step.check_totals(state, metric_fn, batch)` does that.

    Args:
        train_step: whose model is evaluated (in evaluation mode, without gradients).
        state: its live state. Nothing is donated.
        metric_fn: `metric_fn(model, batch) -> pytree` of `fa.Mean`, `fa.Sum`, `fa.Concat` (rows in
            the order of the samples). A bare scalar is averaged over rows. If it has a parameter `info`, it
            gets an `fa.LossInfo`, whose rows are places in the whole data set.
        shards: the result of `fa.shard`. Its remainder rule gives way to `"keep"`.
        ema: use the averaged parameters of `with_ema`, and averaged buffers if it has them.
        progress: show a bar on rank 0.

    Returns:
        The pytree of `metric_fn`, combined. It is equal on all ranks.

    Raises:
        LoaderError: no data.
        ArgumentError: `ema` without `with_ema`, or not shards. Or ranks train apart, and don't hold the same
            values after this step, nor an anchor. Or they keep their own buffers
            (`fa.ddp(sync_buffers=False)`), which differ.
        LossError: `fa.Concat`, if the ranks of one row each have a part of it.

    Example:
        >>> def score(model, batch):
        ...     right = model(batch["tokens"]).argmax(-1) == batch["labels"]
        ...     return {"accuracy": fa.Mean(right.sum(), weight=right.numel())}
        >>> scores = fa.evaluate(train_step, state, score, fa.shard(loader))
        >>> 0 <= float(scores["accuracy"]) <= 1
        True
    """
    check_shards(shards, "fa.evaluate")
    check_state(state, "fa.evaluate")
    if ema:
        check_ema(state, "fa.evaluate(ema=True)")
    layout = train_step.engine.layout
    same_at = layout.whole_from(state.step)
    if same_at != state.step and (ema or layout.read_between is None):
        raise ArgumentError(
            f"after step {state.step} each rank holds values of its own, and one score would mix them",
            where="fa.evaluate",
            fix=f"evaluate after step {same_at}, or score this rank's with train_step.look",
        )
    meet("fa.evaluate", train_step.mesh.world)
    scores = Scores(train_step.mesh)
    scored: Callable[..., Any] = train_step.as_loss(metric_fn)
    every = attrs.evolve(shards, window=None, across_epochs=False, sampling=None)
    # not in the stack: an interrupt between `averaged` and the stack's note of it would leave averages
    owner = lease_of(state, "fa.evaluate", averaged=True).owner
    values = train_step.averaged(state) if ema else owner.evaluation_point()
    with values or contextlib.nullcontext(), contextlib.ExitStack() as stack:
        _check_buffers(train_step, state)
        stack.enter_context(train_step.evaluating())
        batches: Iterator[Any] = open_on(every.at(Position()), train_step.mesh, remainder="keep")
        if progress and train_step.mesh.world.is_main:
            bar = stack.enter_context(open_bar(steps_per_epoch(every, train_step.mesh.batch_size), 0))
            batches = ticking(batches, bar)
        before = 0
        informed = takes_info(metric_fn)
        for batch in batches:
            fn: Callable[..., Any] = scored
            if informed:
                placed = attrs.evolve(batch, first=None if batch.first is None else before + batch.first)
                fn = functools.partial(scored, info=train_step.loss_info(state, placed))
                before += batch.together
            scores.take(_scored(train_step, state, fn, batch.data), batch)
    return scores.finish()


def _scored(train_step: TrainStep, state: TrainState, fn: Callable[..., Any], data: Tree) -> Any:
    """What a metric function returns for a batch. A note to its error names the batch."""
    try:
        return train_step.look(state, fn, data)
    except Exception as error:
        if not isinstance(error, FnaccelError):
            rank = train_step.mesh.world.rank
            error.add_note(f"in fa.evaluate on rank {rank}, whose batch is {shapes_of(data)}")
        raise


def _check_buffers(train_step: TrainStep, state: TrainState) -> None:
    """Raise ArgumentError on all ranks if they keep their own buffers, and the saved ones differ."""
    layout, group = train_step.engine.layout, train_step.mesh.group("loss")
    same_at = layout.whole_from(state.step)
    if group is None or (layout.shares_buffers and same_at == state.step):
        return
    transient = lease_of(state, "fa.evaluate", averaged=True).owner.instance.transient()
    digest = checksum({name: value for name, value in layout.buffers.items() if name not in transient})
    if len(set(gather_objects(digest, over=group))) > 1:
        raise ArgumentError(
            "each rank holds buffers of its own, such as running statistics, and one score would mix them",
            where="fa.evaluate",
            fix=f"evaluate after step {same_at}; or score this rank's with train_step.look"
            if same_at != state.step
            else "leave out sync_buffers=False; or give all ranks the same first, such as the mean of "
            "fa.reduce(value, 'mean'); or score this rank's with train_step.look",
        )
