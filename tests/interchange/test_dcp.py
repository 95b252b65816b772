"""Directories of `torch.distributed.checkpoint`, as pickles with trust, as safetensors without."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter

import fnaccel as fa
from fnaccel.errors import CheckpointError
from fnaccel.interchange.sources.detect import detect, opened
from tests.checkpoint.training import gathered, make, unequal
from tests.interchange.test_adopt import by_name, net_state
from tests.interchange.test_hostile import Bomb

# it says so where a process saves alone, as here it is to
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def shards(directory, nested):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from fnaccel.world.world import current

    mesh = init_device_mesh("cpu", (current().size,))
    tensors = {
        name: distribute_tensor(x, mesh, [Shard(0)]) if x.dim() else x for name, x in net_state().items()
    }
    if nested == "hf":
        writer = HuggingFaceStorageWriter(path=str(directory), save_distributed=True)
        dcp.save({name: x for name, x in tensors.items() if x.dim()}, storage_writer=writer)
        return
    trees = {"flat": tensors, "model": {"model": tensors, "epoch": 3}, "app": {"app": {"module": tensors}}}
    dcp.save(trees[nested], checkpoint_id=directory)


def into(layout, path, options):
    return gathered(fa.interchange.adopt(path, like=make(layout).init(seed=4), **options))


@pytest.mark.parametrize("nested", ["flat", "model", "app"])
def test_any_layout(pools, tmp_path, nested):
    pools.run(2, shards, tmp_path / "dcp", nested)
    for layout, ranks in (("local()", 1), ("fsdp()", 2), ("fsdp()", 3), ("fsdp(init='meta')", 2)):
        for found in pools.run(ranks, into, layout, tmp_path / "dcp", {"trust_pickle": True}):
            assert unequal(by_name(found), net_state()) == []


def test_shards_of_the_hugging_face_writer(pools, tmp_path):
    pools.run(2, shards, tmp_path / "hf", "hf")
    assert len(list(tmp_path.glob("hf/*.safetensors"))) == 2
    wanted = net_state()
    for layout, ranks in (("local()", 1), ("fsdp()", 3)):
        for found in pools.run(ranks, into, layout, tmp_path / "hf", {"skip": "buffers/*tracked"}):
            assert [path for path in unequal(by_name(found), wanted) if "tracked" not in path] == []


def test_nothing_is_loaded_without_trust(tmp_path):
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "executed")))
    assert detect(tmp_path / "dcp") == "dcp"
    with pytest.raises(CheckpointError, match="can run any code"), opened(tmp_path / "dcp"):
        pass
    assert not (tmp_path / "executed").exists()


def test_damage(tmp_path):
    dcp.save({"a": torch.ones(1000), "b": torch.ones(3)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    like = {"a": torch.zeros(1000), "b": torch.zeros(3)}
    with fa.start(device="cpu"):
        found = fa.interchange.adopt(tmp_path / "dcp", like=like, trust_pickle=True)
        assert found["a"].all()
        [file] = (tmp_path / "dcp").glob("*.distcp")
        file.write_bytes(file.read_bytes()[:100])
        with pytest.raises(CheckpointError, match="can't be read"):
            fa.interchange.adopt(tmp_path / "dcp", like=like, trust_pickle=True)
        (tmp_path / "dcp" / ".metadata").write_bytes(b"")
        with pytest.raises(CheckpointError, match=r"\.metadata can't be read"):
            fa.interchange.adopt(tmp_path / "dcp", like=like, trust_pickle=True)
    assert not like["a"].any()
