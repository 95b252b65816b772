"""`fa.fsdp(init="module:function")`: a function fills one module after the other, and ranks keep their parts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fnaccel as fa
from fnaccel.errors import ArgumentError, CapabilityError
from tests.tiny_models import whole_params

HERE = "tests.strategies.test_filled"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """With a tied head, a parameter of its own, and a buffer that has values."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.position = nn.Parameter(torch.zeros(5, 8))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(3.0))

    def forward(self, tokens):
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


class OfTorch(nn.Module):
    """Of torch's own layers alone."""

    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(10, 8), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 10)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def fill(module):
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02 * module.in_features**0.5)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, Net):
        nn.init.normal_(module.position, std=0.1)
    else:
        module.reset_parameters()


def reset(module):
    module.reset_parameters()


def forgetful(module):
    if isinstance(module, nn.Linear | nn.Embedding):
        module.reset_parameters()


def loss_fn(model, batch):
    total = nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten(), reduction="sum")
    return fa.Mean(total, weight=batch.numel())


def started(make, strategy):
    """The values at the start, the loss of a step, and what comes out of torch's generator after `init`."""
    train_step = fa.train_step(loss_fn, model=fa.distribute(make, strategy), optimizer=fa.sgd(0.1))
    torch.manual_seed(7)
    state = train_step.init(seed=3)
    drawn, params = torch.rand(2), whole_params(state)
    parts = {
        name: tuple(getattr(value, "to_local", lambda v=value: v)().shape)
        for name, value in state.params.items()
    }
    _, metrics = train_step(state, torch.arange(20).view(4, 5) % 10)
    return params, float(metrics["loss"]), drawn, parts


def by_hand(fill, make):
    """The function called on a whole model, whose parameters have no values before."""
    with torch.device("meta"):
        model = make()
    scale = dict(model.named_buffers())
    model.to_empty(device="cpu")
    for value in scale:
        model.get_buffer(value).fill_(3.0)
    if hasattr(model, "position"):
        model.head.weight = model.embed.weight  # to_empty has parted them
    torch.manual_seed(3)
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            fill(module)
    return {name: value.detach().clone() for name, value in model.named_parameters()}


@pytest.mark.long_except(r"fsdp\(2|-fsdp\(init")
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("fsdp(init='%s')", 1), ("fsdp(init='%s')", 2), ("fsdp(init='%s')", 3), ("hsdp(2, 2, init='%s')", 4),
        ("fsdp(init='%s', offload=True)", 2), ("fsdp(init='%s', ignore='position')", 2),
        ("fsdp(2, init='%s') * tensor(2, plan={'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'})", 4),
        ("fsdp(2, init='%s') * tensor(2, plan={'embed': 'vocab', 'head': 'colwise_gather'})", 4),
    ],
)  # fmt: skip
def test_any_number_of_ranks_draws_the_values_of_a_whole_model(pools, strategy, ranks):
    expected = by_hand(fill, Net)
    torch.manual_seed(7)
    drawn = torch.rand(2)
    found = pools.run(ranks, started, Net, strategy % f"{HERE}:fill")
    for params, loss, after, _ in found:
        torch.testing.assert_close(params, expected, rtol=0, atol=0)
        assert loss == pytest.approx(found[0][1])
        assert torch.equal(after, drawn)  # the script's own random numbers go on as they would
    if ranks > 1:
        assert found[0][3]["blocks.0.up.weight"] != tuple(expected["blocks.0.up.weight"].shape)


def test_layers_of_torch_get_the_values_of_the_seed(pools):
    seeded = pools.run(2, started, OfTorch, "fsdp")[0]
    filled = pools.run(2, started, OfTorch, f"fsdp(init='{HERE}:reset')")[0]
    torch.testing.assert_close(filled[0], seeded[0], rtol=0, atol=0)
    assert filled[1] == seeded[1]


def seeded_twice():
    """The same, with other seeds."""
    step = fa.train_step(
        loss_fn, model=fa.distribute(Net, fa.fsdp(init=f"{HERE}:fill")), optimizer=fa.sgd(0.1)
    )
    first = whole_params(step.init(seed=1))
    step.close()
    step = fa.train_step(
        loss_fn, model=fa.distribute(Net, fa.fsdp(init=f"{HERE}:fill")), optimizer=fa.sgd(0.1)
    )
    return first, whole_params(step.init(seed=2))


def test_seeds_differ(pools):
    first, second = pools.run(2, seeded_twice)[0]
    assert not torch.equal(first["position"], second["position"])


def wide():
    return nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(8)))


storages = fa.estimate.LiveStorages()


def reset_and_begin(module):
    """Like `reset`. What factories make before has shapes alone, and is counted as if it had memory."""
    if storages.peak > 3 * storages.live:
        storages.begin()
    module.reset_parameters()


def most(init):
    """Bytes that lived at a time in `init`."""
    global storages
    storages = fa.estimate.LiveStorages()
    model = fa.distribute(wide, fa.fsdp(init=init, units=("Linear",)))
    train_step = fa.train_step(lambda model, batch: model(batch).sum(), model=model, optimizer=fa.sgd(0.1))
    with storages:
        train_step.init()
    return storages.peak


def test_no_rank_holds_more_than_its_parts_and_one_module(pools):
    one = 128 * 128 * 4
    assert min(pools.run(4, most, "seeded")) >= 8 * one
    for peak in pools.run(4, most, f"{HERE}:reset_and_begin"):
        assert 3 * one <= peak <= 5 * one  # its parts, a module, its mask of NaN, and a copy of the part


@pytest.mark.parametrize(
    ("strategy", "ranks", "kind", "text"),
    [
        (f"fsdp(init='{HERE}:forgetful')", 2, ArgumentError, "left position without values"),
        (f"fsdp(init='{HERE}:nothing')", 2, ArgumentError, "can't be imported: .*nothing"),
        ("fsdp(init='no.such.module:fill')", 2, ArgumentError, "can't be imported"),
        ("fsdp(init='filled')", 1, fa.errors.UnknownNameError, "no init is called 'filled'"),
        (f"pipeline(2) * fsdp(2, init='{HERE}:fill')", 4, CapabilityError, "makes a whole model, and a stage"),
    ],
)  # fmt: skip
def test_a_mistake_raises_by_name(pools, strategy, ranks, kind, text):
    with pytest.raises(kind, match=text):
        pools.run(ranks, started, Net, strategy)
