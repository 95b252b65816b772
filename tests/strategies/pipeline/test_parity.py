"""Pipelines against plain PyTorch and against one process: losses, norms that clip, parameters, buffers."""

from __future__ import annotations

from itertools import product

import pytest
import torch

import fnaccel as fa
from fnaccel.testing import assert_close, oracle_run
from tests.parity.rows import RATES, Net, Row, global_batches, run_row
from tests.parity.rows import loss_fn as row_loss
from tests.strategies.context import model as sequences
from tests.strategies.pipeline import models
from tests.strategies.pipeline.models import CLIP, RATE, STEPS, loss_fn, rows_of, trained
from tests.strategies.tensor.models import PLAN

LAYOUTS = {
    "pipeline(2)": (2, 1),
    "pipeline(2, schedule='gpipe')": (2, 1),
    "pipeline(2) * ddp(2)": (4, 2),
    "pipeline(2) * fsdp(2)": (4, 2),
    "fsdp(2, reshard_after_forward=False) * pipeline(2)": (4, 2),
}
MATRIX = [
    Row(strategy=strategy, precision=precision, accumulate=accumulate, clip=clip, ranks=LAYOUTS[strategy][0])
    for strategy, precision, accumulate, clip in product(LAYOUTS, ("fp32", "bf16"), (1, 3), (None, 0.25))
]
MORE = [
    Row(strategy=strategy, ranks=LAYOUTS[strategy][0], accumulate=3, clip=0.25, **options)
    for strategy in LAYOUTS
    for options in (
        {"optimizer": "adamw"},
        {"precision": "fp64"},
        {"remat": True},
        {"ema": True, "optimizer": "adamw"},
    )
]


@pytest.mark.long_except(r"^pipeline\(2\)-fp32|fsdp\(2\)-fp32-acc3-clip")
@pytest.mark.parametrize("row", [*MATRIX, *MORE], ids=str)
def test_each_cell_of_the_matrix_equals_the_raw_loop(pools, row):
    oracle = oracle_run(
        Net,
        row_loss,
        global_batches(LAYOUTS[row.strategy][1]),
        lr=RATES[row.optimizer],
        optimizer=row.optimizer,
        clip=row.clip,
        precision=row.precision,
    )
    results = pools.run(row.ranks, run_row, row)
    for result in results:
        assert_close(result["losses"], oracle.losses, precision=row.precision)
        if row.clip is not None:
            assert_close(result["norms"], oracle.grad_norms, precision=row.precision)
        assert_close(result["params"], oracle.params, precision=row.precision)
        assert result["losses"] == results[0]["losses"], "metrics are on every rank"


INTERLEAVED = "pipeline(2, schedule='interleaved', virtual=2)"
ZERO_BUBBLE = "pipeline(2, schedule='zero_bubble', virtual=2)"
ALONE = {
    "two stages": (2, "pipeline(2)"),
    "four stages": (4, "pipeline(4)"),
    "all forwards first": (4, "pipeline(4, schedule='gpipe')"),
    "two stages a rank": (2, INTERLEAVED),
    "zero-bubble": (2, ZERO_BUBBLE),
    "stages by path": (2, "pipeline(2, split=('blocks.3',))"),
    "the embedding alone": (2, ""),
}
MODELS = {
    "gpt": models.deep_gpt,
    "tied": models.TiedGPT,
    "dropout": models.Dropping,
    "a mask between": models.Between,
    "copied layers": models.Copied,
    "stored numbers": models.Reported,
    "moving buffers": models.Moving,
    "two activations": models.Reversible,
    "values beside": models.Experts,
    "first half frozen": models.Frozen,
    "middle frozen": models.frozen_middle,
}


@pytest.mark.long_except(
    "^(gpt|tied|dropout|moving buffers|values beside|a mask between|copied layers|stored numbers)-two stages$|^dropout-two stages a|^(gpt|tied|dropout|values beside|first half frozen)-zero|^(gpt|tied|moving buffers|values beside)-four|^moving buffers-two stages a"
)
@pytest.mark.parametrize("layout", ALONE)
@pytest.mark.parametrize("model", MODELS)
def test_a_pipeline_computes_what_one_process_does(pools, model, layout):
    """Also with masks of dropout, and buffers, to the bit of what fp32 sums leave."""
    ranks, strategy = ALONE[layout]
    if layout == "the embedding alone":
        first = [
            name for name, _ in MODELS[model]().named_children() if name in ("embed", "position", "first")
        ]
        strategy = fa.pipeline(2, split=dict.fromkeys(first, 0) | {"blocks.0": 1})
    (expected,) = pools.run(1, trained, "local", MODELS[model])
    for losses, norms, params, buffers, score, tokens in pools.run(ranks, trained, strategy, MODELS[model]):
        assert_close(losses, expected[0])
        assert_close(norms, expected[1])
        assert_close(params, expected[2])
        assert_close(buffers, expected[3])
        assert score == pytest.approx(expected[4], rel=1e-6)
        assert tokens == expected[5]


PRODUCTS = {
    "ddp": (4, "pipeline(2) * ddp(2)", 2),
    "fsdp": (4, "pipeline(2) * fsdp(2)", 2),
    "four rounds with fsdp": (4, f"{INTERLEAVED} * fsdp(2)", 2),
    "zero-bubble with ddp": (4, f"{ZERO_BUBBLE} * ddp(2)", 2),
    "zero-bubble with tensor": (4, fa.strategy(ZERO_BUBBLE) * fa.tensor(2, PLAN), 1),
    "tensor": (4, fa.pipeline(2) * fa.tensor(2, PLAN), 1),
    "sequence": (
        4,
        fa.pipeline(2)
        * fa.tensor(
            2,
            {"blocks.0": "scatter_input", "blocks.3": "gather_output", "blocks.*.norm?": "sequence"} | PLAN,
            sequence=True,
        ),
        1,
    ),
    "hsdp": (8, "pipeline(2) * hsdp(2, 2)", 4),
    "ddp and tensor": (8, fa.pipeline(2) * fa.ddp(2) * fa.tensor(2, PLAN), 2),
}


@pytest.mark.long_except("^(ddp|fsdp|tensor|zero-bubble with ddp)$")
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_equals_plain_pytorch(pools, name):
    ranks, strategy, parts = PRODUCTS[name]
    batches = [[rows_of(step, part) for part in range(parts)] for step in range(STEPS)]
    oracle = oracle_run(models.deep_gpt, loss_fn, batches, lr=RATE, clip=CLIP)
    for losses, norms, params, *_ in pools.run(ranks, trained, strategy, models.deep_gpt):
        assert_close(losses, oracle.losses)
        assert_close(norms, oracle.grad_norms)
        assert_close(params, oracle.params)


def test_replicas_that_train_apart_have_stages_each(pools):
    replicas = "local_sgd(2, every=2)"
    expected = pools.run(2, trained, replicas, models.deep_gpt)
    for rank, result in enumerate(pools.run(4, trained, f"pipeline(2) * {replicas}", models.deep_gpt)):
        for found, wanted in zip(result[:3], expected[rank % 2][:3], strict=True):
            assert_close(found, wanted)


def test_dropout_repeats_to_the_bit(pools):
    first = pools.run(2, trained, "pipeline(2)", models.Dropping)
    again = pools.run(2, trained, "pipeline(2)", models.Dropping)
    for one, other in zip(first, again, strict=True):
        assert one[0] == other[0]
        assert all(torch.equal(one[2][name], other[2][name]) for name in one[2])


@pytest.mark.parametrize("micro_batches", [1, 2, 7])
def test_fewer_micro_batches_than_stages_and_more(pools, micro_batches):
    (expected,) = pools.run(1, trained, "local", models.deep_gpt, micro_batches)
    for losses, _, params, *_ in pools.run(4, trained, "pipeline(4)", models.deep_gpt, micro_batches):
        assert_close(losses, expected[0])
        assert_close(params, expected[2])


CONTEXT = "pipeline(2) * context(2, cut={'tokens': 1, 'labels': 1, 'positions': 1, 'keys': None}"


@pytest.mark.long_except("gather")
@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (4, f"{CONTEXT})"),
        (4, f"{CONTEXT}, method='ring')"),
        (4, f"{CONTEXT}, method='heads')"),
        (8, f"{CONTEXT}) * fsdp(2)"),
    ],
    ids=["gather", "ring", "heads", "fsdp"],
)
def test_stages_share_sequences(pools, ranks, text):
    parts = ranks // 4
    batches = [[sequences.batch_of(step, part) for part in range(parts)] for step in range(STEPS)]
    oracle = oracle_run(sequences.Net, sequences.loss_fn, batches, lr=0.3, clip=0.25)
    for losses, norms, params, *_ in pools.run(ranks, sequences.trained, text, clip=0.25, accumulate=2):
        assert_close(losses, oracle.losses)
        assert_close(norms, oracle.grad_norms)
        assert_close(params, oracle.params)
