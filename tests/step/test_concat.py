"""`fa.Concat` over batches and ranks: rows of different widths, strings and objects, and what is no row at all."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa
from fnaccel.errors import LossError, RankMismatchError

ROWS = 11  # in batches of 4: two ranks get 2 and 2, and 2 and 1; three ranks get a filler
DATA = torch.arange(float(ROWS))[:, None]


def build(loss=lambda model, batch: model(batch[0]).sum(), **options):
    strategy = options.pop("strategy", "ddp")
    return fa.train_step(
        loss, model=fa.distribute(lambda: nn.Linear(1, 1), strategy), optimizer=fa.sgd(0.0), **options
    )


def evaluated(metric):
    train_step = build()
    shards = fa.shard(DataLoader(TensorDataset(DATA), batch_size=4))
    return fa.evaluate(train_step, train_step.init(), METRICS[metric], shards)


def ids(batch):
    return [int(row) for row in batch[0][:, 0]]


def ragged(batch):
    """Rows that are as wide as the largest id of their batch on their rank, plus one."""
    width = max(ids(batch)) + 1
    return torch.stack([torch.full((width,), float(row)) for row in ids(batch)])


METRICS = {
    "padded": lambda model, batch: fa.Concat(ragged(batch), pad=-100),
    "unpadded": lambda model, batch: fa.Concat(ragged(batch)),
    "two dims": lambda model, batch: fa.Concat(ragged(batch)[:, :, None].expand(-1, -1, 2 + len(batch[0])), pad=0),
    "other dims": lambda model, batch: fa.Concat(ragged(batch).squeeze() if 0 in ids(batch) else batch[0][:, 0]),
    "strings": lambda model, batch: {"text": fa.Concat([f"row {row}" for row in ids(batch)]), "n": fa.Sum(1)},
    "objects": lambda model, batch: fa.Concat(tuple({"row": row} for row in ids(batch))),
    "numpy strings": lambda model, batch: fa.Concat(np.array([str(row) for row in ids(batch)])),
    "numpy": lambda model, batch: fa.Concat(np.array(ids(batch))),
    "a 0-d tensor": lambda model, batch: fa.Concat(batch[0].sum()),
    "a str": lambda model, batch: fa.Concat("text"),
    "a bare str": lambda model, batch: {"text": "text"},
    "lists and tensors": lambda model, batch: fa.Concat([1] * len(batch[0]) if 0 in ids(batch) else batch[0]),
}  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rows_of_any_width_are_padded_to_the_widest(pools, ranks):
    for rows in pools.run(ranks, evaluated, "padded"):
        assert rows.shape == (ROWS, ROWS), "the widest of all batches and ranks"
        assert rows[:, 0].tolist() == list(range(ROWS)), "in the order of the samples"
        for at, row in enumerate(rows.tolist()):
            width = row.count(float(at))
            assert width > at
            assert row == [float(at)] * width + [-100.0] * (ROWS - width)


def test_a_precision_keeps_the_padding():
    with fa.start(device="cpu"):
        step = fa.with_precision(lambda model, batch: {"rows": fa.Concat(batch, pad=-100)}, "bf16")
        assert step(None, DATA)["rows"].pad == -100


def test_every_dimension_of_a_row_is_padded(pools):
    for rows in pools.run(2, evaluated, "two dims"):
        assert rows.shape == (ROWS, ROWS, 4)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_objects_are_gathered_as_one_list_in_the_order_of_the_samples(pools, ranks):
    for found in pools.run(ranks, evaluated, "strings"):
        assert found["text"] == [f"row {row}" for row in range(ROWS)]
    for found in pools.run(ranks, evaluated, "objects"):
        assert found == [{"row": row} for row in range(ROWS)]
    for found in pools.run(ranks, evaluated, "numpy strings"):
        assert found == [str(row) for row in range(ROWS)]
    for found in pools.run(ranks, evaluated, "numpy"):
        assert found.tolist() == list(range(ROWS))


def said(metric):
    try:
        evaluated(metric)
    except LossError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("unpadded", "differ in width"),
        ("other dims", "differ in their number of dimensions"),
        ("a 0-d tensor", "fa.Concat holds a 0-d tensor, which has no rows"),
        ("a str", "fa.Concat holds str, which has no rows"),
        ("a bare str", "a str says nothing of how it combines"),
        ("lists and tensors", "a list in one batch and a tensor in another one"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_can_not_be_put_together_says_so_on_every_rank(pools, ranks, metric, message):
    for text in pools.run(ranks, said, metric):
        assert message in text
        assert "\n  where: fa.evaluate\n  fix: " in text


def stepped(kind):
    def loss(model, batch):
        aux = {"rows": AUX[kind](batch)}
        return fa.Mean(model(batch[0]).sum(), weight=len(batch[0]), aux=aux)

    train_step = build(fa.accumulate(loss, 2))
    state = train_step.init()
    (batch,) = fa.shard(DataLoader(TensorDataset(DATA), batch_size=ROWS))
    return train_step(state, batch)[1]["rows"]


AUX = {
    "padded": lambda batch: fa.Concat(ragged(batch), pad=-1),
    "strings": lambda batch: fa.Concat([f"row {row}" for row in ids(batch)]),
    "unpadded": lambda batch: fa.Concat(ragged(batch)),
    "a str": lambda batch: "text",
}


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_aux_of_a_step_takes_the_same_rows(pools, ranks):
    for rows in pools.run(ranks, stepped, "padded"):
        assert rows.shape == (ROWS, ROWS)
        assert rows[:, 0].tolist() == list(range(ROWS))
    for rows in pools.run(ranks, stepped, "strings"):
        assert rows == [f"row {row}" for row in range(ROWS)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_aux_of_a_step_that_can_not_be_put_together(pools, ranks):
    with pytest.raises((LossError, RankMismatchError), match=r"differ in width|ranks hold different trees"):
        pools.run(ranks, stepped, "unpadded")
    with pytest.raises(LossError, match="a str says nothing of how it combines"):
        pools.run(ranks, stepped, "a str")


def test_a_compiled_step_pads_too():
    def loss(model, batch):
        width = 2 + len(batch)
        return fa.Mean(
            model(batch).sum(), weight=len(batch), aux={"rows": fa.Concat(batch.expand(-1, width), pad=7)}
        )

    with fa.start():
        step = fa.compile(fa.accumulate(loss, 2), scope="step", backend="aot_eager")
        train_step = build(step, strategy="local")
        _, metrics = train_step(train_step.init(), torch.zeros(3, 1))
    assert metrics["rows"].tolist() == [[0.0] * 4, [0.0] * 4, [0.0] * 3 + [7.0]]
