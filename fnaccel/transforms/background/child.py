"""What the process does that compiles a train step: one update of a model of its own."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import fnaccel as fa


def main(file: str) -> None:
    """Make the train step that a file describes, call it once, and end. Its code stays in torch's caches."""
    threading.Thread(target=_end_with_parent, args=(Path(file).parent,), daemon=True).start()
    from fnaccel.transforms.background import _torch  # noqa: PLC0415 - slow to import: the parent may end

    if hasattr(os, "nice"):
        os.nice(10)
    pickled, batch = pickle.loads(Path(file).read_bytes())
    Path(file).unlink()
    parts: dict[str, Any] = pickle.loads(pickled)
    # torch finds the globals of a function by the name of its module
    vars(sys.modules["__main__"]).update(parts["main"].__globals__)
    _torch.take_over(parts["settings"])
    with fa.simulate(**parts["world"]):
        train_step = fa.train_step(
            parts["step"],
            model=fa.distribute(parts["model"], parts["strategy"]),
            optimizer=parts["optimizers"],
            frozen=parts["frozen"],
            rng=parts["rng"],
        )
        train_step(train_step.init(), pickle.loads(batch))
        os._exit(0)  # no destructor has anything to do


def _end_with_parent(folder: Path) -> None:
    """The parent holds the other end of this pipe for as long as it lives."""
    os.read(sys.stdin.fileno(), 1)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
