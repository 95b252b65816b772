"""A check of a cut model before it trains: its forward on a short batch, against the whole model's.

The model is built a second time without values, and takes the gathered parameters. So this needs a factory,
and memory for the whole model on every rank.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.distributed as dist

from fnaccel import tree
from fnaccel.collectives import gather_objects
from fnaccel.data.batch import Batch, Window
from fnaccel.data.cut import cut, rows_of
from fnaccel.errors import ArgumentError, CapabilityError, OwnershipError
from fnaccel.models.building import construct, has_factories, release
from fnaccel.step.loss import read_loss
from fnaccel.tree import Tree
from fnaccel.world.mesh import Mesh
from fnaccel.world.undo import StreamStates

if TYPE_CHECKING:
    from fnaccel.program.instance import Learned

_TOLERANCE, _LOW_TOLERANCE = 1e-3, 5e-2
_WHERE = "train_step.probe(batch)"
CAUSES = (
    "usual causes: a weight of the plan is read outside of its module; a size that the model computes "
    'with is not in the plan ("*.heads": "/"); column layers without a row layer; under fa.context, '
    "positions or labels that the model makes itself; under fa.pipeline, values that blocks leave in other "
    "places than their results and attributes"
)
_SMALL = 1e-3
"""A loss of less is compared by its absolute difference: it may be 0 up to rounding."""
_logger = logging.getLogger("fnaccel")


@attrs.frozen(kw_only=True)
class Probed:
    """The loss of one batch under two forwards.

    Attributes:
        cut: by the model as the strategy cuts it.
        whole: by the whole model on one rank.
    """

    cut: float
    whole: float

    @property
    def difference(self) -> float:
        """The relative difference. 0 if both are NaN, such as on rows that a step leaves out."""
        if math.isnan(self.cut) and math.isnan(self.whole):
            return 0.0
        return abs(self.cut - self.whole) / max(abs(self.whole), _SMALL)


def is_split(mesh: Mesh) -> bool:
    """Whether several ranks compute with the same rows, so that a forward could be cut wrongly."""
    return mesh.world.size != mesh.batch_size


def fits(model: object, parameters: Mapping[str, Any], mesh: Mesh) -> bool:
    """Whether each rank can build the whole model again in half of its free memory. All ranks call it."""
    size = sum(value.numel() * value.element_size() for value in parameters.values())
    own = has_factories(model) and 2 * size < _free_bytes(mesh)
    fit = all(gather_objects(own, world=mesh.world))
    if not fit and mesh.world.is_main:
        _logger.info("the cut model is not compared with the whole one: no factory, or no memory for it")
    return fit


def _free_bytes(mesh: Mesh) -> int:
    device = mesh.world.device
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    names = ("SC_AVPHYS_PAGES", "SC_PAGE_SIZE")
    if device.type != "cpu" or any(name not in os.sysconf_names for name in names):
        return 0
    pages, size = (os.sysconf(name) for name in names)
    return pages * size // mesh.world.local_size


def short(batch: Tree) -> Any:
    """The first row of a batch, or of the first batch of a window."""
    while isinstance(batch, Window | Batch):
        batch = batch[0] if isinstance(batch, Window) else batch.data
    rows = rows_of(batch)
    return cut(batch, [1, rows - 1])[0] if rows > 1 else batch


def probe_first(learned: Learned, probe: Callable[[Tree], Probed], batch: Tree, mesh: Mesh) -> None:
    """Probe before step 0. A forward that raises is left to the step, which raises its own error.

    On stages it raises here, because another rank may wait in the middle of that forward.

    Raises:
        CapabilityError: the cut model computes another loss.
    """
    on_stages = mesh.degrees.get("pp", 1) > 1
    try:
        probe(batch)
    except CapabilityError as error:
        if CAUSES in str(error) or on_stages:
            learned.probed = False
            raise
    except OwnershipError:  # a factory that returns the same module again
        pass
    except Exception:
        if on_stages:
            raise
        learned.cut_fails = True


def check_forward(
    loss_fn: Callable[..., Any],
    look: Callable[[Callable[..., Any], Tree], Any],
    model: object,
    parameters: Mapping[str, Any],
    buffers: Mapping[str, torch.Tensor],
    mesh: Mesh,
    batch: Tree,
    *,
    low: bool,
) -> Probed:
    """Compare the two forwards. Every rank calls it.

    Args:
        loss_fn: the loss under its FORWARD transforms and its precision.
        look: calls a function of the cut model with this rank's part of a batch.
        model: the factory, or a dict of factories.
        parameters, buffers: by canonical name, as the state shows them.
        mesh: of the train step.
        batch: as the loss takes it.
        low: whether the forward runs in a low precision.

    Raises:
        CapabilityError: they differ on some rank. Raised on every rank, with the usual causes. Not if the
            forward of a rank draws random numbers in evaluation mode, since the other draws others.
        ArgumentError: a built module was given.
    """
    if not has_factories(model):
        raise ArgumentError(
            "a built module was given, and the whole model can't be built a second time",
            where=_WHERE,
            fix="give a factory: fa.distribute(lambda: GPT(config), strategy)",
        )
    batch = tree.to(batch, mesh.world.device)
    streams = StreamStates.of(mesh.world.device)
    try:  # copies, since a loss may change its batch in place
        sums = _sums(look(loss_fn, tree.map_tensors(torch.clone, batch)), mesh)
    except Exception as error:
        error.add_note(f"in {_WHERE}, the first forward of a model that is cut. {CAUSES}")
        raise
    drew = streams.moved()
    group = mesh.group("cp") if "cp" in mesh.degrees else None
    if group is not None:
        dist.all_reduce(sums, group=group)
    whole = _sums(_whole_loss(loss_fn, model, parameters, buffers, batch), mesh)
    result = Probed(cut=_mean(sums), whole=_mean(whole))
    every: list[Probed] = gather_objects(result, world=mesh.world)
    if any(gather_objects(drew, world=mesh.world)):  # two forwards draw other numbers
        return result
    limit = _LOW_TOLERANCE if low else _TOLERANCE
    rank = next((rank for rank, each in enumerate(every) if not each.difference <= limit), None)
    if rank is not None:
        raise CapabilityError(
            f"on rank {rank} the cut model has the loss {every[rank].cut:.6g}, and the whole model "
            f"{every[rank].whole:.6g}",
            where=_WHERE,
            fix=CAUSES,
        )
    return result


def _mean(sums: torch.Tensor) -> float:
    """Total by weight. The total of a row without a weight, such as one without labels."""
    return float(sums[0] / sums[1] if sums[1] else sums[0])


def _sums(output: Tree, mesh: Mesh) -> torch.Tensor:
    parts = read_loss(output, _WHERE)
    values = (parts.total, parts.weight)
    return torch.stack(
        [torch.as_tensor(value, device=mesh.world.device).detach().double().reshape(()) for value in values]
    )


def _whole_loss(
    loss_fn: Callable[..., Any],
    model: object,
    parameters: Mapping[str, Any],
    buffers: Mapping[str, torch.Tensor],
    batch: Tree,
) -> Any:
    gathered = {name: tree.whole(value).detach() for name, value in parameters.items()}
    built = construct(model, 0, empty=True)
    try:
        values: dict[str, torch.Tensor] = {}
        for kind, found in (("parameters", gathered), ("buffers", buffers)):
            hosted = {id(value): name for name, value in getattr(built.host, f"named_{kind}")()}
            values |= {hosted[id(value)]: found[name] for name, value in built.named(kind) if name in found}
        built.host.eval()
        with torch.no_grad():
            return torch.func.functional_call(built.host, values, (loss_fn, batch))
    finally:
        release(built)
