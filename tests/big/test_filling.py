"""Maps whose accelerators can't hold the model: as much there as Accelerate puts there, and right outputs."""

from __future__ import annotations

import random

import pytest
import torch
from accelerate import infer_auto_device_map
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fnaccel as fa
from fnaccel.big.device_map import place_of
from tests.big.models import Block
from tests.big.movers import Devices, Simulated, device_of


class Tree(nn.Module):
    """Modules in modules. Nothing calls them."""

    def __init__(self, children):
        super().__init__()
        for index, child in enumerate(children):
            self.add_module(f"m{index}", child)


class Whole(Tree):
    """A tree that is not split."""


def a_leaf(draw):
    width, out = draw.randint(1, 12), draw.randint(1, 12)
    make = draw.choice([nn.Linear, lambda *sizes: nn.Linear(*sizes, bias=False), None, nn.LayerNorm])
    return (
        nn.BatchNorm1d(width) if make is None else make(width) if make is nn.LayerNorm else make(width, out)
    )


def a_tree(draw, depth):
    children = [
        a_tree(draw, depth - 1) if depth and draw.random() < 0.5 else a_leaf(draw)
        for _ in range(draw.randint(1, 4))
    ]
    return draw.choice([Tree, Tree, Whole])(children)


def a_model(draw):
    """A tree, with a tied weight or bias in some."""
    model = Tree([a_tree(draw, 2) for _ in range(draw.randint(1, 4))])
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if len(linear) > 1 and draw.random() < 0.4:
        first, second = draw.sample(linear, 2)
        if first.weight.shape == second.weight.shape:
            second.weight = first.weight
        elif None not in (first.bias, second.bias) and first.bias.shape == second.bias.shape:
            second.bias = first.bias
    return model


def on_accelerators(places, model):
    """Bytes of a map on accelerators, or None if it takes a tied tensor apart."""
    homes, size = {}, {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        homes.setdefault(id(tensor), set()).add(places.get(place_of(name, places)))
        size[id(tensor)] = tensor.nbytes
    if any(len(devices) > 1 for devices in homes.values()):
        return None
    return sum(size[key] for key, devices in homes.items() if isinstance(*devices, int))


def theirs(model, budget, classes):
    """Bytes that Accelerate puts on accelerators. Ties of some models are an IndexError there, or torn."""
    try:
        places = infer_auto_device_map(
            model, dict(budget), classes, fallback_allocation=True, offload_buffers=True
        )
    except IndexError:
        return None
    return on_accelerators(places, model)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_as_much_on_accelerators_as_accelerate_puts_there():
    compared = more = seed = 0
    while compared < 200:
        draw = random.Random(seed)
        seed += 1
        model = a_model(draw)
        total = fa.big.sizes(model).total
        budget = {
            index: draw.randint(0, int(total * draw.choice([0.3, 0.6, 1])))
            for index in range(draw.randint(1, 3))
        }
        budget["cpu"] = 10 * total
        has_whole = any(isinstance(module, Whole) for module in model.modules())
        classes = ["Whole"] if has_whole and draw.random() < 0.6 else []
        least = theirs(model, budget, classes)
        if least is None:
            continue
        placed = fa.big.device_map(model, budget, no_split=classes, offload_buffers=True)
        count = on_accelerators(placed.places, model)
        assert count >= least, (seed - 1, budget, classes)
        compared, more = compared + 1, more + (count > least)
    assert more > 50
    assert seed < 220  # almost all are compared


class Stack(nn.Module):
    """Residual blocks between layers of other sizes."""

    def __init__(self, widths, tied):
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.blocks = nn.ModuleList(Block(64) for _ in widths)
        self.between = nn.ModuleList(
            nn.Sequential(nn.Linear(64, width), nn.Linear(width, 64)) for width in widths
        )
        self.norm = nn.BatchNorm1d(64)
        self.last = nn.Linear(64, 32)
        if tied:
            self.between[-1][0].weight = self.between[0][0].weight

    def forward(self, x):
        x = self.first(x)
        for block, layer in zip(self.blocks, self.between, strict=True):
            x = block(x) + 1
            x = layer(x)
        return self.last(self.norm(x))


@given(
    st.lists(st.sampled_from([8, 24, 40]), min_size=1, max_size=4),
    st.booleans(),
    st.lists(st.integers(0, 200_000), min_size=1, max_size=2),
    st.integers(100_000, 400_000),
    st.booleans(),
    st.data(),
)
def test_outputs_are_right_and_the_run_device_holds_what_is_fetched(
    tmp_path_factory, widths, tied, accelerators, host, offload_buffers, data
):
    net = Stack([*widths, widths[0]], tied).eval().requires_grad_(False)
    budget = {**dict(enumerate(accelerators)), "cpu": host}
    no_split = data.draw(st.sampled_from([None, ["Block"]]), "no_split")
    try:
        placed = fa.big.device_map(net, budget, no_split=no_split, offload_buffers=offload_buffers)
    except fa.errors.ArgumentError as error:
        assert max(accelerators) < fa.big.sizes(net).total, error  # noqa: PT017
        return
    x = torch.randn(2, 32)
    expected = net(x)
    mover = Simulated()
    run = fa.big.dispatch(net, placed, folder=tmp_path_factory.mktemp("offload"), prefetch=0, mover=mover)
    with Devices():
        for _ in range(2):
            found = net(x)
            assert device_of(found) == "cpu"
            assert torch.equal(found, expected)
    activations = 20_000
    for device, limit in enumerate(accelerators):
        assert mover.most.get(device, 0) <= limit + activations
    run.remove()
