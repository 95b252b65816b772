"""Whether ranks hold the same map-style data: a part that was cut off on each rank has no mark.

`split_dataset_by_node` of a map-style data set is a selection of rows as any other. But `fa.shard` reads
different rows on each rank, so data that differs between ranks loses samples, however it came to differ.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import Any

import torch.distributed as dist
import torch.utils.data as torch_data

from fnaccel.data.epoch import Reading
from fnaccel.data.reader_ranks import Link
from fnaccel.errors import LoaderError
from fnaccel.tree import Tree

_SAMPLED = 64
"""How many rows of a Hugging Face data set are compared."""


def check_same_data(loader: object, reading: Reading, link: Link) -> None:
    """See, before the first epoch, that the data sets of all ranks are one data set.

    Only facts that are certain are compared: the length and stored rows of a Hugging Face data set, before
    any transform, and the indices of torch's `Subset`.

    Raises:
        LoaderError: ranks hold different data. Raised on every rank.
    """
    identity = None if link.group is None else _identity(getattr(loader, "dataset", loader))
    if identity is None or "compared" in reading.shards.kept:
        return
    reading.shards.kept["compared"] = True
    digests: list[Any] = [None] * link.ranks
    link.talk(dist.all_gather_object, digests, identity, group=link.group)
    if len(set(digests)) > 1:
        lengths = ", ".join(f"{length} samples on rank {rank}" for rank, (length, _) in enumerate(digests))
        raise LoaderError(
            f"the data differs between ranks ({lengths}), so it is split already, and samples would be lost",
            where="shard(loader)",
            fix="give every rank the whole data; or let each rank read its own part: "
            "fa.shard(loader, presplit=True)",
        )


def _identity(data: Tree) -> tuple[int, str] | None:
    """(length, digest) of data that can be compared. None for other data."""
    if isinstance(data, torch_data.Subset):
        indices: Any = data.indices
        return len(indices), _digest(array("q", map(int, indices)).tobytes())
    if all(hasattr(data, name) for name in ("with_format", "_fingerprint", "data", "num_rows")):
        plain = data.with_format(None)
        count = int(plain.num_rows)
        rows = sorted({at * (count - 1) // max(1, _SAMPLED - 1) for at in range(_SAMPLED)}) if count else []
        table = plain.data
        names = None if table is None else list(table.column_names)
        text = repr((names, [_row(plain, row) for row in rows]))
        return count, _digest(text.encode())
    return None


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _row(data: Tree, row: int) -> Any:
    """A row as it is stored: decoding images or sounds would take time."""
    table, indices = data.data, getattr(data, "_indices", None)
    at = row if indices is None else indices.column(0)[row].as_py()
    return table.slice(at, 1).to_pylist()
