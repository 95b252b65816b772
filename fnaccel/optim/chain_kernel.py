"""`BoundChain`: an optimizer from parts, over this rank's part of each parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from fnaccel import _torch, tree
from fnaccel.errors import CapabilityError
from fnaccel.models.parameter import Leaf
from fnaccel.optim import kernels
from fnaccel.optim.description import Group
from fnaccel.optim.operations import CutRows, Fast, Pure
from fnaccel.optim.rules import (
    AddDecayedWeights,
    Masked,
    Part,
    PlacedPart,
    Slots,
    Trace,
    UpdateInfo,
    first_slots,
    free_name,
    part_name,
    placed,
    wide,
    write_update,
)
from fnaccel.step.loss import Scalar

_WHERE = "fa.optim.chain"

_ALIASES: dict[tuple[type, str], str] = {
    (AddDecayedWeights, "decay"): "weight_decay",
    (Trace, "decay"): "momentum",
}
"""The options of `fa.sgd` and the like, by the part that carries them out."""


class BoundChain:
    """Parts over the shards of real parameters."""

    reads_host = False

    def __init__(self, chain: Sequence[Part], groups: Sequence[Group]) -> None:
        # groups differ by dtype, device and layout in memory only, and a norm is one of all
        members = sorted((member for group in groups for member in group.members), key=lambda m: m.index)
        leaves = [member.leaf for member in members]
        over = groups[0].over if groups else None
        copies = () if over is None else tuple(leaf.copies for leaf in leaves)
        by_rows = over is not None and any(unmasked(part).by_rows for part in chain)
        rows = tuple(_cut_rows(leaf) if by_rows else None for leaf in leaves)
        layout = over, copies, rows, () if over is None else tuple(leaves)
        self._fast, self._pure = Fast(*layout), Pure(*layout)
        self._shards = [real_view(leaf.shard) for leaf in leaves]
        self._wide = any(shard.dtype is torch.float64 for shard in self._shards)
        self._parts = [placed(part, leaves) for part in chain]
        self._fields = [numbers_of(each.part) for each in self._parts]
        self._slots: list[Slots] = []
        self.slots: dict[str, dict[str, Any]] = {leaf.name: {} for leaf in leaves}
        for each in self._parts:
            places = range(len(leaves)) if each.places is None else each.places
            if each.part.by_rows or each.part.whole:
                _check_rows(each.part, [leaves[i] for i in places])
            self._slots.append(
                self._make_slots(each.part, self._fast.of(places), [leaves[i] for i in places])
            )

    def _make_slots(self, part: Part, ops: Fast, leaves: Sequence[Leaf]) -> Slots:
        """The slots of one part, shown beside those of the parts before."""
        own = first_slots(part, ops, [leaf.shard.detach() for leaf in leaves])  # in a graph it requires grad
        for name, values in own.items():
            # of the whole chain: a name is that of one part for all parameters
            shown = free_name(name, {taken for slots in self.slots.values() for taken in slots})
            for leaf, value in zip(leaves, values, strict=True):
                self.slots[leaf.name][shown] = leaf.like(value)
        return {name: [real_view(value) for value in values] for name, values in own.items()}

    def apply(
        self,
        grads: Sequence[torch.Tensor | None],
        rates: Sequence[Any],
        multiplier: Scalar | None,
        skip: torch.Tensor | None,
        updates: torch.Tensor,
    ) -> None:
        """One update in place: see `Bound.apply`."""
        if not self._shards:
            return
        device = self._shards[0].device
        traced = torch.compiler.is_compiling()
        pure = traced or device.type == "xla"
        if skip is not None and skip.device.type == "cpu" and not pure:
            if bool(skip):
                return
            skip = None
        if traced:
            kernels.begin([*self._shards, *(v for own in self._slots for vs in own.values() for v in vs)])
        ops: Any = self._pure if pure else self._fast
        taken = [None if grad is None else real_view(wide(grad)) for grad in grads]
        if multiplier is not None:
            taken = _times(ops, taken, kernels.at(multiplier, device))
        parts, rate = self._parts, rates[0]
        if isinstance(rate, dict):  # scheduled numbers beside the rate
            numbers: Any = tree.map(lambda number: kernels.on_device(number, device), rate)
            rate = numbers["lr"]
            pairs = zip(parts, self._fields, strict=True)
            parts = [with_numbers(each, fields, numbers) for each, fields in pairs]
        info = UpdateInfo(self._number(updates, device, pure=pure), kernels.on_device(rate, device))
        skip = kernels.at(skip, device)
        separate = skip is not None and not pure
        write_update(ops, parts, taken, self._slots, self._shards, info, skip, separate=separate)

    def _number(self, updates: torch.Tensor, device: torch.device, *, pure: bool) -> Scalar:
        """The number of the update: on the host if it is known there, so that corrections are numbers."""
        if not pure and updates.device.type == "cpu":
            return float(updates)
        updates = kernels.at(updates, device)
        return updates.double() if self._wide else updates


def _times(ops: Any, grads: Sequence[torch.Tensor | None], factor: Scalar) -> list[torch.Tensor | None]:
    """Gradients times the factor that they still lack."""
    present = [grad for grad in grads if grad is not None]
    scaled = iter(ops.mul_(present, factor) if present else ())
    return [None if grad is None else next(scaled) for grad in grads]


def _check_rows(part: Part, leaves: Sequence[Leaf]) -> None:
    """Raise CapabilityError for a complex parameter, whose last dimension would be two numbers."""
    for leaf in leaves:
        if leaf.shard.is_complex():
            raise CapabilityError(
                f"{part_name(part)} goes by rows or matrices of real numbers, and {leaf.name!r} is complex",
                where=_WHERE,
                fix=f"fa.optim.masked({part_name(part)}(...), mask) without it",
            )


def _cut_rows(leaf: Leaf) -> CutRows | None:
    """How the rows of a parameter lie over ranks. None if this rank holds whole rows, or all of it.

    Raises:
        CapabilityError: columns are cut, and rows too, in several packed matrices.
    """
    shown = leaf.shown
    cuts = [placement for placement in getattr(shown, "placements", ()) if not placement.is_replicate()]
    dims = [placement.dim for placement in cuts]
    if not dims:
        return None
    if shown.ndim < 2:
        return CutRows(0, 1, shown.numel())
    if not any(dims):
        return None
    if any(placement.dim == 0 and hasattr(placement, "split_factor") for placement in cuts):
        raise CapabilityError(
            f"{leaf.name!r} holds several matrices, of which rows and columns are cut",
            where=_WHERE,
            fix="fa.optim.masked(part, mask) without it, for adaptive_clip and centralize",
        )
    start = _torch.local_offset(shown)[0] if 0 in dims else 0
    return CutRows(start, shown.shape[0], shown.numel() // max(shown.shape[0], 1))


def unmasked(part: Part) -> Part:
    """A part without its masks."""
    while isinstance(part, Masked):
        part = part.part
    return part


def real_view(value: Any) -> Any:
    """A complex tensor as a real one of the same memory. Any other as it is."""
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def numbers_of(part: Any) -> dict[str, str]:
    """The numbers of a part, or tuples of them: option -> field. An int counts something, so it stays."""
    names = [field.name for field in attrs.fields(type(part))] if attrs.has(type(part)) else []
    values: list[tuple[str, Any]] = [(name, getattr(part, name)) for name in names]
    return {
        _ALIASES.get((type(part), name)) or name: name
        for name, value in values
        if isinstance(value, float) or (isinstance(value, tuple) and all(map(_is_number, value)))  # pyright: ignore[reportUnknownArgumentType]
    }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def with_number(record: Any, field: str, value: Any) -> Any:
    """A frozen record with another number. torch.compile can't trace the `__init__` that `evolve` calls."""
    cls = type(record)
    changed = object.__new__(cls)
    for name in [each.name for each in cls.__attrs_attrs__]:
        object.__setattr__(changed, name, value if name == field else getattr(record, name))
    return changed


def with_numbers(each: PlacedPart, fields: Mapping[str, str], numbers: Mapping[str, Any]) -> PlacedPart:
    """A part with other numbers, by option. `fields` are those of `numbers_of`."""
    part = each.part
    for option, field in fields.items():
        if option in numbers:
            part = with_number(part, field, numbers[option])
    return each if part is each.part else with_number(each, "part", part)
