"""`save`: each rank writes its own part, rank 0 commits. The order of events is what lives here."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from fnaccel.checkpoint import commit, durable, grammar, manifest
from fnaccel.checkpoint.durable import FileRecord
from fnaccel.checkpoint.grammar import Encoded, encode
from fnaccel.checkpoint.manifest import Manifest, Piece, Stored
from fnaccel.checkpoint.meeting import together
from fnaccel.checkpoint.pieces import part_of
from fnaccel.checkpoint.shard_file import file_name, write_shard
from fnaccel.errors import ArgumentError, CheckpointError, NotSerializableError
from fnaccel.state import TrainState
from fnaccel.world import World, current

_WHERE = "fa.save"


@attrs.frozen
class _Written:
    """What one rank put in its file: of each tensor, one piece."""

    file: str
    record: FileRecord
    tensors: tuple[Stored, ...]


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
    encoded: list[Encoded] = []  # tensors stay here: what ranks tell each other is pickled
    together(found, _WHERE, lambda: encoded.extend((encode(state), _notes(metadata))))
    tree, notes = encoded
    with _staged(root, state, step, found) as (staged, number):
        parts = together(found, _WHERE, lambda: _write(staged, tree.tensors, found))

        def finish() -> None:
            if found.is_main:
                text = _describe(number, tree, notes, parts).encode()
                durable.write_file(staged / manifest.FILE, [memoryview(text)])
                commit.commit(staged, root, number)
                commit.sweep(root, number)

        together(found, _WHERE, finish)
    return root / commit.name_of(number)


def _notes(metadata: Any) -> Encoded:
    notes = encode(metadata)
    if notes.tensors:
        raise NotSerializableError(
            f"metadata holds a tensor: {grammar.shown(next(iter(notes.tensors)))}",
            where=_WHERE,
            fix="put tensors in the state, or numbers in metadata: x.tolist()",
        )
    return notes


@contextlib.contextmanager
def _staged(root: Path, state: Any, step: int | None, world: World) -> Generator[tuple[Path, int]]:
    """The directory to fill, equal on all ranks, and the step; it goes where the body fails."""
    with contextlib.ExitStack() as stack:

        def begin() -> tuple[Path, int] | None:
            if not world.is_main:
                return None
            number = _number(root, state, step)
            made = commit.stage(root, number)
            stack.enter_context(commit.held(made))
            return made, number

        begun = next(one for one in together(world, _WHERE, begin) if one is not None)
        try:
            yield begun
        except Exception:
            # all ranks have met, so none writes in it any more
            if world.is_main:
                with contextlib.suppress(OSError):
                    durable.remove(begun[0])
            raise


def _number(root: Path, state: Any, step: int | None) -> int:
    if step is None and isinstance(state, TrainState):
        step = state.step
    if step is None:
        newest = commit.checkpoints(root)
        return newest[-1].step + 1 if newest else 0
    if type(step) is not int or not 0 <= step < 10**19:
        raise ArgumentError(f"step={step!r} can't number a checkpoint", where=_WHERE, fix="an int from 0 on")
    return step


def _write(staged: Path, tensors: dict[str, torch.Tensor], world: World) -> _Written | None:
    """Write this rank's file; None where it has nothing to write."""
    parts = {path: part_of(value, world.rank) for path, value in tensors.items()}
    mine = {path: part for path, part in parts.items() if part.writes and part.box.numel}
    if not mine:
        return None
    name = file_name(world.rank, world.size)
    record = write_shard(staged / name, {path: part.local for path, part in mine.items()})
    pieces = (_stored(path, tensors[path], (Piece(name, part.box),)) for path, part in mine.items())
    return _Written(name, record, tuple(pieces))


def _stored(path: str, value: torch.Tensor, pieces: tuple[Piece, ...]) -> Stored:
    return Stored(path, value.dtype, tuple(value.shape), pieces)


def _describe(step: int, tree: Encoded, notes: Encoded, parts: Sequence[_Written | None]) -> str:
    written = [part for part in parts if part is not None]
    tensors = {path: _stored(path, value, ()) for path, value in tree.tensors.items()}
    for piece in (stored for part in written for stored in part.tensors):
        known = tensors.get(piece.path)
        if known is None or (known.dtype, known.shape) != (piece.dtype, piece.shape):
            raise CheckpointError(
                f"{piece.path} is {piece} on one rank, and {known or 'missing'} on rank 0",
                where=_WHERE,
                fix="save the same tree on every rank",
            )
        tensors[piece.path] = attrs.evolve(known, pieces=known.pieces + piece.pieces)
    text = manifest.dump(
        Manifest(
            step=step,
            tree=tree.structure,
            metadata=notes.structure,
            tensors=tensors,
            files={part.file: part.record for part in written},
            written_by={"fnaccel": _version(), "torch": str(torch.__version__), "ranks": len(parts)},
        )
    )
    manifest.parse(text, _WHERE)  # what a reader would refuse is not committed
    return text


def _version() -> str:
    try:
        return importlib.metadata.version("fnaccel")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"
