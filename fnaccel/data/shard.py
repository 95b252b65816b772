"""`shard`: a record of how a loader is shared between ranks, and the opening of one epoch of it.

`Shards` is a description that reads nothing. `open_epoch` binds it to a rank, a device and a
group and decides which reader serves the loader. The readers are `indexed.py`, `stream.py` and
`dispatch.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import attrs
import torch
import torch.distributed as dist

from fnaccel.data import lengths, loaders, order, windows
from fnaccel.data.batch import Batch, Window
from fnaccel.data.dispatch import dispatch as dispatched
from fnaccel.data.epoch import Reading, users_order
from fnaccel.data.indexed import open_indexed
from fnaccel.data.lengths import steps_per_epoch
from fnaccel.data.loaders import Indexed, Source, Stream
from fnaccel.data.placement import place
from fnaccel.data.presplit import open_presplit
from fnaccel.data.reader_ranks import Link
from fnaccel.data.same_data import check_same_data
from fnaccel.data.source_facts import check_unchanged, facts_of
from fnaccel.data.stream import open_stream
from fnaccel.errors import ArgumentError, LoaderError, UnknownNameError, nearest
from fnaccel.state import Position
from fnaccel.step.choices import Remainder, Sampling
from fnaccel.world import world as worlds
from fnaccel.world.mesh import Mesh, batch_ranks
from fnaccel.world.progress_marks import waiting
from fnaccel.world.world import World

if TYPE_CHECKING:
    from fnaccel.strategies.strategy import Strategy


@attrs.frozen(kw_only=True)
class Shards:
    """A loader and how ranks share it. `fa.shard` makes it, and `fa.scan` or your own loop reads it.

    Iterating reads from `start` to the end of that epoch, shared between all ranks of the world:
    `for batch in shards.at(state.data): ...`

    Attributes:
        loader: the source of batches.
        window: how many batches make one update together: a number, or a function of the step. None for
            batches one by one.
        across_epochs: whether a window may go over the end of an epoch.
        remainder: the treatment of a global batch that is not full.
        seed: the root seed of the sample order and of workers.
        per_rank: whether a batch of the loader is one rank's, not all ranks'.
        dispatch: whether rank 0 reads for all.
        presplit: whether each rank's loader holds that rank's part of the data only.
        shuffle: overrides the loader's sampler. None leaves it.
        sampling: `"poisson"` for batches in which each row is with one probability.
        prefetch: how many batches are copied to the device ahead of the one in use.
        device_placement: whether tensors are moved to the device at all.
        copies: whether batches of a stream are copied, since they wait while it is read on.
        rows_per_sample: how many rows the collate function makes of a sample.
        accept_changes: whether a position is taken up though the data has changed since it was saved.
        start: the position at which iteration begins.
        step: the step of the first window.
        mesh: whose `batch` axis shares the rows. None: all ranks of the world.
        kept: the persistent workers between epochs.

    Example:
        >>> shards = fa.shard(loader)
        >>> for batch in shards.at(state.data):
        ...     state, metrics = train_step(state, batch)
    """

    loader: Any
    window: windows.Size | None = None
    across_epochs: bool = False
    remainder: Remainder = "keep"
    seed: int = 0
    per_rank: bool = False
    dispatch: bool = False
    presplit: bool = False
    shuffle: bool | None = None
    sampling: Sampling | None = None
    prefetch: int = 1
    device_placement: bool = True
    copies: bool = True
    rows_per_sample: int = 1
    accept_changes: bool = False
    start: Position = attrs.field(factory=Position)
    step: int = 0
    mesh: Mesh | None = None
    kept: dict[str, Any] = attrs.field(factory=dict[str, Any], eq=False, repr=False)

    def at(self, position: Position, *, step: int = 0) -> Shards:
        """The same, beginning at a position: `shards.at(state.data)` goes on at the position of a state.

        Args:
            position: in the data.
            step: `state.step`, if the size of a window depends on it.

        Example:
            >>> state, metrics = train_step(state, next(iter(fa.shard(loader))))
            >>> len(list(fa.shard(loader).at(state.data)))  # 2 of the 3 batches are left
            2
        """
        return attrs.evolve(self, start=position, step=step)

    def on(self, mesh: Mesh) -> Shards:
        """The same, shared as a train step shares rows: `shards.on(train_step.mesh)` in a loop of your own.

        If ranks along an axis read the same rows, only this is right, and iterating without it raises.

        Example:
            >>> for batch in fa.shard(loader).on(train_step.mesh):
            ...     state, metrics = train_step(state, batch)
        """
        return attrs.evolve(self, mesh=mesh)

    def updates_per_epoch(
        self, strategy: Strategy | None = None, *, epochs: int = 1, world: World | None = None
    ) -> int:
        """The number of updates that an epoch makes, for the `total` of a schedule. Nothing is read.

        Args:
            strategy: of the train step, if its ranks do not all have rows of their own. By default all ranks
                of the world share each batch.
            epochs: count those of that many epochs, from the beginning of a run.
            world: the world, if none was started in this context.

        Raises:
            LoaderError: the length of the data is not known, as that of a stream.
            AxisProductError: the strategy does not fit the world.

        Example:
            >>> updates = fa.shard(loader).updates_per_epoch(epochs=10)
            >>> optimizer = fa.adamw(fa.warmup_cosine(3e-4, warmup=1, total=updates))
        """
        there = worlds.current(world)
        ranks = there.size if strategy is None else batch_ranks(strategy.degrees(), there.size, str(strategy))
        count = lengths.updates(self, ranks, epochs, across=self.across_epochs)
        if count is None:
            raise LoaderError(
                "the number of batches in an epoch is not known",
                where="shards.updates_per_epoch()",
                fix="count by steps: fa.scan(..., steps=) and schedules with a total of as many updates",
            )
        return count

    def __len__(self) -> int:
        """How many batches (or windows) iterating yields, on each rank of the world.

        Raises:
            TypeError: the length of the data is not known, as that of a stream.
        """
        there = worlds.find_current()
        ranks = 1 if there is None else there.size
        ranks = ranks if self.mesh is None else self.mesh.batch_size
        count = steps_per_epoch(self, ranks, start=self.start.samples, first=self.step)
        if count is None:
            raise TypeError("the number of batches is not known: fa.shard(...) has no length")
        return count

    def __bool__(self) -> bool:
        return True  # also if the length is 0, or not known

    def __iter__(self) -> Iterator[Batch | Window]:
        if self.across_epochs:
            raise ArgumentError(
                "windows go over the end of an epoch, and iterating ends there",
                where="for window in shards",
                fix="let fa.scan(train_step, state, shards, ...) read them",
            )
        world = worlds.current() if self.mesh is None else self.mesh.world
        world.resource(HandReads).any = True
        if self.mesh is None:
            _check_all_differ(world)
            batches = open_epoch(self, rank=world.rank, ranks=world.size, device=world.device)
        else:
            batches = open_on(self, self.mesh)
        nothing = True
        for batch in batches:
            nothing = False
            yield batch
        if nothing:
            raise LoaderError(
                f"nothing is left of epoch {self.start.epoch} after {self.start.samples} samples",
                where=f"shards.at({self.start})",
                fix=f"go on with shards.at(fa.state.Position({self.start.epoch + 1}))",
            )


class HandReads:
    """Whether a loop by hand has read batches of `fa.shard` in a world. Saves read it."""

    __slots__ = ("any",)

    def __init__(self, world: World) -> None:  # noqa: ARG002
        self.any = False

    def close(self, *, clean: bool) -> None:
        """Nothing is left open."""


def shard(
    loader: object,
    *,
    window: windows.Size | None = None,
    across_epochs: bool = False,
    remainder: Remainder | None = None,
    seed: int = 0,
    per_rank: bool = False,
    dispatch: bool = False,
    presplit: bool = False,
    shuffle: bool | None = None,
    sampling: Sampling | None = None,
    prefetch: int = 1,
    device_placement: bool = True,
    copies: bool = True,
    rows_per_sample: int = 1,
    accept_changes: bool = False,
) -> Shards:
    """Describe how ranks share a loader. Nothing is read yet.

    The order of samples is a function of (seed, epoch) alone, and the loader's batch is the
    *global* batch: it is cut by divmod, so that the same run on more ranks sees the same batches.
    All ranks get the same number of batches. A rank that has no row left gets rank 0's rows again
    with `valid=0`.

    Args:
        loader: a torch DataLoader of any kind, or any iterable of batches. Its dataset, collate
            function, workers and pinning are kept. A RandomSampler gives way to our own order.
            Any other sampler is iterated on rank 0, which sends its order. Its random draws follow
            from (seed, epoch), so that an epoch can be taken up again. An iterable is read
            whole by every rank and has to yield the same on all of them. A StatefulDataLoader that was
            given a place by `load_state_dict` raises: the position stands in the train state.
        window: yield `fa.data.Window`s of 1 to `window` batches, for one update of several. A function
            `step -> batches` makes a batch size that grows: `lambda step: 1 if step < 1000 else 4`.
        across_epochs: a window may go over the end of an epoch. Else the last of an epoch may be smaller.
        remainder: `"keep"` uses the rows of a last batch that is not full, `"drop"` leaves them
            out, `"wrap"` fills up from the beginning. By default `"drop"` if the loader has
            `drop_last=True`, else `"keep"`. A loss that calls collectives of torch needs `"drop"`.
        seed: the root seed of the order and of the workers' randomness.
        per_rank: a batch of the loader is one rank's. The global batch is `ranks` times as large.
        dispatch: rank 0 alone reads, and sends each rank its rows.
        presplit: each rank's loader holds that rank's part of the data only, as after
            `datasets.distributed.split_dataset_by_node` or with a DistributedSampler. Each rank reads its
            own, and a batch of the loader is one rank's. Parts may differ in length: `"keep"` runs ranks
            that have no row left on rows that do not count, `"drop"` ends with the shortest part, `"wrap"`
            begins a part again until the longest has ended. A position can be taken up on the same number
            of ranks only, and is reached by reading.
        shuffle: True or False overrides the sampler of a map-style loader.
        sampling: `"poisson"` draws each batch anew: a row is in it with the probability `batch_size / rows`,
            whatever else is. `fa.epsilon` counts on that. Batches differ in size, and an epoch has as many as
            if they did not. `fa.evaluate` still reads each row once. Keep `seed` secret then.
        prefetch: how many batches are read, and their copies to an accelerator begun, ahead of the one in
            use. 0 for none. The CPU copies nothing.
        device_placement: False leaves tensors where the loader made them.
        copies: copy each batch of an iterable, or of a DataLoader with `batch_size=None`: it waits while the
            next one is read, and may lie in a buffer that is filled again. False: yours does not. Batches
            that a DataLoader collates are not copied: a `collate_fn` makes new tensors each time.
        rows_per_sample: how many rows the collate function makes of a sample, such as 2 of a chosen and a
            rejected answer. Row `i` is of sample `i % samples`, as in `torch.cat([chosen, rejected])`. Ranks
            and micro-batches get whole samples in the same layout.
        accept_changes: take up the position of a checkpoint in the middle of an epoch though the number of
            samples or their order has changed since then: some samples come twice then, or not at all.

    Raises:
        UnknownNameError: no such remainder or sampling.
        ArgumentError: a window or rows_per_sample below 1, a prefetch below 0, two of dispatch, per_rank and
            presplit, several rows a sample with `"wrap"`, or an option that sampling has no use for.
        LoaderError: not iterable, empty, split between ranks already (see presplit), can't be shuffled or
            sampled, or has a place of its own.

    Example:
        >>> shards = fa.shard(DataLoader(dataset, batch_size=4, shuffle=True), seed=1)
        >>> for state, metrics in fa.scan(train_step, state, shards):
        ...     pass
    """
    where = "shard(loader)"
    if remainder is not None:
        order.check_remainder(remainder, where)
    if window is not None:
        windows.check(window)
    if across_epochs and window is None:
        raise ArgumentError(
            "across_epochs=True is about windows, and there are none", where=where, fix="pass window=, too"
        )
    if prefetch < 0:
        raise ArgumentError(
            f"prefetch={prefetch} batches can't be read ahead",
            where=where,
            fix="pass how many, or 0 for none",
        )
    if rows_per_sample < 1 or (rows_per_sample > 1 and remainder == "wrap"):
        raise ArgumentError(
            f"rows_per_sample={rows_per_sample} with remainder={remainder!r}",
            where=where,
            fix='pass 1 row or more of a sample, and remainder="keep" or "drop" if they are several',
        )
    if dispatch and per_rank:
        raise ArgumentError(
            "with dispatch=True a batch is cut between ranks, with per_rank=True it is one rank's",
            where=where,
            fix="leave per_rank out, and give each batch the rows of all ranks: "
            f"batch_size={getattr(loader, 'batch_size', None) or 'n'} * world.size",
        )
    if presplit and (dispatch or per_rank):
        raise ArgumentError(
            "with presplit=True each rank reads a loader of its own, and a batch of it is that rank's",
            where=where,
            fix=f"leave {'dispatch' if dispatch else 'per_rank'} out",
        )
    source = loaders.classify(loader, presplit=presplit)
    if shuffle is not None and presplit and loaders.splits(getattr(loader, "sampler", None)):
        raise LoaderError(
            f"shuffle={shuffle} would replace the sampler that splits the data",
            where=where,
            fix="leave shuffle out, and let the sampler shuffle",
        )
    ordered = isinstance(source, Indexed) or (isinstance(source, Stream) and source.sampler is not None)
    if shuffle is not None and not ordered:
        raise LoaderError(
            f"shuffle={shuffle} can't change the order in which a {type(loader).__name__} makes batches",
            where=where,
            fix="leave shuffle out, and shuffle when the batches are made",
        )
    if sampling is not None:
        others = {"window": window, "shuffle": shuffle, "presplit": presplit or None, "remainder": remainder}
        _check_sampling(sampling, source, others)
    return Shards(
        loader=loader,
        window=window,
        across_epochs=across_epochs,
        remainder=remainder or ("drop" if source.drop_last else "keep"),
        seed=seed,
        per_rank=per_rank,
        dispatch=dispatch,
        presplit=presplit,
        shuffle=shuffle,
        sampling=sampling,
        prefetch=int(prefetch),
        copies=copies,
        rows_per_sample=rows_per_sample,
        device_placement=device_placement,
        accept_changes=accept_changes,
    )


def _check_sampling(sampling: str, source: Source, others: dict[str, Any]) -> None:
    """Raise if batches can't be drawn, or another option would make them depend on each other."""
    where = f"fa.shard(loader, sampling={sampling!r})"
    if sampling not in get_args(Sampling):
        raise UnknownNameError(
            f"there is no sampling {sampling!r}", where=where, fix=nearest(str(sampling), get_args(Sampling))
        )
    if not isinstance(source, Indexed) or loaders.order_of(source.sampler) is None:
        raise LoaderError(
            "only rows of a map-style data set can be drawn, from a loader with a batch size",
            where=where,
            fix="DataLoader(dataset, batch_size=n), without sampler= and batch_sampler=",
        )
    if others["remainder"] != "wrap":
        del others["remainder"]
    for name, value in others.items():
        if value is not None:
            raise ArgumentError(
                f"{name}={value!r} is about rows that are read in turn, and here each batch is drawn anew",
                where=where,
                fix=f"leave {name} out",
            )


def _check_all_differ(world: World) -> None:
    """Raise ArgumentError if ranks of a train step are to read the same rows."""
    for mesh in world.open_meshes():
        if mesh.batch_size != world.size:
            raise ArgumentError(
                f"a train step of {world.size} ranks shares the rows in {mesh.batch_size} parts "
                f"({mesh.degrees}), and this loop would give each rank other rows",
                where="for batch in shards",
                fix="for batch in shards.on(train_step.mesh), or fa.scan(train_step, state, shards)",
            )


def open_on(shards: Shards, mesh: Mesh, *, remainder: Remainder | None = None) -> Iterator[Batch | Window]:
    """Read this rank's part, as the `batch` axis of a mesh shares rows. See `open_epoch`."""
    return open_epoch(
        shards,
        rank=mesh.batch_rank,
        ranks=mesh.batch_size,
        device=mesh.world.device,
        group=mesh.group("batch"),
        remainder=remainder,
    )


def open_epoch(
    shards: Shards,
    *,
    rank: int,
    ranks: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    remainder: Remainder | None = None,
) -> Iterator[Batch | Window]:
    """Read one rank's part from `shards.start` to the end of that epoch.

    Every rank gets the same number of batches. Each carries the position after it. That of the last
    batch is the beginning of the next epoch. Nothing is yielded if nothing is left.

    Args:
        shards: the data to read.
        rank, ranks: which part, of how many (the `batch` axis of a mesh).
        device: the device of tensors.
        group: the ranks' process group. By default the world's, if one runs and has `ranks` ranks.
        remainder: replaces that of `shards` (`fa.evaluate` keeps every row).

    Raises:
        LoaderError: while reading: the loader is empty, or its batches can't be cut.
        ArgumentError: dispatch without a process group to send over.
    """
    if group is None and ranks > 1 and dist.is_initialized() and dist.get_world_size() == ranks:
        group = dist.group.WORLD
    world = worlds.find_current()
    if group is dist.group.WORLD and world is not None:
        group = world.groups.data or group
    link = Link(rank=rank, ranks=ranks, device=device, group=group if ranks > 1 else None)
    reading = Reading(
        shards=shards,
        epoch=shards.start.epoch,
        start=shards.start.samples,
        remainder=remainder or shards.remainder,
        seed=shards.seed,
    )
    if shards.dispatch:
        if ranks > 1 and link.group is None:
            raise ArgumentError(
                f"dispatch=True sends rows to {ranks} ranks, and no process group joins them",
                where="shard(loader, dispatch=True)",
                fix="read inside `with fa.start():`, or pass group=",
            )
        alone = Link(rank=0, ranks=1, device=device)
        batches = dispatched(_lazily(shards, reading, alone) if rank == 0 else None, link)
    else:
        batches = _lazily(shards, reading, link)
    placed = place(batches, device, prefetch=shards.prefetch) if shards.device_placement else batches
    if shards.window is not None and not shards.across_epochs:
        placed = in_windows(shards, placed, shards.step)
    return waiting(placed)


def in_windows(shards: Shards, batches: Iterator[Any], step: int) -> Iterator[Window]:
    """Batches of shards in their windows.

    Args:
        shards: have a window.
        batches: read one after the other, maybe over the end of an epoch.
        step: of the first window.
    """
    return windows.grouped(batches, shards.window or 1, step)


def _lazily(shards: Shards, reading: Reading, link: Link) -> Iterator[Batch]:
    """Look at the loader when the first batch is asked for: then dispatch can pass an error on."""
    source = loaders.classify(shards.loader, presplit=shards.presplit)
    loaders.announce(source, reading.epoch)
    if not shards.presplit:  # then each rank has a sampler of its own
        reading = attrs.evolve(reading, order=users_order(source, reading, link))
    facts = facts_of(source, reading)
    check_unchanged(facts, reading, link, presplit=shards.presplit, accepts=shards.accept_changes)
    reading = attrs.evolve(reading, source=facts)
    if shards.presplit:
        loaders.check_part(shards.loader, link.rank, link.ranks)
        yield from open_presplit(partial(_open, source), reading, link)
        return
    check_same_data(source.loader, reading, link)
    yield from _open(source, reading, link)


def _open(source: Source, reading: Reading, link: Link) -> Iterator[Batch]:
    return (open_stream if isinstance(source, Stream) else open_indexed)(source, reading, link)  # pyright: ignore[reportArgumentType]
