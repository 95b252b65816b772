"""A manifest is what was written, or it is refused: flipped bits, numbers that can't be, keys that are there twice."""

from __future__ import annotations

import itertools
import json
import shutil

import attrs
import pytest
import torch

from fnaccel import tree
from fnaccel.checkpoint import restore, save
from fnaccel.checkpoint.disk.durable import FileRecord
from fnaccel.checkpoint.format import manifest
from fnaccel.checkpoint.format.boxes import Box, make_up, whole
from fnaccel.checkpoint.format.manifest import Manifest, Piece, Stored
from fnaccel.checkpoint.format.values import decode
from fnaccel.errors import CheckpointError, FnaccelError, NotSerializableError
from fnaccel.state import Position, Seed, TrainState
from fnaccel.world.world import start
from tests.checkpoint.training import unequal


@pytest.fixture(autouse=True)
def world():
    with start(device="cpu") as started:
        yield started


def state_of(number):
    return TrainState(
        step=number,
        updates=number,
        params={"w": torch.full((2, 3), float(number)), "v": torch.full((3,), number + 0.5)},
        buffers={"n": torch.tensor(number)},
        opt={"w": {"exp_avg": torch.full((2, 3), -float(number))}},
        rng=Seed(number + 40),
        data=Position(number, 10 * number),
        extras={"best": 0.25 * number, "name": "run", "blob": bytes([number])},
    )


def leaves(state):
    return dict(tree.items(state)) | {"rng": state.rng, "data": state.data, "step": state.step}


@pytest.mark.parametrize("first", range(4))
def test_a_flipped_bit_is_refused_or_harmless(tmp_path, first):
    """Every bit of the checksum and its key, and every 13th of the rest."""
    wanted, like = leaves(state_of(3)), state_of(0)
    file = save(tmp_path, state_of(3)) / "manifest.json"
    data = file.read_bytes()
    bits = [*range(30 * 8), *range(30 * 8, len(data) * 8, 13)]
    accepted = []
    for bit in bits[first::4]:
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        try:
            found = restore(tmp_path, like=like)
        except FnaccelError:
            continue
        assert unequal(leaves(found), wanted) == [], bit
        accepted.append(bit)
    # without its key the checksum is not compared, as in checkpoints that have none
    assert all(bit // 8 in range(3, 8) for bit in accepted)
    assert unequal(leaves(like), leaves(state_of(0))) == []


def test_a_manifest_without_a_checksum_is_read(tmp_path):
    file = save(tmp_path, {"x": torch.ones(2)}) / "manifest.json"
    found = json.loads(file.read_text())
    assert next(iter(found)) == "crc32"
    del found["crc32"]
    file.write_text(json.dumps(found, indent=1))
    assert restore(tmp_path, like={"x": torch.zeros(2)})["x"].all()
    file.write_text(json.dumps(found | {"crc32": "00000000"}))
    with pytest.raises(CheckpointError, match="elsewhere than at its beginning"):
        restore(tmp_path, like={"x": torch.zeros(2)})


BAD = {
    "step": [-1, True, 1.0, None, "1"],
    "updates": [-1, 2.5, True, "1"],
    "epoch": [-3, 0.5],
    "samples": [-1, None],
    "root": [-7, "7"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, each in BAD.items() for value in each])
def test_numbers_that_can_not_be(tmp_path, name, value):
    file = save(tmp_path, state_of(3)) / "manifest.json"
    found = json.loads(file.read_text())
    del found["crc32"]
    fields = found["tree"]["TrainState"]
    place = {"epoch": ("data", "Position"), "samples": ("data", "Position"), "root": ("rng", "Seed")}.get(
        name, ()
    )
    for key in place:
        fields = fields[key]
    assert name in fields
    fields[name] = value
    file.write_text(json.dumps(found))
    with pytest.raises(CheckpointError, match=f"whose {name} is"):
        restore(tmp_path, like=state_of(0))


@pytest.mark.parametrize(
    "change", [{"step": -1}, {"data": Position(0, -1)}, {"rng": Seed(-1)}, {"updates": -2}]
)
def test_what_a_reader_would_refuse_is_not_written(tmp_path, change):
    with pytest.raises(NotSerializableError, match="is -"):
        save(tmp_path, attrs.evolve(state_of(1), **change), step=1)
    assert not any(tmp_path.iterdir())


def test_a_key_that_is_there_twice(tmp_path):
    file = save(tmp_path, {"x": torch.ones(2), "n": 1}) / "manifest.json"
    text = file.read_text().replace('"crc32"', '"was"')
    for old, new in {'"n": 1': '"n": 1, "n": 2', '"version": 1': '"version": 1, "version": 1'}.items():
        assert old in text
        file.write_text(text.replace(old, new))
        with pytest.raises(CheckpointError, match="twice in one object"):
            restore(tmp_path, like={"x": torch.zeros(2), "n": 0})
    with pytest.raises(CheckpointError, match="one key twice"):
        decode({"items": [[1, 2], [1, 3]]}, str)


def grid(*counts):
    """The cells of a grid, of odd sizes."""
    cells = [Box((), ())]
    for count in counts:
        cuts = [index * (index + 1) // 2 for index in range(count + 1)]
        spans = list(itertools.pairwise(cuts))
        cells = [
            Box((*cell.offset, begin), (*cell.shape, end - begin)) for cell in cells for begin, end in spans
        ]
    return cells, whole(tuple(count * (count + 1) // 2 for count in counts))


@pytest.mark.parametrize("counts", [(), (1,), (7,), (3, 4), (1, 5, 2), (2, 2, 2, 2)])
def test_pieces_that_make_up_a_whole(counts):
    cells, everything = grid(*counts)
    assert make_up(cells, everything)
    assert make_up([everything], everything)
    for number, cell in enumerate(cells[1:], 1):
        assert not make_up(cells[:number] + cells[number + 1 :], everything)
        same_size = [other for other in cells[:number] if other.shape == cell.shape]
        for other in same_size:  # as many elements as before: one twice, one never
            assert not make_up([*cells[:number], other, *cells[number + 1 :]], everything)


def test_pinwheels():
    """Five blocks that no straight cut separates; and with two of them moved."""
    wheel = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    blocks = [Box(*block) for block in wheel]
    assert make_up(blocks, whole((3, 3)))
    blocks[0], blocks[2] = Box((0, 1), (1, 2)), Box((2, 0), (1, 2))
    assert not make_up(blocks, whole((3, 3)))


def test_many_pieces_are_compared_in_linear_time():
    """All along one dimension, all reaching across the others: a comparison of each with each takes minutes."""
    count = 30_000
    pieces = tuple(
        Piece(f"shard-{number:06d}-of-{count:06d}.safetensors", Box((0, number), (4, 1)))
        for number in range(count)
    )
    files = {piece.file: FileRecord(16, "00000000") for piece in pieces}
    stored = Stored("w", torch.float32, (4, count), pieces)
    described = Manifest(
        step=1, tree={"tensor": "w"}, metadata=None, tensors={"w": stored}, files=files, written_by={}
    )
    assert manifest.parse(manifest.dump(described), "test").tensors["w"].pieces == pieces


def test_a_users_directory_is_never_replaced(tmp_path):
    for name, there in {
        "step-0000000001": "notes.txt",
        "step-0000000002.old": "deep/model.safetensors",
    }.items():
        (tmp_path / name / there).parent.mkdir(parents=True)
        (tmp_path / name / there).write_text("mine")
    (tmp_path / "step-0000000003").write_text("a file")
    (tmp_path / "step-0000000005.old").mkdir()
    (tmp_path / "step-x.old").mkdir()
    (tmp_path / "step-x").mkdir()
    (tmp_path / "step-x" / "manifest.json").touch()
    (tmp_path / ".saving-mine").mkdir()
    for step in (1, 2, 3):
        with pytest.raises(CheckpointError, match=f"step-000000000{step}.* is no checkpoint") as raised:
            save(tmp_path, {"n": step}, step=step)
        assert "move it away" in raised.value.fix
    save(tmp_path, {"n": 4}, step=4, keep=1)
    save(tmp_path, {"n": 5}, step=5, keep=1)
    assert (tmp_path / "step-0000000001" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "step-0000000002.old" / "deep" / "model.safetensors").read_text() == "mine"
    assert (tmp_path / "step-0000000003").read_text() == "a file"
    assert (tmp_path / "step-x.old").is_dir()
    assert (tmp_path / ".saving-mine").is_dir()
    assert restore(tmp_path, like={"n": 0})["n"] == 5


def test_what_is_left_of_a_damaged_checkpoint_is_replaced(tmp_path):
    path = save(tmp_path, {"x": torch.ones(2)}, step=1)
    (path / "manifest.json").unlink()
    save(tmp_path, {"x": torch.zeros(2)}, step=1)
    assert not restore(tmp_path, like={"x": torch.ones(2)})["x"].any()
    shutil.rmtree(path)
    path.mkdir()
    save(tmp_path, {"x": torch.ones(2)}, step=1)
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
