"""The one all-gather of bytes that moves leaves of any dtypes between ranks.

Nothing is checked here: ranks have agreed on the layout before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence

import torch

from fnaccel import _torch
from fnaccel.collectives.flat_buffer import Layout, pack
from fnaccel.collectives.over import Scope
from fnaccel.collectives.scratch import spare


@contextlib.contextmanager
def exchange(
    where: Scope, leaves: Sequence[torch.Tensor], plan: Layout, carrier: torch.device
) -> Generator[torch.Tensor]:
    """The bytes of all ranks: uint8 `[ranks, nbytes]`, on the carrier, for the length of a block."""
    with spare(plan.nbytes * (where.size + 1), carrier) as memory:
        local, everyone = memory[: plan.nbytes], memory[plan.nbytes :]
        if plan.nbytes:
            with torch.no_grad():
                pack([leaf.to(carrier) for leaf in leaves], plan, local)
            _torch.all_gather_single(everyone, local, group=where.group)
        yield everyone.view(where.size, plan.nbytes)


def exchange_one(where: Scope, leaf: torch.Tensor, carrier: torch.device) -> torch.Tensor:
    """One leaf of all ranks: a new tensor `[ranks * items]`, on the carrier."""
    local = leaf.detach().to(carrier).resolve_conj().resolve_neg().reshape(-1)  # bytes know no lazy signs
    everyone = local.new_empty(where.size * local.numel())
    if local.numel():
        _torch.all_gather_single(everyone.view(torch.uint8), local.view(torch.uint8), group=where.group)
    return everyone
