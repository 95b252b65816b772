"""Notes of a plan that only the built modules show, such as the modes in which they arrive.

`init` adds them to `train_step.plan`, and ranks compare them. `fnaccel plan` takes them from a model built
without values.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

import attrs
from torch import nn

from fnaccel.models.module_modes import mode_notes
from fnaccel.models.note import Note
from fnaccel.program.plan import Plan
from fnaccel.step.spec import Spec
from fnaccel.strategies.footprint import CutsParameters, Reshards
from fnaccel.strategies.shard_dims import shard_notes


def model_notes(modules: Mapping[str | None, nn.Module], spec: Spec) -> tuple[Note, ...]:
    """The notes about a model as its factory made it. None if nothing is trained.

    Args:
        modules: the modules by key, before an axis or a transform changes them.
        spec: the train step.
    """
    if spec.optimizers is None:
        return ()
    return (*mode_notes(modules), *_shard_notes(modules, spec))


def _shard_notes(modules: Mapping[str | None, nn.Module], spec: Spec) -> list[Note]:
    degrees, axes = spec.mesh.degrees, spec.strategy.axes
    shards = next((axis for axis in axes if isinstance(axis, Reshards)), None)
    cut = any(degrees.get(axis.mesh_axis, 1) > 1 and isinstance(axis, CutsParameters) for axis in axes)
    return [] if shards is None or cut else shard_notes(modules, degrees, shards.reshard_after_forward)


def with_notes(plan: Plan, notes: Iterable[Note]) -> Plan:
    """A plan with further notes."""
    return attrs.evolve(plan, notes=(*plan.notes, *(note.text for note in notes)))


def warn_of(notes: Iterable[Note]) -> None:
    """Warn of those notes that often are a mistake."""
    for note in notes:
        if note.warns:
            warnings.warn(note.text, UserWarning, stacklevel=4)  # at the caller of init
