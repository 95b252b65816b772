"""`evaluate`: metrics over all of a data set. `Evaluation`: during `fa.scan`, with the best checkpoints."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs

from fnaccel import tree
from fnaccel.checkpoint.disk.publish import checkpoints
from fnaccel.checkpoint.disk.retention import Best, Metrics, Mode, finite, metrics_of
from fnaccel.collectives import gather_objects
from fnaccel.collectives.objects import broadcast_objects
from fnaccel.collectives.signature import meet
from fnaccel.data import Batch, Shards, Window, open_on, steps_per_epoch
from fnaccel.data.cut import shapes_of
from fnaccel.engine.same_rows import checksum
from fnaccel.engine.scoring import Scores
from fnaccel.errors import ArgumentError, FnaccelError, nearest, require, require_counts
from fnaccel.loop.progress import open_bar, ticking
from fnaccel.program.train_step import TrainStep
from fnaccel.state import Position, TrainState, check_ema, check_state, lease_of
from fnaccel.step.loss_info import takes_info
from fnaccel.tree import Tree
from fnaccel.world.every_rank import every_rank

Steps = Generator[tuple[TrainState, dict[str, Any]]]
"""The steps of a loop: each state and its metrics."""

Every = int | Literal["epoch"]
"""After so many steps, or after each epoch."""

_logger = logging.getLogger("fnaccel")


@attrs.frozen
class Work:
    """The part of `fa.scan` around each batch. Its arguments explain the fields.

    Attributes:
        began, epoch: the step and the epoch at which the loop began.
    """

    train_step: TrainStep
    given: Mapping[str, Any] | None = None
    before: Callable[[TrainState, Batch], Any] | None = None
    after: Callable[[TrainState, dict[str, Any], Any], TrainState] | None = None
    updates_per_batch: int = 1
    began: int = 0
    epoch: int = 0

    def prepared(self, state: TrainState, batch: Batch | Window) -> Batch | Window:
        """The batch that is trained on."""
        if self.before is None:
            return batch
        if isinstance(batch, Window):
            return Window(self.prepared(state, each) for each in batch)
        made = self.before(state, batch)
        require(made is not None, "before returned None", "fa.scan(before=)", "return batch.replace(data)")
        return made if isinstance(made, Batch) else batch.replace(made)

    def update(self, state: TrainState, batch: Batch | Window) -> tuple[TrainState, dict[str, Any]]:
        """One update."""
        if self.given is None:
            state, metrics = self.train_step(state, batch)
        else:
            state, metrics = self.train_step(state, batch, given=self.given)
        if self.after is not None:
            state = self.after(state, metrics, batch)
            lease_of(state, "the result of after(state, metrics, batch) of fa.scan")
        return state, metrics

    def batch_ended(self, state: TrainState) -> bool:
        """Whether all updates of a batch are made."""
        return (state.step - self.began) % self.updates_per_batch == 0

    def is_whole(self, state: TrainState) -> bool:
        """Whether all updates of a batch are made, and all ranks hold the same values."""
        return self.batch_ended(state) and self.train_step.engine.layout.whole_from(state.step) == state.step


def check_every(where: str, every: Any, *, needed: bool = False) -> None:
    """Raise ArgumentError unless `every` is a number of steps, "epoch" or, if not `needed`, None."""
    right = every == "epoch" or (type(every) is int and every >= 1) or (every is None and not needed)
    require(right, f"every={every!r}", where, 'every is 1 or more, or "epoch"')


class Turns:
    """The steps after which something is done that is done so often. A window may end in the next epoch.

    Args:
        every: how often. None: never.
        work: of the loop.
    """

    def __init__(self, every: Every | None, work: Work) -> None:
        self._every, self._work, self._epoch = every, work, work.epoch

    def come(self, state: TrainState) -> bool:
        """Whether it is done after the step of this state."""
        if not isinstance(self._every, str):
            return self._every is not None and state.step % self._every == 0
        epoch, before = state.data.epoch, self._epoch
        if self._work.batch_ended(state):
            self._epoch = epoch
        return self._epoch != before


def check_shards(shards: Any, where: str) -> None:
    """Raise ArgumentError for anything but shards."""
    if not isinstance(shards, Shards):
        raise ArgumentError(
            f"a {type(shards).__name__} says nothing of how ranks share it",
            where=where,
            fix="fa.shard(loader)",
        )


@every_rank
def evaluate(
    train_step: TrainStep,
    state: TrainState,
    metric_fn: Callable[[Any, Any], Any],
    shards: Shards,
    *,
    ema: bool = False,
    limit: int | None = None,
    progress: bool | str = False,
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
        limit: read this many batches and no more.
        progress: show a bar on rank 0. A text is its title, and the bar goes when it is done.

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
            total = steps_per_epoch(every, train_step.mesh.batch_size)
            total = limit if total is None else min(total, limit or total)
            title = progress if isinstance(progress, str) else None
            batches = ticking(batches, stack.enter_context(open_bar(total, 0, title=title)))
        before = 0
        informed = takes_info(metric_fn)
        for batch in itertools.islice(batches, limit):
            fn: Callable[..., Any] = scored
            if informed:
                placed = attrs.evolve(batch, first=None if batch.first is None else before + batch.first)
                fn = functools.partial(scored, info=train_step.loss_info(state, placed))
                before += batch.together
            scores.take(_scored(train_step, state, fn, batch.data), batch)
    return scores.finish()


@attrs.frozen
class Evaluation:
    """Evaluation during `fa.scan`, by `fa.evaluate`: its schedule, the best checkpoints, and early stopping.

    Each metric is yielded, logged and saved as `name/metric`, such as `eval/loss`. A result that is no
    mapping is called `loss`.

    With `save=`, an evaluation that is among the best so far saves that step, and the best checkpoints stay
    beside the newest: see `fa.checkpoint.best`. The best values and the patience left are in each
    checkpoint, so that a resumed run decides as if it had not been interrupted, on any number of ranks.

    Attributes:
        metric_fn: `metric_fn(model, batch) -> pytree`, as for `fa.evaluate`. A loss function is one.
        shards: the result of `fa.shard`.
        every: steps between two evaluations, or `"epoch"`: after each. Replicas that train apart are
            evaluated after their next average.
        name: of this evaluation.
        ema: use the averages of `with_ema`.
        best: the metric that decides which checkpoints are the best, and when training ends.
        mode: whether its best value is the smallest, `"min"`, or the largest, `"max"`.
        keep_best: how many of the best checkpoints stay.
        patience: end the loop after so many evaluations in a row that did not improve `best`. None: never. A
            value that is NaN is no improvement.
        min_delta: by how much a value has to be better to be an improvement.
        limit: evaluate on this many batches and no more.
        first: evaluate before the first step of a run, too. That is logged, and decides nothing.

    Raises:
        ArgumentError: no shards, bad counts, or `patience` without `best`.

    Example:
        >>> def score(model, batch):
        ...     right = model(batch["tokens"]).argmax(-1) == batch["labels"]
        ...     return {"accuracy": fa.Mean(right.sum(), weight=right.numel())}
        >>> val = fa.Evaluation(score, fa.shard(loader), best="accuracy", mode="max", patience=3)
        >>> for state, metrics in fa.scan(train_step, state, fa.shard(loader), evaluate=val, save="runs/gpt"):
        ...     pass
        >>> "eval/accuracy" in metrics, fa.checkpoint.best("runs/gpt").name
        (True, 'step-0000000003')
    """

    metric_fn: Callable[[Any, Any], Any]
    shards: Shards
    every: Every = attrs.field(default="epoch", kw_only=True)
    name: str = attrs.field(default="eval", kw_only=True)
    ema: bool = attrs.field(default=False, kw_only=True)
    best: str | None = attrs.field(default=None, kw_only=True)
    mode: Mode = attrs.field(default="min", kw_only=True)
    keep_best: int = attrs.field(default=1, kw_only=True)
    patience: int | None = attrs.field(default=None, kw_only=True)
    min_delta: float = attrs.field(default=0.0, kw_only=True)
    limit: int | None = attrs.field(default=None, kw_only=True)
    first: bool = attrs.field(default=False, kw_only=True)

    def __attrs_post_init__(self) -> None:
        where = "fa.Evaluation"
        check_shards(self.shards, where)
        check_every(where, self.every, needed=True)
        require_counts(where, patience=self.patience, limit=self.limit)
        self.kept_by.check(where)
        require(
            self.patience is None or self.best is not None,
            f"patience={self.patience} without best=, which says what has to improve",
            where,
            'best="loss"',
        )

    @property
    def kept_by(self) -> Best:
        """The metric that chooses the best checkpoints: the loss, if `best` is None."""
        return Best(f"{self.name}/{self.best or 'loss'}", self.mode, self.keep_best)


Evaluate = Evaluation | Iterable[Evaluation] | None
"""The values of `fa.scan(evaluate=)`."""


@attrs.define
class _Decided:
    """The decisions by the evaluations of one record, so far.

    Attributes:
        best: the value that has to be improved.
        kept: the values of the best checkpoints.
        since: evaluations since the last improvement.
        due: whether one is due, and waits until ranks hold the same values.
    """

    best: float | None = None
    kept: list[float] = attrs.field(factory=list)
    since: int = 0
    due: bool = False

    def take(self, value: float, record: Evaluation) -> bool:
        """Take the value of one evaluation. Returns whether its checkpoint is one of the best."""
        best, self.since = record.kept_by, self.since + 1
        if not math.isfinite(value):
            return False
        if self.best is None or best.better(value, self.best, by=record.min_delta):
            self.best, self.since = value, 0
        full = len(self.kept) == best.keep
        if full and not best.better(value, self.kept[-1]):
            return False
        self.kept = sorted([*self.kept, value], reverse=record.mode == "max")[: best.keep]
        return True


class Evaluations:
    """The evaluations of one loop.

    Args:
        work: of the loop.
        evaluate: the records.
        directory: of the checkpoints of the loop, if it has one.
        shown: whether this rank shows a bar.

    Attributes:
        records: by name.
        work: as it was given.
        found: the metrics that were found after the step at which the loop is. Empty if none were.
        to_save: whether they are among the best, so that this step is saved.
        log: writes metrics of a step to trackers. Set by the loop that has some.

    Raises:
        ArgumentError: no records, or two of one name.
    """

    def __init__(self, work: Work, evaluate: Evaluate, directory: Path | None, shown: bool) -> None:
        given: tuple[Evaluation, ...] = ()
        if evaluate is not None:
            given = tuple(evaluate) if isinstance(evaluate, Iterable) else (evaluate,)
        where = "fa.scan(evaluate=)"
        for record in given:
            require(
                isinstance(record, Evaluation),  # pyright: ignore[reportUnnecessaryIsInstance]
                f"a {type(record).__name__} says nothing of when to evaluate",
                where,
                "fa.Evaluation(metric_fn, fa.shard(loader), every=100)",
            )
        self.records = {record.name: record for record in given}
        twice = len(self.records) < len(given)
        require(not twice, "two evaluations have one name", where, 'fa.Evaluation(..., name="test")')
        self.found: dict[str, Any] = {}
        self.to_save = False
        self.log: Callable[[int, Mapping[str, Any]], object] | None = None
        self.work, self._train_step = work, work.train_step
        self._directory, self._shown = directory, shown
        self._decided = {name: _Decided() for name in self.records}
        self._turns = {name: Turns(record.every, work) for name, record in self.records.items()}
        self._step = -1

    def metrics(self, step: int) -> Metrics | None:
        """The metrics and decisions that a checkpoint of this step keeps. None without evaluations."""
        if not self.records:
            return None
        numbers = self.found if step == self._step else {}
        values = {name: finite(x, name, "fa.scan") for name, x in numbers.items() if isinstance(x, float)}
        best = tuple(record.kept_by for record in self.records.values() if record.best is not None)
        return Metrics(values, best, {name: attrs.asdict(each) for name, each in self._decided.items()})

    def run(self, steps: Steps, state: TrainState) -> Steps:
        """Pass steps on, with the metrics of evaluations, until the patience of one is at its end."""
        self._resume(state.step)
        with contextlib.closing(steps):
            if state.step == 0:
                self._first(state)
            if self._ended(state.step):
                return
            for state, metrics in steps:
                self._evaluate(state)
                metrics.update(self.found)
                yield state, metrics
                if self._ended(state.step):
                    return
            left = [name for name, decided in self._decided.items() if decided.due]
            if left and self._train_step.mesh.world.is_main:
                _logger.warning(
                    "the loop ended before its ranks were the same: no last %s", " and ".join(left)
                )

    def _resume(self, step: int) -> None:
        """Take the decisions in the checkpoint of this step."""
        if self._directory is None or step == 0:
            return
        world, saved = self._train_step.mesh.world, Metrics()
        if world.is_main:
            paths = [each.path for each in checkpoints(self._directory) if each.step == step]
            saved = metrics_of(paths[0]) if paths else saved
        saved = broadcast_objects(saved, world=world)
        kinds = {(best.metric, best.mode) for best in saved.best}
        for name, decided in saved.evaluations.items():
            record = self.records.get(name)
            # decisions by another metric say nothing of this one
            if record is not None and (record.kept_by.metric, record.mode) in kinds:
                self._decided[name] = _Decided(**decided)

    def _first(self, state: TrainState) -> None:
        found = [self._metrics_of(state, record) for record in self.records.values() if record.first]
        for metrics in found:
            if self.log is not None:
                self.log(state.step, metrics)

    def _evaluate(self, state: TrainState) -> None:
        """Do the evaluations that are due after the step of this state."""
        self.found, self.to_save, self._step = {}, False, state.step
        whole = self.work.is_whole(state)
        for name, record in self.records.items():
            decided = self._decided[name]
            decided.due = self._turns[name].come(state) or decided.due
            if decided.due and whole:
                decided.due = False
                found = self._metrics_of(state, record)
                self.found |= found
                if record.best is not None:
                    metric = record.kept_by.metric
                    if not isinstance(found.get(metric), float):
                        there = [key[len(name) + 1 :] for key, x in found.items() if isinstance(x, float)]
                        fix = nearest(record.best, there) if there else "return one from the metric function"
                        raise ArgumentError(
                            f"the evaluation has no number {metric!r}",
                            where="fa.Evaluation(best=)",
                            fix=f"{fix}; or compute it in the loop, for fa.save(metrics=, best=)",
                        )
                    self.to_save = decided.take(found[metric], record) or self.to_save

    def _metrics_of(self, state: TrainState, record: Evaluation) -> dict[str, Any]:
        title = record.name if self._shown else False
        result = evaluate(
            self._train_step,
            state,
            record.metric_fn,
            record.shards,
            ema=record.ema,
            limit=record.limit,
            progress=title,
        )
        named = {f"{record.name}/{path or 'loss'}": value for path, value in tree.items(result)}
        return {name: _number(value) for name, value in named.items()}

    def _ended(self, step: int) -> bool:
        """Whether the patience of an evaluation is at its end. Rank 0 says so."""
        for name, record in self.records.items():
            decided = self._decided[name]
            if record.patience is not None and decided.since >= record.patience:
                if self._train_step.mesh.world.is_main:
                    _logger.warning(
                        "training ends after step %d: %s has not improved on %s in %d evaluations",
                        step,
                        record.kept_by.metric,
                        "any number" if decided.best is None else f"{decided.best:.6g}",
                        decided.since,
                    )
                return True
        return False


def _number(value: Any) -> Any:
    """A scalar as a float. Other results, such as rows, are returned unchanged."""
    return float(value) if getattr(value, "shape", None) == () or isinstance(value, int | float) else value


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
