"""The one all-gather of bytes that moves leaves of any dtypes between ranks.

Nothing is checked here: ranks have agreed on the layout before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fnaccel import _torch
from fnaccel.collectives.bucket import Layout, pack
from fnaccel.collectives.scope import Scope


def exchange(
    where: Scope, leaves: Sequence[torch.Tensor], plan: Layout, carrier: torch.device
) -> torch.Tensor:
    """The bytes of all ranks: uint8 `[ranks, nbytes]`, on the carrier."""
    with torch.no_grad():
        mine = pack([leaf.to(carrier) for leaf in leaves], plan)
        everyone = mine.new_empty(where.size * plan.nbytes)
        if plan.nbytes:
            _torch.all_gather_single(everyone, mine, group=where.group)
        return everyone.view(where.size, plan.nbytes)
