"""Sizes and device maps: facts, rules, and laws over random models and budgets."""

from __future__ import annotations

import types

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fnaccel as fa
from fnaccel.big.budget import detected_budget
from fnaccel.big.device_map import place_of
from fnaccel.big.layers import layers
from fnaccel.texts import bytes_in
from tests.big.models import Net, Small, nets
from tests.big.movers import Simulated


def test_the_facts():
    assert fa.big.sizes(Small()).modules == {"": 236, "linear1": 64, "batchnorm": 72, "linear2": 100}
    apart = {"linear1": 0, "batchnorm": 1, "linear2": 1}
    assert fa.big.device_map(Small(), {0: 200, 1: 200}).places == apart
    assert fa.big.device_map(Small(tied=True), {0: 200, 1: 200}).places == {"": 0}


@pytest.mark.parametrize(
    ("dtype", "total"),
    [
        (None, 236),
        ("fp32", 236),
        ("bf16", 122),
        (torch.float16, 122),
        ("fp8", 65),
        ("int8", 65),
        ("int4", 37),
    ],
)
def test_sizes_by_dtype(dtype, total):
    # 57 floating-point values, and a count of batches of 8 bytes
    assert fa.big.sizes(Small(), dtype).total == total


def test_buffers_are_told_from_parameters():
    found = fa.big.sizes(Small())
    assert found.buffers == {"": 40, "linear1": 0, "batchnorm": 40, "linear2": 0}
    assert fa.big.sizes(Small(), "bf16").buffers[""] == 24  # a count of batches keeps its 8 bytes


def test_tied_parameters_count_once():
    assert fa.big.sizes(Small(tied=True)).total == 236 - 48
    net = Net()
    assert fa.big.sizes(net).total == sum(t.nbytes for t in [*net.parameters(), *net.buffers()])


def test_the_largest_layer_is_a_block_unless_it_may_be_split():
    net = Net(width=6, words=2)
    assert fa.big.sizes(net).largest[0] == "blocks.0"
    assert fa.big.sizes(net, no_split=()).largest == ("blocks.0.up", 4 * (72 + 12))
    with pytest.raises(fa.errors.ArgumentError, match="no module of class 'Blok'") as error:
        fa.big.sizes(net, no_split=["Blok"])
    assert "Block" in error.value.fix


def test_a_model_without_tensors():
    empty = nn.Dropout()
    assert str(fa.big.sizes(empty)) == "0 B in all, 0 B in the largest layer (the model)"
    assert len(fa.big.device_map(empty, {0: 1})) == 0


def chain(*widths):
    """Layers of `4 * width` bytes."""
    return nn.Sequential(*(nn.ParameterList([torch.zeros(width)]) for width in widths))


def devices(model, budget, strategy="sequential"):
    placed = fa.big.device_map(model, budget, strategy)
    return [placed.device_of(layer.path) for layer in layers(model)]


def test_strategies():
    eight = chain(*[1] * 8)
    plenty = {0: 100, 1: 100, "cpu": 100}
    assert devices(eight, plenty, "sequential") == [0] * 8
    assert devices(eight, plenty, "auto") == [0] * 8
    assert devices(eight, plenty, "balanced") == [0] * 4 + [1] * 4
    assert devices(eight, plenty, "balanced_low_0") == [1] * 8
    assert devices(eight, {0: 100, 1: 12, 2: 12}, "balanced_low_0") == [0, 0, 1, 1, 1, 2, 2, 2]
    assert devices(eight, {0: 16, 1: 100}, "auto") == [0, 0, 0] + [1] * 5  # room for one more on the first
    little = {0: 8, 1: 8, "cpu": 8}
    for strategy in ("auto", "balanced", "balanced_low_0", "sequential"):
        assert devices(eight, little, strategy) == [0, 1, 1, "cpu", "cpu"] + ["disk"] * 3
    with pytest.raises(fa.errors.UnknownNameError, match="'balance'"):
        fa.big.device_map(eight, plenty, "balance")


def test_room_is_kept_for_offloaded_layers_only_if_there_are_some():
    three = chain(2, 2, 4)
    assert devices(three, {0: 16, 1: 16}) == [0, 0, 1]
    assert devices(three, {0: 16, 1: 16}, "balanced") == [0, 0, 1]
    assert devices(three, {0: 24, 1: 24}) == [0, 1, 1]
    assert devices(three, {0: 32}) == [0, 0, 0]
    assert devices(three, {0: 16, 1: 16, 2: 0}) == [0, 0, 1]


def test_a_layer_that_no_accelerator_holds_runs_on_the_cpu():
    large = chain(1, 50, 1, 1)
    placed = fa.big.device_map(large, {0: 20, "cpu": 300})
    assert placed.on_cpu == {"1"}
    assert [placed.device_of(str(index)) for index in range(4)] == [0, "cpu", 0, 0]
    assert "1: run on the CPU" in str(placed)
    assert fa.big.device_map(large, {0: 7, "cpu": 300}).places == {
        "0": "cpu",
        "1": "cpu",
        "2": "cpu",
        "3": "cpu",
    }
    with pytest.raises(fa.errors.ArgumentError, match="the largest is cpu with 100 B") as error:
        fa.big.device_map(large, {0: 20, "cpu": 100})
    assert "1 has 200 B" in str(error.value)


def test_gaps_are_filled_with_later_layers():
    assert devices(chain(44, 20, 40), {0: 256}) == ["disk", 0, "disk"]  # 80, and room for 176
    assert devices(chain(44, 20, 40), {0: 255}) == ["disk"] * 3
    assert devices(chain(5, 9, 2, 9), {0: 64, 1: 16}) == [0, "disk", 0, "disk"]
    assert devices(chain(5, 9, 2, 9), {0: 63, 1: 36}) == [0, 1, "disk", "disk"]
    assert devices(chain(9, 5, 5, 6, 9), {0: 80}) == [0, "disk", "disk", "disk", "disk"]
    assert devices(chain(9, 5, 5, 6, 9), {"cpu": 80}) == ["cpu", "disk", "disk", "disk", "disk"]


def test_layers_that_the_run_device_has_no_room_for():
    parts = chain(1, 9, 5, 5, 6)
    placed = fa.big.device_map(parts, {0: 4, 1: 40, "cpu": 100}, "sequential")
    assert placed.places == {"0": 1, "1": 1, "2": "cpu", "3": "cpu", "4": "cpu"}
    assert placed.on_cpu == {"2", "3", "4"}
    with pytest.raises(fa.errors.ArgumentError, match=r"2 has 20 B and would be offloaded\. 0 runs") as error:
        fa.big.device_map(parts, {0: 4, 1: 40})
    assert "name 1 first in the budget" in error.value.fix


def test_blocks_are_split_only_if_accelerators_would_be_empty():
    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20)) for _ in range(3))

    net = Blocks()  # a block has 3,360 bytes
    placed = fa.big.device_map(net, {0: 5000})
    assert [path for path, device in placed.items() if device == 0] == ["blocks.0.0"]
    assert "blocks.0-2: split, because no accelerator" in str(placed)
    # a block runs on one device: none of its layers goes to another accelerator, though it has room for one
    both = fa.big.device_map(net, {0: 5000, 1: 1700})
    assert [path for path, device in both.items() if device != "disk"] == ["blocks.0.0"]
    whole = fa.big.device_map(net, {0: 6720})
    assert whole.places == {"blocks.0": 0, "blocks.1": "disk", "blocks.2": "disk"}
    assert not whole.notes
    # the layers of a split block are fetched one by one, so a block can be on the device beside one
    assert fa.big.device_map(net, {0: 5040})["blocks.0"] == 0
    assert fa.big.device_map(net, {0: 5040, 1: 3360}).places == {
        "blocks.0": 1,
        "blocks.1": "disk",
        "blocks.2": "disk",
    }


class Masked(nn.Module):
    """A linear layer of 40 kB and a mask of 4 MB."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(100, 100, bias=False)
        self.register_buffer("mask", torch.zeros(1000, 1000))

    def forward(self, x):
        return self.linear(x)


def test_buffers_count_where_they_stay():
    net = nn.Sequential(*(Masked() for _ in range(10)))
    placed = fa.big.device_map(net, {0: "10MB", "cpu": "1GB"})
    assert "buffers of offloaded layers stay on 0" in str(placed)
    assert "it has 10 MB. They fit with offload_buffers=True" in str(placed)
    enough = fa.big.device_map(net, {0: "40.1MB", "cpu": "1GB"})
    assert not enough.notes
    assert sum(enough.buffers.values()) == 36_000_000
    assert "40 MB  40.1 MB" in str(enough)
    assert fa.big.DeviceMap.from_json(enough.to_json()).buffers == enough.buffers
    offloading = fa.big.device_map(net, {0: "10MB", "cpu": "1GB"}, offload_buffers=True)
    assert not offloading.notes
    assert not offloading.buffers
    assert offloading.places == {"0": 0, **{str(index): "cpu" for index in range(1, 10)}}
    # buffers that would fit alone, and not beside the layers that are there
    tight = fa.big.device_map(Net(width=3, depth=0, words=4, tied=True), {0: 84, "cpu": 0})
    assert tight["embed"] == 0
    assert "32 B of buffers of offloaded layers stay on 0" in str(tight)
    two = fa.big.device_map(net, {0: "10MB", 1: "10MB", "cpu": "1GB"})
    assert "24 MB of buffers of offloaded layers stay on 0" in str(two)  # those of layers on 1 are there
    assert sum(two.buffers.values()) == 24_000_000
    assert (
        fa.big.DeviceMap.from_json(offloading.to_json())
        == offloading
        != attrs.evolve(offloading, offload_buffers=False)
    )


@pytest.mark.parametrize(("budget", "offload_buffers"), [("40.1MB", False), ("10MB", True)])
def test_a_dispatch_holds_what_its_map_says(budget, offload_buffers):
    net = nn.Sequential(*(Masked() for _ in range(10))).requires_grad_(False)
    placed = fa.big.device_map(net, {0: budget, "cpu": "1GB"}, offload_buffers=offload_buffers)
    mover = Simulated()
    run = fa.big.dispatch(net, placed, prefetch=0, mover=mover)
    net(torch.ones(1, 100))
    activations = 100_000
    assert mover.most[0] <= bytes_in(budget, "here") + activations
    run.remove()
    mover = Simulated()
    fa.big.dispatch(net, placed, prefetch=0, offload_buffers=not offload_buffers, mover=mover)
    net(torch.ones(1, 100))
    assert (mover.most[0] > bytes_in(budget, "here") + activations) == offload_buffers


def test_a_block_that_no_accelerator_holds_is_split():
    net = Net(width=6, words=2, tied=False)
    placed = fa.big.device_map(net, {0: 500, "cpu": 10_000})
    assert not placed.on_cpu  # 4 * 84 bytes, and the block has 684
    assert len({placed.device_of(name) for name, _ in net.named_parameters()}) == 2
    placed.check(net)


def test_tied_layers_stay_together_and_modules_around_them_are_split():
    net = Net(width=4, depth=3, words=20)
    placed = fa.big.device_map(net, {0: 800, 1: 800})
    assert placed["embed"] == placed["head"] == 0
    net.blocks[2].up.weight = net.blocks[0].up.weight
    placed = fa.big.device_map(net, {0: 1000, 1: 1000, "cpu": 1000})
    assert placed.device_of("blocks.0") == placed.device_of("blocks.2")
    joined = chain(3, 4, 5)
    joined[2] = nn.ParameterList([joined[0][0], joined[1][0]])  # ties two others that are not tied
    assert len(set(devices(joined, {0: 28, 1: 28}))) == 1


@given(nets(), st.lists(st.integers(0, 3000), min_size=1, max_size=3), st.integers(0, 3000), st.data())
def test_a_map_covers_all_and_only_the_model_within_the_budget(net, accelerators, host, data):
    budget = {**dict(enumerate(accelerators)), "cpu": host}
    strategy = data.draw(st.sampled_from(["auto", "balanced", "balanced_low_0", "sequential"]))
    try:
        placed = fa.big.device_map(net, budget, strategy)
    except fa.errors.ArgumentError as error:
        assert "no device of the budget can run it" in str(error) or "would be offloaded" in str(error)  # noqa: PT017
        assert max(accelerators) < fa.big.sizes(net).total
        return
    placed.check(net)
    names = [name for name, _ in [*net.named_parameters(), *net.named_buffers()]]
    assert all(place_of(name, placed.places) is not None for name in names)
    used = dict.fromkeys([*budget, "disk"], 0)
    seen = set()
    for name, tensor in [*net.named_parameters(), *net.named_buffers()]:
        home = placed.device_of(name)
        apart = place_of(name, placed.places) in placed.on_cpu
        stays = isinstance(home, str) and not apart and not isinstance(tensor, nn.Parameter)
        if id(tensor) not in seen:
            used[placed.main if stays else home] += tensor.nbytes
        seen.add(id(tensor))
    if "of buffers of offloaded layers stay on" in str(placed):
        used[placed.main] -= sum(placed.buffers.values())
    assert all(used[device] <= budget[device] for device in budget)
    assert sum(placed.sizes.values()) == fa.big.sizes(net).total
    assert fa.big.device_map(net, budget, strategy) == placed
    assert fa.big.DeviceMap.from_json(placed.to_json()) == placed
    assert str(fa.big.DeviceMap.from_json(placed.to_json())) == str(placed)


def test_a_map_is_a_value():
    placed = fa.big.device_map(Net(), {0: "1MB"})
    assert dict(placed) == {"": 0}
    assert {placed: "found"}[fa.big.DeviceMap({"": 0})] == "found"
    assert fa.big.DeviceMap.from_json('{"embed": 0, "": "cpu"}').device_of("head.weight") == "cpu"
    for text in ("[]", "{", '{"places": {"": 0}}', '{"a": -1}', '{"a": "meta"}', '{"a": true}'):
        with pytest.raises(fa.errors.ArgumentError):
            fa.big.DeviceMap.from_json(text)


def test_a_map_of_another_model():
    with pytest.raises(fa.errors.ArgumentError, match="the map names 'bloks', which the model") as error:
        fa.big.DeviceMap({"bloks": 0, "": 1}).check(Net())
    assert "'blocks'" in error.value.fix
    with pytest.raises(
        fa.errors.ArgumentError,
        match=r"no device for blocks.1.scale, blocks.1.up.\{weight, bias\}|no device for",
    ):
        fa.big.DeviceMap({"embed": 0, "blocks.0": 1, "norm": 1, "head": 1, "mask": 0}).check(Net())


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("10GiB", 10 << 30),
        ("10 GB", 10**10),
        ("1.5kib", 1536),
        ("200", 200),
        (7, 7),
        ("3MB", 3 * 10**6),
        ("30GIB", 30 << 30),
    ],
)
def test_bytes_as_text(text, count):
    assert bytes_in(text, "here") == count


@pytest.mark.parametrize(
    "budget",
    [
        {0: "10 apples"},
        {0: -1},
        {0: 1.5},
        {"disk": 5},
        {},
        {-1: 5},
        {"meta": 5},
        {0: True},
        {"gpu": 5},
        "10GB",
    ],
)
def test_a_budget_that_cannot_be_read(budget):
    with pytest.raises(fa.errors.ArgumentError):
        fa.big.device_map(Small(), budget)


def test_a_detected_budget_says_what_it_keeps():
    cards = types.SimpleNamespace(
        device_count=lambda: 2,
        get_memory_info=lambda index: ((80 << 30, 80 << 30), (5 << 30, 8 << 30))[index],
    )
    found, kept = detected_budget(cards, available=100)
    assert found == {0: 72 << 30, 1: 4 << 30, "cpu": 90}
    assert kept == "10 % of the free memory of each device are kept back, on accelerators at least 1 GiB"
    assert "are kept back" in str(fa.big.device_map(Small()))
