"""Facts about a loader that give a position its meaning, and whether they have changed since a save.

A position counts the samples of an epoch that were used, in the order of that epoch. In another order it
names other samples.
"""

from __future__ import annotations

import contextlib
import json
import logging
import zlib
from collections.abc import Mapping
from itertools import chain
from typing import Any

from fnaccel.data import loaders
from fnaccel.data.epoch import Reading
from fnaccel.data.loaders import Grouped, Indexed, Source
from fnaccel.data.reader_ranks import Link
from fnaccel.errors import LoaderError
from fnaccel.world.world import find_current

Facts = Mapping[str, Any]
"""Plain data by name, as a checkpoint holds it. What is not known is absent."""

_LOG = logging.getLogger("fnaccel")


def facts_of(source: Source, reading: Reading) -> dict[str, Any]:
    """The facts of a loader. Only lengths are asked for, and the order of a sampler that was made before.

    Returns:
        Such as `{"samples": 12, "shuffled": True, "seed": 0, "batch_size": 4}`.
    """
    facts: dict[str, Any] = {}
    stock = loaders.order_of(source.sampler) if isinstance(source, Indexed) else None
    if stock is not None:
        samples, shuffled = stock
        shards = reading.shards
        facts |= {"samples": samples, "shuffled": shuffled if shards.shuffle is None else shards.shuffle}
        if shards.sampling is not None:  # without the seed, which tells whose rows were in which batch
            facts["shuffled"] = shards.sampling
        elif facts["shuffled"]:
            facts["seed"] = reading.seed
    with contextlib.suppress(TypeError, ValueError):  # samples that are no numbers and no strings
        if reading.order is not None:
            flat = chain.from_iterable(reading.order) if isinstance(source, Grouped) else reading.order
            facts["order"] = f"{zlib.crc32(json.dumps(list(flat), default=int).encode()):08x}"
    if not isinstance(source, Grouped) and source.batch_size is not None:
        facts["batch_size"] = source.batch_size
    return facts


def saved_at(reading: Reading) -> Facts:
    """Facts about the run that saved a position in the middle of an epoch. Empty if none was restored."""
    world = find_current() if reading.start else None
    return {} if world is None else world.saved_by.get((reading.epoch, reading.start), {})


def check_unchanged(facts: Facts, reading: Reading, link: Link, *, presplit: bool, accepts: bool) -> None:
    """See that a restored position in the middle of an epoch means here what it meant where it was saved.

    Args:
        facts: of the loader.
        reading: which epoch, and where it begins.
        link: rank 0 logs a change that harms nothing.
        presplit: whether each rank has a part of its own: then positions count by the size of a batch.
        accepts: whether the user accepts another meaning.

    Raises:
        LoaderError: the order of the samples, or their number, is another one. On every rank.
    """
    saved: Facts | None = saved_at(reading).get("data")
    if saved is None:
        return
    known = [name for name in facts if name in saved]
    changed = {name: (saved[name], facts[name]) for name in known if saved[name] != facts[name]}
    if not changed:
        return
    text = ", ".join(f"{name} was {old} and is {new}" for name, (old, new) in changed.items())
    in_order = {"shuffled", "seed"}.isdisjoint(changed) and not facts.get("shuffled")
    harmless = {"batch_size"} if not presplit else set[str]()
    if in_order:
        harmless.add("samples")  # rows that were appended, or that a smaller set lacks at its end
    if accepts or harmless.issuperset(changed):
        if link.rank == 0:
            _LOG.warning("the data is not that of the checkpoint: %s", text)
        return
    also = ", with a sampler that draws from a generator in its attributes" if "order" in changed else ""
    raise LoaderError(
        f"the position of {reading.start} samples was saved with other data: {text}",
        where=f"epoch {reading.epoch} of shard(loader)",
        fix=f"go on with the data of before{also}; or begin at fa.state.Position({reading.epoch + 1}); or "
        "let some samples come twice, or not at all: fa.shard(loader, accept_changes=True)",
    )
