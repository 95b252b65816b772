"""Parameters without a gradient in some updates (heads of tasks): raw PyTorch's numbers, a warning, or an error."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import fnaccel as fa
from fnaccel import errors
from fnaccel.testing import assert_close
from fnaccel.world.world import current

STEPS = 7
ROWS = 4
RUNS = [("local", 1), ("ddp(unused_parameters=True)", 2), ("fsdp", 2)]
SGD = {"momentum": 0.9, "weight_decay": 0.1}


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(3, 6)
        self.heads = nn.ModuleList(nn.Linear(6, 1) for _ in range(2))

    def forward(self, x, task):
        return self.heads[task](torch.tanh(self.inp(x)))


def loss_fn(model, batch):
    x, y, task = batch
    return fa.Mean((model(x, task) - y).square().sum(), weight=len(y))


def batch_of(step, rank, task=None):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(ROWS, 3, generator=generator)
    return x, x.sum(1, keepdim=True).sin(), int(step % 3 == 2) if task is None else task


def by_hand(ranks, optimizer, **options):
    torch.manual_seed(0)
    model = Heads()
    rule = optimizer(model.parameters(), lr=0.02, **options)
    for step in range(STEPS):
        rule.zero_grad()  # to None
        for rank in range(ranks):
            (loss_fn(model, batch_of(step, rank)).total / (ROWS * ranks)).backward()
        rule.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def trained(strategy, optimizer, compiled=False):
    """The parameters, and the warnings."""
    step = fa.compile(loss_fn, backend="eager") if compiled else loss_fn
    train_step = fa.train_step(step, model=fa.distribute(Heads, strategy), optimizer=optimizer)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state = train_step.init(seed=0)
            for number in range(STEPS):
                state, _ = train_step(state, batch_of(number, current().rank))
        texts = [str(each.message) for each in caught if "some updates only" in str(each.message)]
        return {name: fa.tree.whole(value).detach().clone() for name, value in state.params.items()}, texts
    finally:
        train_step.close()


@pytest.mark.parametrize(("strategy", "ranks"), RUNS)
@pytest.mark.parametrize("name", ["from_torch", "sgd"])
def test_others_equal_the_raw_loop_and_say_nothing(pools, strategy, ranks, name):
    rule, options = (torch.optim.AdamW, {}) if name == "from_torch" else (torch.optim.SGD, SGD)
    optimizer = fa.sgd(0.02, **SGD) if name == "sgd" else fa.optim.from_torch(rule, lr=0.02)
    for params, texts in pools.run(ranks, trained, strategy, optimizer):
        assert_close(params, by_hand(ranks, rule, **options))
        assert not texts


COUNTED = {
    "adam": fa.adam(0.02),
    "adamw": fa.adamw(0.02),
    "chain": fa.optim.chain(fa.optim.masked(fa.optim.scale_by_adam(), "*"), lr=0.02),
    "groups": fa.adamw(0.02, groups={"*bias": {"weight_decay": 0.0}}),
}


def said_once(results):
    (_, texts), *others = results
    assert len(texts) == 1
    assert texts[0].startswith("heads.0.weight, heads.0.bias, heads.1.weight, heads.1.bias get a gradient")
    assert "fa.optim.from_torch(torch.optim.AdamW" in texts[0]
    assert not any(texts for _, texts in others)


@pytest.mark.parametrize(("strategy", "ranks"), RUNS)
@pytest.mark.parametrize("name", COUNTED)
def test_a_bias_correction_that_counts_otherwise_is_said_once(pools, strategy, ranks, name):
    """It was 2.4e-2 off after 40 updates without a word."""
    said_once(pools.run(ranks, trained, strategy, COUNTED[name]))


def test_a_captured_step_says_so(pools):
    said_once(pools.run(1, trained, "local", fa.adamw(0.02), True))


@pytest.mark.parametrize("name", ["sgd", pytest.param("adamw", marks=pytest.mark.long)])
@pytest.mark.filterwarnings("ignore:.*some updates only")
def test_a_captured_step_refuses_a_parameter_that_is_used_later(pools, name):
    """It stayed at its first values."""
    with pytest.raises(
        errors.CapabilityError, match=r"no rank used .* one of heads\.1\.weight, heads\.1\.bias"
    ):
        pools.run(2, trained, "fsdp", getattr(fa, name)(0.02), True)


def test_a_later_start_is_no_missing_gradient(pools):
    late = fa.optim.optimizer_groups([("inp*", fa.optim.starting_at(3, fa.adamw(0.02))), ("*", fa.sgd(0.1))])
    assert not pools.run(1, trained, "local", late)[0][1]


def resumed(strategy, tasks, folder):
    """The warnings of a run of one process for each (task, updates)."""
    texts = []
    for number, (task, steps) in enumerate(tasks):
        model = fa.distribute(Heads, strategy)
        train_step = fa.train_step(loss_fn, model=model, optimizer=fa.adamw(0.02))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state = train_step.init(seed=0)
            state = fa.restore(folder, like=state) if number else state
            for step in range(steps):
                state, _ = train_step(state, batch_of(step, current().rank, task))
        fa.save(folder, state)
        train_step.close()
        texts.append(sum("some updates only" in str(each.message) for each in caught))
    return texts


@pytest.mark.parametrize(("strategy", "ranks"), [("local", 1), ("fsdp", 2)])
@pytest.mark.parametrize(
    ("tasks", "said"), [([0, 0], [0, 0]), ([0, 1], [0, 1]), ([1, 0, 0], [0, 1, 1])], ids=str
)
def test_a_run_that_is_resumed_with_another_head_says_so(pools, tmp_path, strategy, ranks, tasks, said):
    """A parameter that never gets a gradient is no difference."""
    assert pools.run(ranks, resumed, strategy, [(task, 3) for task in tasks], tmp_path / "run")[0] == said
