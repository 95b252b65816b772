"""Collectives and operations of an estimate against those of real ranks."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fnaccel as fa
from fnaccel import errors
from fnaccel.estimate.work import Work
from fnaccel.testing import count_collectives
from tests.estimate.models import GPT, Llama, Perceptron, loss_fn, step_of, tokens_of
from tests.estimate.test_training import LLAMA_PLAN


def estimated(step, model, strategy, ranks):
    return fa.estimate.training(
        step,
        model=fa.distribute(model, strategy),
        optimizer=fa.sgd(0.1),
        batch=tokens_of("meta"),
        ranks=ranks,
    )


class Sent(torch.utils._python_dispatch.TorchDispatchMode):
    """Bytes of the largest tensor of each collective, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.work = Work()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.work.observe(func, args, kwargs or {}, result)
        return result


def sent_in(step, model, strategy):
    """Collectives by kind: how many, and the bytes of them that Python sees (DDP's reducer is C++)."""
    train_step = fa.train_step(step, model=fa.distribute(model, strategy), optimizer=fa.sgd(0.1))
    state, tokens = train_step.init(seed=0), tokens_of()
    state, _ = train_step(state, tokens)
    with Sent() as sent:
        state, _ = train_step(state, tokens)
    with count_collectives() as counted:
        train_step(state, tokens)
    sizes = Counter()
    for (_, kind), size in sent.work.sizes.items():
        sizes[kind] += size
    return dict(counted.counts), dict(sizes)


POSITIONS = 16
"""Bytes by which ranks compare the positions of their batches. An estimate has one rank only."""

ROWS = [
    (2, "ddp", GPT, {}),
    (2, "fsdp", GPT, {"precision": "bf16"}),
    (2, "fsdp", Perceptron, {}),
    (2, "fsdp", GPT, {"accumulate": 4, "remat": True}),
    (4, "hsdp(2, 2)", GPT, {"remat": True}),
    (2, fa.tensor(2, LLAMA_PLAN), Llama, {}),
    (4, fa.fsdp(2) * fa.tensor(2, LLAMA_PLAN), Llama, {"remat": True}),
]


@pytest.mark.long_except(r"2-ddp")
@pytest.mark.parametrize(("ranks", "strategy", "model", "options"), ROWS, ids=str)
def test_collectives_of_a_step(pools, ranks, strategy, model, options):
    step = step_of(**options)
    counts, sizes = pools.run(ranks, sent_in, step, model, strategy)[0]
    work = estimated(step, model, strategy, ranks).work
    found, found_sizes = Counter(), Counter()
    for (_, kind), count in work.counts.items():
        found[kind] += count
    for (_, kind), size in work.sizes.items():
        found_sizes[kind] += size
    assert dict(found) == counts
    if strategy != "ddp":
        for kind, size in sizes.items():
            own = POSITIONS if kind == "all_reduce" else 0
            assert found_sizes[kind] == pytest.approx(size - own, rel=0.01, abs=16), kind


@pytest.mark.long_except(r"^(ddp|fsdp)")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2", "hsdp(2, 2)"])
def test_a_plan_counts_the_same(strategy):
    """`fnaccel plan` has no batch to run: its collectives are formulas."""
    work = estimated(loss_fn, GPT, strategy, 4).work
    counts, sizes = Counter(), Counter()
    for row in fa.strategies.footprint(GPT, strategy, 4).traffic:
        counts[row.axis, row.kind] += row.count
        sizes[row.axis, row.kind] += row.size
    assert (work.counts, work.sizes) == (counts, sizes)


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"remat": True}, {"accumulate": 4}], ids=str)
def test_operations_of_blocks_that_are_not_traced(options):
    def run(blocks):
        step = step_of(**options)
        return estimated(step, lambda: GPT(blocks), "local", 1).work.flops

    assert run(12) - run(11) == run(4) - run(3)
    model = GPT(7)
    with FlopCounterMode(display=False) as counter:
        loss_fn(model, tokens_of()).total.backward()
    if not options:
        assert run(7) == counter.get_total_flops()


def test_the_least_time():
    estimate = estimated(loss_fn, GPT, "hsdp(4, 8)", 32)
    rates = fa.estimate.Rates(flops=1e12, link=1e9, network=1e8, per_machine=8)
    least = fa.estimate.least_time(estimate, rates)
    sizes = estimate.work.sizes
    within = (sizes["shard", "all_gather"] + sizes["shard", "reduce_scatter"]) * 7 / 8
    between = 2 * sizes["dp_replicate", "all_reduce"] * 3 / 4 + 2 * 16 * 31 / 32
    assert least.links == pytest.approx({"link": within / 1e9, "network": between / 1e8})
    assert least.compute == estimate.work.flops / 1e12
    assert least.total == max(least.compute, *least.links.values())
    assert str(least).startswith("at least ")
    with pytest.raises(errors.ArgumentError, match="link=0 is no rate"):
        fa.estimate.Rates(flops=1, link=0, network=1)
