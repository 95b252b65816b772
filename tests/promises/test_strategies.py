"""Names and sizes of the axes of products, and layers that fsdp leaves whole."""

from __future__ import annotations

import pytest

import fnaccel as fa
from tests.tiny_models import program


@pytest.mark.parametrize(
    ("strategy", "ranks", "degrees"),
    [
        (fa.ddp(2) * fa.fsdp(4), 8, {"dp_replicate": 2, "dp_shard": 4}),
        (fa.fsdp(4) * fa.tensor(2), 8, {"dp_shard": 4, "tp": 2}),
        (fa.fsdp(4) * fa.context(2), 8, {"dp_shard": 4, "cp": 2}),
        (fa.ddp(2) * fa.fsdp(2) * fa.context(2), 8, {"dp_replicate": 2, "dp_shard": 2, "cp": 2}),
        (fa.ddp(2) * fa.tensor(4), 8, {"dp_replicate": 2, "tp": 4}),
        (fa.fsdp(8), 8, {"dp_shard": 8}),
    ],
    ids=str,
)
def test_axes_of_a_product(strategy, ranks, degrees):
    with fa.simulate(ranks=ranks):
        mesh = program(strategy=strategy).mesh
    assert {name: size for name, size in mesh.degrees.items() if size > 1} == degrees


def kept(pattern):
    step = program(strategy=fa.fsdp(ignore=(pattern,)))
    state = step.init(seed=0)
    return {name: hasattr(value, "placements") for name, value in state.params.items()}


def test_layers_that_fsdp_leaves_whole(pools):
    sharded = pools.run(2, kept, "*bias")[0]
    assert sharded
    assert all(cut != name.endswith("bias") for name, cut in sharded.items())
