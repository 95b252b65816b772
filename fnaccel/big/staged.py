"""`fa.big.pipeline`: a model whose layers are on several ranks, for inference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from fnaccel import _lazy
from fnaccel.big.dispatch import check_free
from fnaccel.errors import ArgumentError, CapabilityError, require, require_counts
from fnaccel.world.mesh import build, resolve
from fnaccel.world.world import World, current

_WHERE = "fa.big.pipeline"
_DISTRIBUTED = ("deepspeed.", "torch.nn.parallel.", "torch.distributed.", "torch._dynamo.")
"""Modules of classes that hold, move or compile a whole model."""
_KEY = "_fnaccel_stages"


def pipeline(
    model: nn.Module,
    n: int = -1,
    *,
    chunks: int | None = None,
    outputs: Literal["all", "last"] = "all",
    split: str | Sequence[str] | Mapping[str, int] = "even",
    weights: Mapping[str, float] | None = None,
    world: World | None = None,
) -> nn.Module:
    """Split the layers of a model over ranks, for inference of a model that does not fit on one device.

    A call cuts its rows into chunks, and each rank runs its layers for chunk after chunk. All ranks call the
    model with the same arguments. Tensors whose dim 0 is not the number of rows, that of the first tensor, go
    to each chunk as they are. No gradients are computed. `model.generate` of transformers runs with all rows
    at once, and each rank keeps the keys and values of its own layers.

    To train on stages there is `fa.pipeline`.

    Args:
        model: the whole model, with the same values on all ranks: on the CPU, or of `fa.big.load`, whose
            values are read where they are used. It is changed in place. A rank keeps its own layers.
        n: how many ranks a model is split over. -1 takes all. Others hold copies, which are called with rows
            of their own.
        chunks: into how many parts the rows of a call are cut. By default `n`. With more of them ranks wait
            less, and each part is smaller.
        outputs: `"all"` ranks get the outputs, or that of the `"last"` stage alone. Others get None then.
        split, weights: as in `fa.pipeline`.
        world: the world, if none was started in this context.

    Returns:
        The model.

    Raises:
        ArgumentError: a split or a number of chunks that can't be, or values that are missing.
        AxisProductError: n does not divide the number of ranks.
        CapabilityError: the model has no chain of blocks, or fewer than ranks, or is distributed already.

    Example, on 2 ranks:
        >>> model = fa.big.pipeline(GPT(), chunks=4)
        >>> model(torch.zeros(8, 5, dtype=torch.int64)).shape[:2]
        torch.Size([8, 5])
    """
    require_counts(_WHERE, chunks=chunks)
    require(outputs in ("all", "last"), f"outputs={outputs!r}", _WHERE, 'outputs="all", or "last"')
    _check_model(model)
    ranks = current(world)
    strategies: Any = _lazy.load("fnaccel.strategies.pipeline")
    axis = strategies.pipeline(n, split=split, weights=weights).axes[0]
    others = [] if n == -1 else [("dp_replicate", -1)]
    degrees = resolve([(axis.mesh_axis, n), *others], ranks.size, f"fa.big.pipeline(n={n})")
    if degrees[axis.mesh_axis] == 1:
        model.to(ranks.device)
        model.forward = torch.no_grad()(model.forward)
    else:
        inference: Any = _lazy.load("fnaccel.strategies.pipeline.inference")
        inference.run_on_stages(model, axis, build(ranks, degrees), chunks, outputs)
    model.__dict__[_KEY] = True
    return model


def _check_model(model: nn.Module) -> None:
    """Raise unless this is a plain module with values, which nothing has distributed."""
    require(isinstance(model, nn.Module), f"{model!r} is no module", _WHERE, "give a torch.nn.Module")
    check_free(model)
    for name, value in (*model.named_modules(), *model.named_parameters()):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if kind.startswith(_DISTRIBUTED) or _KEY in vars(value):
            raise CapabilityError(
                f"{name or 'the model'} is distributed already, as a {kind}",
                where=_WHERE,
                fix="give the whole model, before another tool wraps or splits it",
            )
        if isinstance(value, nn.Parameter) and value.is_meta:
            raise ArgumentError(f"{name} has no values", where=_WHERE, fix="fa.big.load(model, path) first")
