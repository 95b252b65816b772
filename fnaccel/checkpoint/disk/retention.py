"""Which checkpoints stay, once a new one is committed."""

from __future__ import annotations

import contextlib
from pathlib import Path

import attrs

from fnaccel.checkpoint.disk import publish as commit
from fnaccel.errors import ArgumentError, require_counts


@attrs.frozen
class Retention:
    """Keep the newest `keep` checkpoints, and all whose step is a multiple of `keep_every`."""

    keep: int | None = None
    keep_every: int | None = None

    def check(self, where: str) -> None:
        """Raise ArgumentError for numbers that keep nothing."""
        require_counts(where, keep=self.keep, keep_every=self.keep_every)
        if self.keep_every is not None and self.keep is None:
            raise ArgumentError(
                f"keep_every={self.keep_every} without keep=, which keeps all",
                where=where,
                fix="say how many of the newest stay besides: keep=2",
            )

    def apply(self, root: Path, written: int) -> None:
        """Remove old checkpoints, but never the step just written, nor one that is being read.

        If one can't be removed now, the next save tries again.
        """
        if self.keep is None:
            return
        # later ones are of a run that was left: nothing of this one gives way to them
        existing = [checkpoint for checkpoint in commit.checkpoints(root) if checkpoint.step <= written]
        for checkpoint in existing[: -self.keep]:
            stays = checkpoint.step == written or (
                self.keep_every is not None and checkpoint.step % self.keep_every == 0
            )
            if not stays:
                with contextlib.suppress(OSError):
                    commit.discard(checkpoint.path, unless_read=True)
