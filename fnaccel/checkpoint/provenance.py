"""The origin of a checkpoint: versions, the commit of the program, the plan of the run."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from fnaccel.errors import UnleasedStateError
from fnaccel.state import TrainState, lease_of
from fnaccel.tree import Tree


def describe(state: Tree, ranks: int) -> dict[str, Any]:
    """The `written_by` entry of a manifest: plain data that no reader needs."""
    facts: dict[str, Any] = {
        "fnaccel": version(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "ranks": ranks,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    if isinstance(state, TrainState):
        with contextlib.suppress(UnleasedStateError):
            owner = lease_of(state, "fa.save").owner
            facts["plan"] = str(owner.plan)
            instance = owner.instance
            if instance.learned.source is not None:
                facts["data"] = dict(instance.learned.source)
            facts["transient_buffers"] = instance.transient()
            if instance.meter is not None and instance.meter.found.since is not None:
                facts["compiled_since"] = instance.meter.found.since
            if instance.engine.hooks.init is not None:
                facts["axis_state"] = instance.engine.name
    return facts


def version() -> str:
    """The version of fnaccel."""
    try:
        return importlib.metadata.version("fnaccel")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"


@functools.cache
def commit_of_program() -> str | None:
    """The git commit of the running script's folder, with "+" if files differ from it, or None."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    folder = Path(script).resolve().parent if script else Path.cwd()
    try:
        head = _git(folder, "rev-parse", "HEAD")
        return head + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    run = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=2, check=True
    )
    return run.stdout.strip()
