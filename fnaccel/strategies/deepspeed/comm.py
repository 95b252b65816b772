"""DeepSpeed's communication, over the process group that fnaccel began."""

# pyright: reportPrivateUsage=false
# ruff: noqa: SLF001 - DeepSpeed has no public name for these
from __future__ import annotations

import contextlib
import importlib
import logging
import warnings
import weakref
from collections.abc import Generator
from typing import Any

import torch.distributed as dist

from fnaccel.errors import MissingBackendError, install_line
from fnaccel.strategies.deepspeed.building import guard
from fnaccel.world.mesh import ensure_group
from fnaccel.world.world import World, announce

_last: weakref.ref[Any] | None = None


def begin(world: World) -> Any:
    """The package deepspeed, talking over this world's group.

    DeepSpeed keeps groups in globals. Groups of a world that has ended are dropped. Checked with 0.19.8.

    Raises:
        MissingBackendError: it is not installed.
    """
    global _last  # the globals are DeepSpeed's, and one set for the process
    try:
        with quiet():
            deepspeed = importlib.import_module("deepspeed")  # an extra, and slow to import
            comm, groups = part_of_package("comm.comm"), part_of_package("utils.groups")
    except ImportError as error:
        raise MissingBackendError(
            f"the package deepspeed can't be imported: {error}",
            where="fa.deepspeed",
            fix=f"{install_line('deepspeed')} (DS_BUILD_OPS=0 and --no-build-isolation if it builds)",
        ) from error
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):  # DeepSpeed's calls, not the user's
        warnings.filterwarnings("ignore", f".*{name}. is deprecated", FutureWarning)
    guard(part_of_package("ops.op_builder.builder").OpBuilder)
    ensure_group(world)
    announce(world)
    group: Any = dist.group.WORLD
    if _last is None or _last() is not group:
        if comm.cdb is not None:
            comm.cdb = None
            groups._release_process_group_references()
        with quiet():
            deepspeed.init_distributed(dist_backend=str(dist.get_backend()), verbose=False)
        _last = weakref.ref(group)
    # the group of an engine with hpz=: the next engine would take it for its own, and compute wrong numbers
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    return deepspeed


def part_of_package(name: str) -> Any:
    """A module of DeepSpeed, which is imported by now."""
    return importlib.import_module(f"deepspeed.{name}")


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """In the body DeepSpeed logs nothing: it warns of decisions made here, such as the device."""
    logger = logging.getLogger("DeepSpeed")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
        logger.setLevel(logging.WARNING)
