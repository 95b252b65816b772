"""`save_async`: the state is copied to the host in the call, and written on a thread.

One `Background` belongs to a world. Its ranks meet in a group of their own, so that the thread never
gets between the collectives of the step.
"""

from __future__ import annotations

import atexit
import sys
import threading
from pathlib import Path

import attrs
import torch
import torch.distributed as dist

from fnaccel.checkpoint.format.boxes import Part
from fnaccel.checkpoint.writing import Writing
from fnaccel.collectives import gather_objects
from fnaccel.world.devices import HOSTED
from fnaccel.world.joining import gloo_group
from fnaccel.world.world import World


class Saving:
    """A save in the background: the result of `fa.save_async`.

    Example:
        >>> saving = fa.save_async("runs/gpt", state)
        >>> path = saving.wait()
        >>> saving.done
        True
    """

    def __init__(self, writing: Writing) -> None:
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._told = False
        self._ended = threading.Event()  # a join that Ctrl-C interrupts would count as one
        self._thread = threading.Thread(target=self._run, args=(writing,), name="fnaccel-save")
        self._thread.start()

    def __repr__(self) -> str:
        how = "under way" if not self.done else "failed" if self._error else "committed"
        return f"Saving({how})"

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def wait(self) -> Path:
        """Wait until the checkpoint is committed, and return its directory.

        Raises:
            CheckpointError: it could not be written. The checkpoints from before are intact.
        """
        self._ended.wait()
        if self._error is not None:
            self._told = True
            raise self._error
        return self._path  # pyright: ignore[reportReturnType] - set if there is no error

    @property
    def error(self) -> BaseException | None:
        """The error of the save, or None."""
        return self._error

    def failure(self) -> BaseException | None:
        """Wait. Return the error of the save if it was not reported yet."""
        self._ended.wait()
        reported, self._told = self._told, True
        return None if reported else self._error

    def _run(self, writing: Writing) -> None:
        try:
            self._path = writing.run()
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()


class Background:
    """The asynchronous saves of a world, one at a time. Created by `world.resource`.

    Attributes:
        copies: the host copies of the tensors to write.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._group: dist.ProcessGroup | None = None
        self._saving: Saving | None = None
        self.copies = Copies(world.device)

    def go(self, writing: Writing) -> Saving:
        """Let a thread write a save that has begun, whose parts `copies` holds."""
        if self._world.size > 1 and self._group is None:
            self._group = gloo_group()
        atexit.unregister(self._last_words)
        atexit.register(self._last_words)
        writing.over = self._group
        self._saving = Saving(writing)
        return self._saving

    def settle(self) -> None:
        """Wait for the save under way. Every rank calls it.

        Raises:
            CheckpointError: it failed, and a rank was not told: then all are.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return
        failed = saving.failure()
        if any(gather_objects(failed is not None, world=self._world)) and saving.error is not None:
            raise saving.error

    def close(self, *, clean: bool) -> None:
        """Wait for the save under way at the end of the run. If `clean`, raise if it failed."""
        atexit.unregister(self._last_words)
        failed = self._untold()
        if failed is not None and clean:
            raise failed
        self._say(failed)

    def _last_words(self) -> None:
        self._say(self._untold())

    def _untold(self) -> BaseException | None:
        return None if self._saving is None else self._saving.failure()

    @staticmethod
    def _say(failed: BaseException | None) -> None:
        if failed is not None:
            print(f"{type(failed).__name__}: {failed}", file=sys.stderr, flush=True)


@attrs.define
class Copies:
    """Host memory for one rank's parts, kept from save to save: fresh pages cost more than the copy."""

    device: torch.device
    tensors: dict[str, torch.Tensor] = attrs.field(factory=dict)

    def of(self, parts: dict[str, Part]) -> dict[str, Part]:
        """The parts, with copies of their values on the host."""
        fresh: dict[str, torch.Tensor] = {}
        for path, part in parts.items():
            buffer = self.tensors.get(path)
            if buffer is None or (buffer.dtype, buffer.shape) != (part.local.dtype, part.local.shape):
                pinned = part.local.device.type not in HOSTED
                buffer = torch.empty(part.local.shape, dtype=part.local.dtype, pin_memory=pinned)
            fresh[path] = buffer.copy_(part.local, non_blocking=True)
        self.tensors = fresh
        if self.device.type not in HOSTED:
            torch.accelerator.synchronize(self.device)  # a failed copy must raise here
        return {path: attrs.evolve(part, local=fresh[path]) for path, part in parts.items()}
