"""Whether all ranks built the same model."""

from __future__ import annotations

import zlib

from fnaccel.collectives import gather_objects
from fnaccel.errors import PlanMismatchError
from fnaccel.models.building import Built
from fnaccel.world.world import World


def check_alike(built: Built, world: World) -> None:
    """Compare names, shapes and dtypes of parameters and buffers over ranks.

    Raises:
        PlanMismatchError: they differ. Every rank raises, and lists its differences from rank 0.
    """
    if world.size == 1:
        return
    signature = {
        name: f"{list(built.cuts[name].shape if name in built.cuts else value.shape)} {value.dtype}"
        for what in ("parameters", "buffers")
        for name, value in built.named(what)
    }
    digest = zlib.crc32(repr(list(signature.items())).encode())
    if len(set(gather_objects(digest, world=world))) == 1:
        return
    signatures: list[dict[str, str]] = gather_objects(signature, world=world)
    first = signatures[0]
    rank, other = next(
        (rank, other) for rank, other in enumerate(signatures) if list(other.items()) != list(first.items())
    )
    names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    listed = "; ".join(
        f"{name}: {first.get(name, 'missing')} and {other.get(name, 'missing')}" for name in names[:5]
    )
    raise PlanMismatchError(
        f"ranks 0 and {rank} built different models: {listed or 'in another order'}",
        where="train_step.init",
        fix="build the same model on every rank; its values may differ, and are those of rank 0",
    )
