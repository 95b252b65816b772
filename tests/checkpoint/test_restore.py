"""What `restore` refuses: another architecture, path by path, and files that are not what they say."""

from __future__ import annotations

import json

import pytest
import torch

from fnaccel.checkpoint import latest, restore, save
from fnaccel.checkpoint.reading import Files
from fnaccel.errors import CheckpointError, StaleStateError, TreeMismatchError
from fnaccel.state import snapshot
from fnaccel.transforms import skip_nonfinite, with_ema
from fnaccel.world.world import start
from tests.checkpoint.training import gathered, make, train, unequal


@pytest.fixture(autouse=True)
def world():
    with start(device="cpu") as found:
        yield found


def test_another_architecture_lists_every_path_and_leaves_like_live(tmp_path):
    small, wide = make("local()"), make("local()", width=6, transform=lambda step: with_ema(step, 0.5))
    save(tmp_path, small.init())
    state = wide.init()
    kept = gathered(state)
    with pytest.raises(TreeMismatchError) as raised:
        restore(tmp_path, like=state)
    message = raised.value.what
    for path in ("params", "ema"):
        assert f"{path}/first.weight: float32 [5, 7] in the checkpoint, float32 [6, 7] in like" in message
    assert "opt/blocks.1.line.weight/exp_avg: " in message
    assert "first.bias" in message
    assert "last.bias" not in message
    assert unequal(gathered(state), kept) == []
    train(wide, state, 0, 1)


def test_missing_and_unexpected_paths(tmp_path):
    save(tmp_path, {"a": {"x": 1, "y": [torch.ones(1), 2]}, "c": None, "k": 1, "t": (1, 2)})
    with pytest.raises(TreeMismatchError) as raised:
        restore(tmp_path, like={"b": {"z": torch.ones(2)}, "c": torch.ones(1), "k": "1", "t": (1,)})
    assert raised.value.what.partition(": ")[2].split("; ") == [
        "b/z: only in like (float32 [2])",
        "c: None in the checkpoint, float32 [1] in like",
        "k: 1 in the checkpoint, a str in like",
        "t/1: only in the checkpoint (2)",
        "a/x: only in the checkpoint (1)",
        "a/y/0: only in the checkpoint (float32 [1])",
        "a/y/1: only in the checkpoint (2)",
    ]


def test_a_donated_like(tmp_path):
    step = make("local()")
    state = step.init()
    save(tmp_path, state)
    following = restore(tmp_path, like=state)
    for use in (lambda: restore(tmp_path, like=state), lambda: save(tmp_path, state)):
        with pytest.raises(StaleStateError):
            use()
    train(step, following, 0, 1)


def test_updates_count_on_the_host_or_on_the_device(tmp_path):
    host, device = make("local()"), make("local()", transform=lambda s: skip_nonfinite(with_ema(s, 0.9)))
    on_host = train(host, host.init(), 0, 2)
    save(tmp_path / "host", on_host)
    on_device = restore(tmp_path / "host", like=device.init())
    assert on_device.updates.item() == 2.0
    on_device = train(device, on_device, 2, 1)
    save(tmp_path / "device", on_device)
    back = restore(tmp_path / "device", like=on_host)
    assert type(back.updates) is int
    assert back.updates == 3
    assert restore(tmp_path / "device", like=snapshot(back)).updates == 3


def test_extras_come_back_as_like_has_them_or_as_they_are(tmp_path):
    step, mine = make("local()"), torch.ones(2)
    extras = {"best": torch.tensor([1.0, 2.0]), "names": ["a"]}
    save(tmp_path, step.init(extras=extras))
    state = restore(tmp_path, like=step.init())
    assert torch.equal(state.extras["best"], extras["best"])
    state = restore(tmp_path, like=step.init(extras={"best": mine, "names": ["b"]}))
    assert state.extras["names"] == ["a"]
    assert torch.equal(mine, torch.ones(2))  # the user's own tensor is not written to


def test_a_failure_in_the_middle_donates_like(tmp_path, monkeypatch):
    step = make("local()")
    state = step.init()
    save(tmp_path, state)

    real = Files.read

    def fail(files, requests):
        if len(requests) > 1:  # the parameters; extras and random streams come first
            raise OSError(5, "Input/output error")
        return real(files, requests)

    monkeypatch.setattr(Files, "read", fail)
    with pytest.raises(CheckpointError, match=r"Input/output error.* so it was donated"):
        restore(tmp_path, like=state)
    with pytest.raises(StaleStateError):
        train(step, state, 0, 1)
    train(step, step.init(), 0, 1)


def test_bf16_and_a_like_without_values(tmp_path):
    value = {"w": torch.randn(5, 3).bfloat16(), "s": torch.tensor(3)}
    save(tmp_path, value)
    found = restore(
        tmp_path, like={"w": torch.empty(5, 3, dtype=torch.bfloat16, device="meta"), "s": value["s"]}
    )
    assert torch.equal(found["w"], value["w"])
    with pytest.raises(TreeMismatchError, match=r"w: bfloat16 \[5, 3\] in the checkpoint, float32"):
        restore(tmp_path, like={"w": torch.empty(5, 3), "s": value["s"]})


SHARD = "shard-00000-of-00001.safetensors"


def piece(**changes):
    def change(found):
        found["tensors"]["w"]["pieces"][0].update(changes)

    return change


def put(*keys, to):
    def change(found):
        for key in keys[:-1]:
            found = found[key]
        found[keys[-1]] = to

    return change


def climb(found):
    found["files"]["../" + SHARD] = found["files"].pop(SHARD)


def twice(found):
    half = {"file": SHARD, "offset": [0, 0], "shape": [2, 3]}
    found["tensors"]["w"]["pieces"] = [half, half]


def twice_the_same(found):
    """Two pieces of one tensor in one file, which has one entry for both."""
    found["tensors"]["w"]["pieces"] = [
        {"file": SHARD, "offset": [0, 0], "shape": [2, 3]},
        {"file": SHARD, "offset": [2, 0], "shape": [2, 3]},
    ]


HOSTILE = {
    "another version": (put("version", to=2), "format version 2"),
    "another format": (put("format", to="zip"), "no manifest of an fnaccel"),
    "a file elsewhere": (climb, "can't be one of its own"),
    "an unlisted file": (piece(file="other.safetensors"), "does not list"),
    "an absurd shape": (put("tensors", "w", "shape", to=[10**15, 3]), "covers 12 of"),
    "absurd everywhere": (
        lambda found: (put("tensors", "w", "shape", to=[10**15, 3])(found), piece(shape=[10**15, 3])(found)),
        "bytes in",
    ),
    "a shape that wraps around": (
        lambda found: (
            put("tensors", "w", "shape", to=[2**62, 4])(found),
            put("tensors", "w", "pieces", to=[])(found),
        ),
        "no tensor can have",
    ),
    "nothing, absurdly": (
        lambda found: (
            put("tensors", "w", "shape", to=[0, 2**62, 9])(found),
            put("tensors", "w", "pieces", to=[])(found),
        ),
        "no tensor can have",
    ),
    "too many dimensions": (put("tensors", "w", "shape", to=[1] * 65), "no tensor can have"),
    "a negative shape": (put("tensors", "w", "shape", to=[-4, 3]), "as the shape of w"),
    "a piece outside": (piece(offset=[1, 0]), "outside of"),
    "too few dimensions": (piece(offset=[0], shape=[12]), "number of dimensions"),
    "overlapping pieces": (twice, "overlap"),
    "two pieces of one name": (twice_the_same, "in one entry of a file"),
    "no pieces": (put("tensors", "w", "pieces", to=[]), "covers 0 of the 12"),
    "an unknown dtype": (put("tensors", "w", "dtype", to="object"), "the dtype 'object'"),
    "another dtype": (put("tensors", "w", "dtype", to="int32"), None),
    "no tree": (put("tree", to={"eval": "1"}), "does not know"),
    "a tensor stored nowhere": (put("tree", "dict", "w", "tensor", to="v"), "stored nowhere"),
    "another size": (put("files", SHARD, "size", to=9999), "was written with 9999"),
    "a swapped key": (put("tree", "dict", "v", to={"tensor": "w"}), None),
    "an entry that is no pair": (put("tree", to={"items": [["w"]]}), "no pair"),
    "a list as a key": (put("tree", to={"items": [[[1], 2]]}), "as a key"),
    "an array without a path": (put("tree", "dict", "w", to={"array": 1}), "does not know"),
    "an array stored nowhere": (put("tree", "dict", "w", to={"array": "v"}), "stored nowhere"),
    "a state_dict in its place": (put("tree", "dict", "w", to={"state_dict": {"tensor": "w"}}), ""),
    "a node in its place": (put("tree", to={"node": {"w": {"tensor": "w"}}}), None),
    "two tags": (put("tree", "dict", "w", to={"tensor": "w", "array": "w"}), "no value"),
    "no files": (put("files", to=[]), "no table 'files'"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifests(tmp_path, name):
    change, words = HOSTILE[name]
    like = {"w": torch.zeros(4, 3)}
    file = save(tmp_path, {"w": torch.arange(12.0).view(4, 3)}) / "manifest.json"
    found = json.loads(file.read_text())
    del found["crc32"]  # an attacker can compute it, too
    change(found)
    file.write_text(json.dumps(found))
    if words == "":  # an object's state where there is no object: its tensor is what counts
        assert restore(tmp_path, like=like)["w"].any()
        return
    with pytest.raises(CheckpointError if words else TreeMismatchError) as raised:
        restore(tmp_path, like=like)
    assert words is None or words in raised.value.what
    assert not like["w"].any()


@pytest.mark.parametrize("text", ["", "[]", "{" * 10_000, "[" * 200_000, '{"format": NaN}', "\x00"])
def test_what_is_no_manifest(tmp_path, text):
    (save(tmp_path, 1) / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match="the manifest"):
        restore(tmp_path, like=1)


def test_damaged_shards(tmp_path):
    like = {"w": torch.zeros(4, 3)}
    save(tmp_path, {"w": torch.ones(4, 3)})
    shard = latest(tmp_path) / SHARD
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="not those that were written"):
        restore(tmp_path, like=like, verify=True)
    shard.write_bytes(b"\xff" * len(data))
    with pytest.raises(CheckpointError, match="is no whole safetensors file"):
        restore(tmp_path, like=like)
    shard.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match="bytes, and was written with"):
        restore(tmp_path, like=like)
    shard.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        restore(tmp_path, like=like)
    save(tmp_path, {"w": torch.ones(4, 3), "v": torch.ones(3, 4)}, step=1)
    other = latest(tmp_path) / SHARD
    other.write_bytes(other.read_bytes().replace(b'"w"', b'"u"'))
    with pytest.raises(CheckpointError, match="can't be read"):
        restore(tmp_path, like={**like, "v": torch.ones(3, 4)})
