"""Law 3: what any number of ranks saved under any placements, any others restore, bit for bit."""

from __future__ import annotations

import torch
import torch.distributed.tensor as dtensors
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from fnaccel.checkpoint import restore, save, save_async
from fnaccel.checkpoint.format.dtypes import CODES

MESHES = {1: [(1,)], 2: [(2,), (1, 2), (2, 1)], 3: [(3,)], 4: [(4,), (2, 2)]}
DTYPES = [dtype for dtype in CODES if not str(dtype).startswith("torch.float8")]


@st.composite
def layouts(draw, trees):
    """A mesh, and for each tensor a placement per mesh dimension; no two shard one tensor dimension."""
    ranks = draw(st.sampled_from(sorted(MESHES)))
    mesh = draw(st.sampled_from(MESHES[ranks]))
    placed = {}
    for name, (shape, _) in trees.items():
        dims = list(range(len(shape)))
        chosen = []
        for _ in mesh:
            dim = draw(st.sampled_from([None, *dims]))
            if dim is not None:
                dims.remove(dim)
            chosen.append(dim)
        placed[name] = None if draw(st.integers(0, 3)) == 0 else chosen
    return ranks, mesh, placed


shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)
trees = st.dictionaries(
    st.sampled_from(["a", "b", "a/b", "~", "é"]),
    st.tuples(shapes, st.sampled_from(DTYPES)),
    min_size=1,
    max_size=3,
)


def plain(number, shape, dtype):
    values = torch.arange(torch.Size(shape).numel()).reshape(shape) + 7 * number
    return (values % 2 if dtype == torch.bool else values % 127).to(dtype)


def lay(tree, mesh, placed, *, values):
    on = init_device_mesh("cpu", mesh)
    made = {}
    for number, (name, (shape, dtype)) in enumerate(sorted(tree.items())):
        whole = plain(number, shape, dtype) if values else torch.zeros(shape, dtype=dtype)
        where = placed[name]
        if where is not None:
            places = [dtensors.Replicate() if dim is None else dtensors.Shard(dim) for dim in where]
            whole = dtensors.distribute_tensor(whole, on, places, src_data_rank=None)
        made[name] = whole
    return made


def write(tree, mesh, placed, directory, background):
    value = lay(tree, mesh, placed, values=True)
    if background:
        save_async(directory, value, step=0).wait()
    else:
        save(directory, value, step=0)


def read(tree, mesh, placed, directory):
    like = lay(tree, mesh, placed, values=False)
    found = restore(directory, like=like, verify=True)
    wanted = lay(tree, mesh, placed, values=True)
    wrong = []
    for name, value in found.items():
        mine, theirs = (x.to_local() if hasattr(x, "to_local") else x for x in (value, wanted[name]))
        if mine.dtype != theirs.dtype or not torch.equal(mine, theirs):
            wrong.append(name)
    return wrong


@settings(max_examples=30)
@given(data=st.data(), tree=trees, background=st.booleans())
def test_law_3_any_layout_restores_any_other(pools, tmp_path_factory, data, tree, background):
    directory = tmp_path_factory.mktemp("tree")
    ranks, mesh, placed = data.draw(layouts(tree), label="saved")
    pools.run(ranks, write, tree, mesh, placed, directory, background)
    ranks, mesh, placed = data.draw(layouts(tree), label="restored")
    assert pools.run(ranks, read, tree, mesh, placed, directory) == [[]] * ranks
