from __future__ import annotations

from collections import UserDict
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fnaccel as fa
from fnaccel import tree
from fnaccel.data import Rows, Shared, cut, join, rows_of, split_sizes
from fnaccel.errors import LoaderError, MicroBatchError


def record(rows):
    return {
        "x": torch.arange(rows * 2.0).reshape(rows, 2),
        "pair": [torch.arange(rows), (torch.ones(rows), 7)],
        "names": [str(i) for i in range(rows)],
        "scale": torch.tensor(0.5),
        "split": "train",
    }


@given(st.integers(1, 9), st.integers(1, 4))
def test_join_undoes_cut(rows, parts):
    whole = record(rows)
    sizes = split_sizes(rows, parts)
    cuts = cut(whole, sizes)
    assert [rows_of(one) for one, size in zip(cuts, sizes, strict=True) if size] == [s for s in sizes if s]
    assert tree.allclose(join([one for one, size in zip(cuts, sizes, strict=True) if size]), whole)


def test_what_is_no_row_goes_to_each_part():
    first, second = cut(record(3), [1, 2])
    assert (first["split"], second["split"], second["scale"].item()) == ("train", "train", 0.5)
    assert (first["names"], second["names"]) == (["0"], ["1", "2"])
    assert second["pair"][1][1] == 7


def test_cut_makes_views():
    x = torch.zeros(4)
    cut(x, [2, 2])[1].fill_(1)
    assert x.tolist() == [0, 0, 1, 1]


def test_arrays_are_rows_too():
    numpy = pytest.importorskip("numpy")
    first, second = cut({"a": numpy.arange(3)}, [1, 2])
    assert second["a"].tolist() == [1, 2]
    assert join([first, second])["a"].tolist() == [0, 1, 2]


def test_columns_without_tensors():
    assert rows_of(["a", "b"]) == 2
    assert cut(("a", "b", "c"), [2, 1]) == [("a", "b"), ("c",)]


def test_columns_that_differ_are_named():
    with pytest.raises(LoaderError, match=r"x: 3, y/0: 2.*\n.*where: here"):
        rows_of({"x": torch.ones(3), "y": [torch.ones(2)]}, where="here")
    with pytest.raises(LoaderError, match="names: 2, x: 3"):
        cut({"x": torch.ones(3), "names": ["a", "b"]}, [1, 2])


def test_no_rows_at_all():
    with pytest.raises(LoaderError, match="no tensor to count rows of: dict"):
        rows_of({"a": 1})


@pytest.mark.parametrize("sizes", [[1, 1], [4, -1], []])
def test_sizes_that_do_not_fit(sizes):
    with pytest.raises(MicroBatchError, match="a batch of 3 rows can't be cut"):
        cut(torch.ones(3), sizes)


class Pair(NamedTuple):
    x: torch.Tensor
    boxes: list


def box(n, tensors=True):
    return torch.arange(float(n)) if tensors else [float(i) for i in range(n)]


PER_ROW = {  # batches of 4 rows whose `boxes` are one item a row
    "lists": lambda: {"x": torch.ones(4), "boxes": [box(4, tensors=False) for _ in range(4)]},
    "tensors": lambda: {"x": torch.ones(4), "boxes": [box(4) for _ in range(4)]},
    "dicts": lambda: {"x": torch.ones(4), "boxes": [{"of": box(4), "label": [1, 2, 3, 4]} for _ in range(4)]},
    "a tuple": lambda: {"x": torch.ones(4), "boxes": tuple(box(4) for _ in range(4))},
    "lists of lists": lambda: {"x": torch.ones(4), "boxes": [[box(4), box(4)] for _ in range(4)]},
    "a mapping": lambda: UserDict(x=torch.ones(4), boxes=[box(4) for _ in range(4)]),
    "a named tuple": lambda: Pair(torch.ones(4), [box(4) for _ in range(4)]),
    "within": lambda: (torch.ones(4), {"boxes": [box(4) for _ in range(4)]}),
    "the whole batch": lambda: [box(4, tensors=False) for _ in range(4)],
}


@pytest.mark.parametrize("case", PER_ROW)
def test_lists_that_may_be_rows_or_columns_raise(case):
    batch = PER_ROW[case]()
    with pytest.raises(
        LoaderError, match=r"4 items with 4 entries each, in a batch of 4 rows(.|\n)*fa\.data\.Rows"
    ):
        cut(batch, [2, 2])
    assert cut(batch, [4, 0])[0] is not None  # whole, either way


def test_rows_say_what_they_are():
    first, second = cut({"x": torch.ones(4), "boxes": Rows([box(4) + i for i in range(4)])}, [2, 2])
    assert [one[0].item() for one in (*first["boxes"], *second["boxes"])] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(lambda n: [torch.arange(n), torch.arange(n)], id="list"),  # a TensorDataset of x and y
        pytest.param(lambda n: (torch.arange(n), torch.arange(n)), id="tuple"),
        pytest.param(lambda n: [{"x": torch.arange(n)}, {"x": torch.arange(n)}], id="dicts"),
        pytest.param(lambda n: {"x": torch.arange(n), "names": [("a", "b")[:n], ("c", "d")[:n]]}, id="names"),
        pytest.param(lambda n: {"x": torch.arange(n), "size": [3, 4][:n]}, id="size"),
    ],
)
def test_batches_of_two_rows_and_two_columns_are_cut(batch):
    assert rows_of(cut(batch(2), [1, 1])[1]) == 1


def test_a_batch_of_another_size_settles_what_a_list_is():
    """Pairs of tensors in each sample, as collate makes them, and a last batch of two rows."""

    def collated(n):
        return {"image": torch.arange(n), "corner": [torch.arange(n), torch.arange(n)]}

    cut(collated(5), [3, 2])
    assert cut(collated(2), [1, 1])[1]["corner"][0].tolist() == [1]


META = {
    "dicts": lambda n: [{"id": i} for i in range(n)],
    "tuples": lambda n: [(i, "a") for i in range(n)],
    "pairs of numbers": lambda n: [(i, i) for i in range(n)],
    "none": lambda n: [None] * n,
    "some": lambda n: [None if i % 2 else {"id": i} for i in range(n)],
    "nested": lambda n: [{"id": {"of": [{"i": i}, {"i": 2}]}, "tags": ()} for i in range(n)],
    "0-d": lambda n: [torch.tensor(i) for i in range(n)],
    "shapes": lambda n: [torch.ones(i).shape for i in range(n)],
    "a tuple of dicts": lambda n: tuple({"id": i} for i in range(n)),
    "mappings": lambda n: [UserDict(id=i) for i in range(n)],
}


@pytest.mark.parametrize("within", [dict, lambda **columns: tuple(columns.values())], ids=["dict", "tuple"])
@pytest.mark.parametrize("kind", [kind for kind in META if kind != "nested"])
def test_a_list_without_tensors_is_a_column(kind, within):
    """It went whole into each part: row 6 was paired with the metadata of row 4."""
    make = META[kind]
    whole = within(x=torch.arange(8), meta=make(8))
    first, second = cut(whole, [6, 2])
    at = "meta" if isinstance(whole, dict) else 1
    assert (len(first[at]), second[at]) == (6, make(8)[6:])
    assert join([first, second])[at] == make(8)
    with pytest.raises(LoaderError, match=r"(?s)meta: 3.*fa\.data\.Rows.*fa\.data\.Shared"):
        rows_of({"x": torch.arange(8), "meta": make(3)})


def test_lists_of_lists_raise_whatever_their_length():
    for n in (2, 3, 4):
        batch = {"x": torch.ones(n), "meta": META["nested"](n)}
        with pytest.raises(LoaderError, match=r"fa\.data\.Rows"):
            cut(batch, [1, n - 1])


def test_a_list_of_records_alone_is_counted():
    assert rows_of([{"text": "a"}, {"text": "b"}, {"text": "c"}]) == 3


def test_a_shared_list_goes_to_each_part():
    shared = Shared([torch.ones(10), {"names": ["a", "b"]}])
    first, second = cut({"x": torch.ones(4), "of all": shared}, [3, 1])
    assert first["of all"] is second["of all"] is shared
    assert join([first, second])["of all"] is shared
    moved = tree.to(shared, torch.device("meta"))
    assert (type(moved), moved[0].device.type) == (Shared, "meta")


@pytest.mark.parametrize("kind", [tuple, list])
@pytest.mark.parametrize("boxes", [2, 3, 4])
def test_pictures_and_their_boxes_are_no_rows(kind, boxes):
    """With as many boxes as channels, 3 rows were counted in a batch of 4 pictures."""
    targets = [{"boxes": torch.ones(boxes, 4), "labels": torch.ones(boxes)} for _ in range(4)]
    images = [torch.ones(3, 8, 8) for _ in range(4)]
    with pytest.raises(LoaderError, match=r"fa\.data\.Rows"):
        rows_of((kind(images), kind(targets)))
    assert rows_of((Rows(images), Rows(targets))) == 4


def jagged(*lengths):
    rows = [torch.full((length, 2), float(length)) for length in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


class TestNested:
    """Rows of different lengths in one tensor: `accumulate` raised torch's own error."""

    def test_parts_and_the_whole_again(self):
        batch = {"x": jagged(2, 4, 1, 3), "y": torch.arange(4)}
        first, second = cut(batch, [3, 1])
        assert [len(row) for row in first["x"].unbind()] == [2, 4, 1]
        assert [len(row) for row in second["x"].unbind()] == [3]
        assert [len(row) for row in join([first, second])["x"].unbind()] == [2, 4, 1, 3]

    def test_a_part_without_rows_raises(self):
        with pytest.raises(
            MicroBatchError, match=r"nested tensor of 2 rows can't be cut into parts of \[2, 0\]"
        ):
            cut({"x": jagged(2, 4)}, [2, 0])

    def test_accumulation_trains_as_the_whole_batch(self):
        def loss(model, batch):
            return fa.Mean(model(batch).values().square().sum(), weight=batch.size(0))

        states = []
        for step in (loss, fa.accumulate(loss, 2)):
            with fa.start(device="cpu"):
                model = fa.distribute(lambda: torch.nn.Linear(2, 1), "local")
                train_step = fa.train_step(step, model=model, optimizer=fa.sgd(0.01))
                state, _ = train_step(train_step.init(seed=0), jagged(2, 4, 1, 3))
                states.append(state.params["weight"].detach().clone())
        torch.testing.assert_close(states[0], states[1])
