"""`save`: each rank writes its own part, rank 0 commits. The order of events is what lives here."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import attrs
import torch

from fnaccel.checkpoint import commit, durable, grammar, manifest
from fnaccel.checkpoint.durable import FileRecord
from fnaccel.checkpoint.manifest import Manifest, Piece, Stored
from fnaccel.checkpoint.meeting import together
from fnaccel.checkpoint.pieces import Box, part_of
from fnaccel.checkpoint.shard_file import file_name, write_shard
from fnaccel.errors import ArgumentError, NotSerializableError
from fnaccel.state import TrainState
from fnaccel.world import World, current

_WHERE = "fa.save"


@attrs.frozen
class _Written:
    """What one rank put in its file: the block of each tensor, by path."""

    file: str
    record: FileRecord
    boxes: dict[str, Box]


def save(
    directory: str | os.PathLike[str],
    state: Any,
    *,
    step: int | None = None,
    metadata: Any = None,
    world: World | None = None,
) -> Path:
    """Write a checkpoint that any strategy on any number of ranks can restore.

    Every rank must call it, with a directory that all of them see. Ranks write only what they hold;
    of a tensor that all hold (buffers, everything under ddp), rank 0's is written. Nothing is visible
    to readers before all of it is on the device; a failure or a crash leaves what was there before.
    Saving a step that exists replaces it, as safely. The state stays live.

    Args:
        directory: the root under which each step has its directory; made where it is missing.
        state: a TrainState, or any pytree of tensors (any layout), None, bool, int, float, str, bytes,
            lists, tuples, dicts with string keys, and states.
        step: the number in its name; the state's own by default, or else one after the newest.
        metadata: a pytree like `state`, without tensors, to read without restoring.
        world: the world, where none was started in this context.

    Returns:
        The directory of this checkpoint, `directory/step-0000000010`.

    Raises:
        NotSerializableError: something else is in the tree, such as a function; nothing was written.
        CheckpointError: a rank could not write; it raises on every rank, and nothing is visible.
        StaleStateError: the state was donated.
        ArgumentError: a step that is no number from 0 on.

    Example: `fa.save("runs/gpt", state)`; later `state = fa.restore("runs/gpt", like=state)`.
    """
    found = current(world)
    root = Path(directory)
    encoded, notes = _encode(state, step, metadata, found)
    with _staged(root, _number(root, state, step), found) as (staged, number):
        parts = together(found, _WHERE, lambda: _write(staged, encoded.tensors, found))

        def finish() -> Path | None:
            if not found.is_main:
                return None
            written = [part for part in parts if part is not None]
            made = _describe(number, encoded, notes, written, found)
            text = manifest.dump(made).encode()
            manifest.parse(text, _WHERE)  # nothing is committed that a reader would refuse
            durable.write_file(staged / manifest.FILE, [text])
            path = commit.commit(staged, root, number)
            commit.sweep(root, number)
            return path

        path = together(found, _WHERE, finish)[0]
    assert path is not None
    return path
