"""Checkpoints of every format version that was ever released are read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from fnaccel import tree
from fnaccel.checkpoint import latest, restore
from fnaccel.checkpoint.format.manifest import VERSION
from fnaccel.errors import CheckpointError
from fnaccel.world.world import start
from tests.checkpoint.formats.write import Counter, value

FOLDER = Path(__file__).parent
VERSIONS = sorted(int(path.name.removeprefix("version-")) for path in FOLDER.glob("version-*"))


def plain(state):
    """Leaves by path, in a form that compares."""
    found = {}
    for path, leaf in tree.items(state):
        if isinstance(leaf, torch.Tensor):
            leaf = (leaf.dtype, leaf.tolist())
        elif isinstance(leaf, np.ndarray):
            leaf = (str(leaf.dtype), leaf.tolist())
        elif isinstance(leaf, Counter):
            leaf = leaf.count
        found[path] = repr(leaf)
    return found


def test_this_version_is_checked_in():
    assert list(range(1, VERSION + 1)) == VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_an_old_version_is_read(version):
    with start(device="cpu"):
        like = value(empty=True)
        found = restore(FOLDER / f"version-{version}", like=like, verify=True)
    assert plain(found) == plain(value())
    assert found.params["same"] is found.params["tied"]


def read(folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (3,))
    like = value(lambda x, *dims: distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None), empty=True)
    found = restore(folder, like=like)
    return plain(tree.map(lambda x: x.full_tensor() if hasattr(x, "full_tensor") else x, found))


@pytest.mark.parametrize("version", VERSIONS)
def test_on_other_ranks(pools, version):
    assert pools.run(3, read, FOLDER / f"version-{version}") == [plain(value())] * 3


def test_a_later_version_is_refused(tmp_path):
    shutil.copytree(FOLDER / f"version-{VERSION}", tmp_path / "later")
    path = latest(tmp_path / "later") / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": VERSION + 1}))
    with (
        start(device="cpu"),
        pytest.raises(CheckpointError, match=f"version {VERSION + 1}, and only {VERSION} is known"),
    ):
        restore(tmp_path / "later", like=value(empty=True))
