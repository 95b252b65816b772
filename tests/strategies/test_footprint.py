"""The footprint of a strategy against what its engine holds and sends."""

from __future__ import annotations

from collections import Counter

import pytest

import fnaccel as fa
from fnaccel import errors
from fnaccel.cli.main import main
from fnaccel.testing import count_collectives
from tests.strategies.tensor.models import CUT_LOGITS, GPT, PLAN, SEQUENCE, loss_fn, rows_of


def held_and_sent(strategy):
    """Bytes of this rank's parameters and slots, and the collectives of a step with one micro-batch."""
    train_step = fa.train_step(loss_fn, model=fa.distribute(GPT, strategy), optimizer=fa.adamw(0.1))
    state = train_step.init(seed=0)

    def local(value):
        return value.to_local() if hasattr(value, "to_local") else value

    held = [
        sum(local(leaf).numel() * local(leaf).element_size() for leaf in fa.tree.leaves(dict(part)))
        for part in (state.params, state.opt)
    ]
    batch = rows_of(0, train_step.mesh.batch_rank)
    state, _ = train_step(state, batch)
    with count_collectives() as counted:
        train_step(state, batch)
    return held, dict(counted.counts)


ROWS = [
    (1, "local"), (2, "ddp"), (4, "fsdp"), (4, "fsdp(reshard_after_forward=False)"), (4, "hsdp(2, 2)"),
    (2, "fsdp(ignore=('head.*', 'blocks.0.*'))"),
    (2, fa.tensor(2, PLAN)), (2, fa.tensor(2, CUT_LOGITS)),
    (2, fa.tensor(2, SEQUENCE, sequence=True)), (4, fa.ddp(2) * fa.tensor(2, PLAN)),
    (4, fa.fsdp(2) * fa.tensor(2, PLAN)), (4, fa.fsdp(2) * fa.tensor(2, CUT_LOGITS)),
    (8, fa.hsdp(2, 2) * fa.tensor(2, PLAN)),
]  # fmt: skip


@pytest.mark.long_except(r"^(?!8)")
@pytest.mark.parametrize(("ranks", "strategy"), ROWS, ids=str)
def test_it_is_what_an_engine_holds_and_sends(pools, ranks, strategy):
    sizes = fa.strategies.footprint(GPT, strategy, ranks, optimizer=fa.adamw(0.1))
    found = pools.run(ranks, held_and_sent, strategy)
    largest = [max(held[part] for held, _ in found) for part in range(2)]
    assert [sizes.parameters, sizes.slots] == largest
    expected = Counter()
    for row in sizes.traffic:
        expected[row.kind] += row.count
    if ranks == 1:
        expected.clear()
    for _, counts in found:
        assert counts == dict(expected)


def test_a_plan_for_sequences_and_for_context():
    """Their gradients of norms are added once a step, and an attention is counted by itself."""
    text = str(fa.strategies.footprint(GPT, fa.tensor(2, SEQUENCE, sequence=True), 2))
    assert "8 reduce_scatter a micro-batch" in text
    text = str(fa.strategies.footprint(GPT, fa.fsdp(2) * fa.context(2), 4))
    assert "all_gather in each attention: 1 all-gather of keys and values" in text


def test_thousands_of_ranks():
    sizes = fa.strategies.footprint(GPT, fa.ddp(64) * fa.fsdp(64) * fa.tensor(4, PLAN), 16_384)
    whole = fa.strategies.footprint(GPT, "local", 1)
    assert whole.parameters / (64 * 4) <= sizes.parameters < whole.parameters / 4
    assert sizes.slots == 0


def test_slots_of_an_optimizer_that_reads_values():
    """torch's Adafactor asks for the number of its step. It keeps a row and a column of each matrix."""
    whole = fa.strategies.footprint(GPT, "local", 1, optimizer=fa.adamw(0.1)).slots
    factored = fa.strategies.footprint(GPT, "local", 1, optimizer=fa.optim.adafactor(0.1)).slots
    assert 0 < factored < whole / 5


def test_mistakes():
    with pytest.raises(errors.ArgumentError, match="a built module was given"):
        fa.strategies.footprint(GPT(), "local", 1)
    with pytest.raises(errors.AxisProductError, match="4 \\* 2 = 8 ranks, and the world has 4"):
        fa.strategies.footprint(GPT, fa.fsdp(4) * fa.tensor(2, PLAN), 4)
    with pytest.raises(errors.ArgumentError, match="which 3 ranks can't divide"):
        fa.strategies.footprint(GPT, fa.tensor(3, PLAN), 3)
    with pytest.raises(errors.CapabilityError, match=r"deepspeed\(stage=2\) lays the model out itself"):
        fa.strategies.footprint(GPT, "deepspeed(2)", 4)
    assert fa.strategies.footprint(GPT, "local", 1, frozen=("*",)).gradients == 0


def test_the_command(capsys):
    loss, model = "tests.strategies.tensor.models:loss_fn", "tests.strategies.tensor.models:GPT"
    flags = ["--model", model, "--ranks", "16", "--per-machine", "8", "--strategy", "ddp(4) * fsdp(4)"]
    ended = main(["plan", loss, *flags])
    out, err = capsys.readouterr()
    assert ended == 0, err
    assert "ddp(4) * fsdp(4): 16 ranks (cpu), dp_replicate=4, dp_shard=4" in out
    assert "reduce_scatter a step" in out
    assert main(["plan", loss, "--model", model, "--ranks", "3", "--strategy", "fsdp(2)"]) == 2
    assert "the world has 3" in capsys.readouterr().err
    assert main(["plan", loss, "--model", model, "--ranks", "8", "--per-machine", "3"]) == 2
    assert "do not make machines of 3" in capsys.readouterr().err
