"""fnaccel's own checkpoints as a source, written by `fa.save` or `fnaccel convert`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
from torch import nn

from fnaccel.checkpoint import stored_states
from fnaccel.checkpoint.disk import publish as commit
from fnaccel.checkpoint.disk.finding import open_checkpoint
from fnaccel.checkpoint.format.found import Found, Source, read_all, unescaped
from fnaccel.checkpoint.format.manifest import Stored
from fnaccel.checkpoint.format.values import decode
from fnaccel.checkpoint.format.walk import child
from fnaccel.checkpoint.reading import Files, Request, verify
from fnaccel.state import TrainState
from fnaccel.tree import Tree


def is_own(path: Path) -> bool:
    """Whether a directory is a checkpoint of fnaccel, or a root of some."""
    return commit.committed(path) is not None or (path.is_dir() and bool(commit.checkpoints(path)))


def open_own(path: Path, stack: ExitStack, step: int | None = None) -> Source:
    """A checkpoint of fnaccel: parameters, buffers, averages, moments and counts.

    Files are closed with `stack`.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    directory, manifest = open_checkpoint(path, step, f"reading {path}", stack)
    chosen = directory.path
    read = stored_states.reader(manifest, f"reading {chosen}", None, nested=False, partly=False, speaks=True)
    root = decode(manifest.tree, read)
    tree: Mapping[str, Any] = _sections(root)
    reader = _Reader(stack.enter_context(Files(directory)))
    params, buffers = (reader.flat(tree.get(part)) for part in ("params", "buffers"))
    slots: dict[str, dict[str, Found]] = {}
    for name, value in reader.flat(tree.get("opt")).items():
        parameter, _, slot = name.rpartition("/")
        slots.setdefault(parameter, {})[slot] = value
    updates, step = tree.get("updates"), tree.get("step")

    def verify_share(rank: int, ranks: int) -> None:
        verify(directory, manifest, sorted(manifest.files)[rank::ranks])

    listed: Any = manifest.written_by.get("transient_buffers")
    transient = set(map(str, listed)) if isinstance(listed, list) else set[str]()
    return Source(
        format="fnaccel",
        path=chosen,
        weights={**params, **buffers},
        buffers=frozenset(buffers),
        transient=frozenset(name for name in buffers if unescaped(name) in transient),
        averages=reader.flat(tree.get("ema")),
        slots=slots,
        updates=reader.count(updates),
        step=reader.count(step),
        file_bytes=sum(record.size for record in manifest.files.values()),
        digest=manifest.digest,
        verify=verify_share,
    )


def _sections(root: nn.Module) -> Mapping[str, Any]:
    if isinstance(root, TrainState):
        names = ("params", "buffers", "opt", "ema", "updates", "step")
        return {name: getattr(root, name) for name in names}
    if not isinstance(root, dict):
        return {}
    # a tree of tensors without sections is one of parameters
    return root if isinstance(root.get("params"), dict) else {"params": root}


@attrs.frozen(eq=False)
class _Reader:
    """Tensors of one checkpoint."""

    files: Files

    def flat(self, node: Tree, prefix: str = "") -> dict[str, Found]:
        """The tensors below a node, by path."""
        if isinstance(node, Stored):
            return {prefix: self.found(node)}
        tensors: dict[str, Found] = {}
        if isinstance(node, dict):
            for key, value in node.items():
                tensors |= self.flat(value, child(prefix, key))
        return tensors

    def found(self, stored: Stored) -> Found:
        """One tensor."""
        return Found(
            stored.dtype,
            stored.shape,
            lambda box, out: self.files.read([Request(stored, box, out)]),
            check=lambda box: self.files.check([(stored, box)]),
            view=(lambda: self.files.view(stored)) if len(stored.pieces) == 1 and not stored.others else None,
        )

    def count(self, value: Tree) -> int | None:
        """The number of updates from a number or a tensor, or None."""
        if isinstance(value, Stored):
            value = None if value.shape else float(read_all(self.found(value)))
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return int(value) if math.isfinite(value) and value >= 0 else None
