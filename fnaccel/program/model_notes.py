"""Notes of a plan that only the built modules show, such as the modes in which they arrive.

`init` adds them to `train_step.plan`, and ranks compare them. `fnaccel plan` takes them from a model built
without values.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

import attrs
from torch import nn

from fnaccel import _torch
from fnaccel.engine.engine import Layout
from fnaccel.engine.runtime_tensor import Remote
from fnaccel.models._torch import BatchNorm
from fnaccel.models.building import has_factories
from fnaccel.models.gradient_hooks import hook_notes
from fnaccel.models.module_modes import mode_notes
from fnaccel.models.note import Note, count_of
from fnaccel.program.plan import Plan
from fnaccel.program.probe import is_split
from fnaccel.step.spec import Spec
from fnaccel.strategies.footprint import CutsParameters
from fnaccel.strategies.fsdp import Fsdp
from fnaccel.strategies.shard_dims import shard_notes


def model_notes(modules: Mapping[str | None, nn.Module], spec: Spec) -> tuple[Note, ...]:
    """The notes about a model as its factory made it. None if nothing is trained.

    Args:
        modules: the modules by key, before an axis or a transform changes them.
        spec: the train step.
    """
    if spec.optimizers is None:
        return ()
    hooks = () if spec.step.settings.weight_fn is not None else hook_notes(modules)
    notes = (*mode_notes(modules), *hooks, *_norm_notes(modules, spec), *_shard_notes(modules, spec))
    return (*notes, Note(_PROBED)) if is_split(spec.mesh) and has_factories(spec.model) else notes


_PROBED = (
    "before the first update the loss is called with one row, to compare the cut model with the whole one"
)


def _norm_notes(modules: Mapping[str | None, nn.Module], spec: Spec) -> list[Note]:
    """A note on what the statistics of batch norms are of, if that is not the whole batch."""
    norms = [
        module
        for root in modules.values()
        for module in root.modules()
        if isinstance(module, BatchNorm) and (module.training or not root.training)
    ]
    ranks, micro_batches = spec.mesh.loss_size, max(spec.step.settings.micro_batches, 1)
    if not norms or ranks * micro_batches == 1:
        return []
    sizes = [f"{ranks} ranks"] * (ranks > 1) + [f"{micro_batches} an update"] * (micro_batches > 1)
    text = f"{count_of(norms)}: statistics are those of each micro-batch ({', '.join(sizes)})"
    if ranks == 1:
        return [Note(text)]
    if any(transform.name == "sync_batch_norm" for transform in spec.step.transforms):
        return [Note(f"{text} over all ranks")]
    fix = "fa.transforms.sync_batch_norm(step) takes them over all ranks"
    return [Note(f"{text} on each rank, and running statistics those of the first rank. {fix}")]


def _shard_notes(modules: Mapping[str | None, nn.Module], spec: Spec) -> list[Note]:
    degrees, axes = spec.mesh.degrees, spec.strategy.axes
    shards = next((axis for axis in axes if isinstance(axis, Fsdp)), None)
    cut = any(degrees.get(axis.mesh_axis, 1) > 1 and isinstance(axis, CutsParameters) for axis in axes)
    if shards is None or cut:
        return []
    return shard_notes(modules, degrees, shards)


def parameter_count(layout: Layout) -> Note:
    """A note of the number of parameters: all, those trained, those on this rank. Ranks do not compare it."""
    values = layout.parameters.values()
    counts = [sum(value.numel() for value in values), sum(leaf.shown.numel() for leaf in layout.leaves)]
    own = "a runtime keeps them"
    if not any(isinstance(value, Remote) for value in values):
        own = f"{sum(_torch.local_of(value).numel() for value in values):,} on this rank"
    return Note(f"{counts[0]:,} parameters, {counts[1]:,} trained, {own}")


def with_notes(plan: Plan, notes: Iterable[Note]) -> Plan:
    """A plan with further notes."""
    return attrs.evolve(plan, notes=(*plan.notes, *(note.text for note in notes)))


def warn_of(notes: Iterable[Note]) -> None:
    """Warn of those notes that often are a mistake."""
    for note in notes:
        if note.warns:
            warnings.warn(note.text, UserWarning, stacklevel=4)  # at the caller of init
