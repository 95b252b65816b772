"""Schedules: complete, in order, as idle as their formula says, and in the order of torch's own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

import fnaccel as fa
from fnaccel.strategies.pipeline import schedules
from tests.strategies.pipeline import torch_orders


def timing(name, ranks, virtual, micro_batches):
    table = schedules.READY[name](ranks, virtual, micro_batches)
    return schedules.timed(table, ranks * virtual, micro_batches, name)


@pytest.mark.parametrize("name", schedules.READY)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_a_ready_schedule_ends_for_any_number_of_micro_batches(name, ranks):
    for virtual in {"1f1b": (1,), "zero_bubble": (2,)}.get(name, (1, 2, 3)):
        for micro_batches in range(1, 2 * ranks + 4):
            assert timing(name, ranks, virtual, micro_batches).length >= 3 * virtual * micro_batches


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 4), (4, 8), (4, 16), (8, 8)])
@pytest.mark.parametrize(
    ("name", "virtual"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 4)]
)
def test_the_idle_share_is_that_of_the_formula(name, virtual, ranks, micro_batches):
    expected = (ranks - 1) / (virtual * micro_batches + ranks - 1)
    assert timing(name, ranks, virtual, micro_batches).idle == pytest.approx(expected)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 7), (4, 16), (8, 15)])
def test_zero_bubble_waits_at_the_ends_alone(ranks, micro_batches):
    """A stage is half as long as one of 1F1B, and its forward a third of that."""
    found = timing("zero_bubble", ranks, 2, micro_batches)
    assert found.idle == pytest.approx((ranks - 1) / (6 * micro_batches + ranks - 1))
    assert found.idle < timing("interleaved", ranks, 2, micro_batches).idle
    assert found.idle < timing("1f1b", ranks, 1, micro_batches).idle


def test_activations_in_flight_are_counted():
    assert timing("1f1b", 4, 1, 8).most_held == [4, 3, 2, 1]
    assert timing("gpipe", 4, 1, 8).most_held == [8, 8, 8, 8]
    assert timing("1f1b", 4, 1, 2).most_held == [2, 2, 2, 1], "fewer micro-batches than stages"


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (2, 5), (4, 8), (4, 6), (4, 3)])
def test_1f1b_and_gpipe_have_the_order_of_torch(ranks, micro_batches):
    for name in ("1f1b", "gpipe"):
        *rows, last = map(list, schedules.READY[name](ranks, 1, micro_batches))
        *torchs, torchs_last = torch_orders.single(name, ranks, micro_batches)
        assert rows == torchs
        if name == "gpipe":
            assert last == torchs_last
        else:  # torch's list for the last stage begins with micro-batch 1 (2.13), and it runs them from 0 on
            assert [kind for kind, *_ in last] == [kind for kind, *_ in torchs_last]


@pytest.mark.parametrize(
    ("ranks", "virtual", "micro_batches"), [(2, 2, 4), (4, 2, 8), (4, 3, 4), (4, 2, 10), (4, 2, 3)]
)
def test_interleaved_has_the_order_of_torch(ranks, virtual, micro_batches):
    table = schedules.interleaved(ranks, virtual, micro_batches)
    assert torch_orders.interleaved(ranks, virtual, micro_batches) == [list(row) for row in table]


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 1), (2, 4), (3, 5), (4, 3), (4, 7), (4, 12)])
def test_zero_bubble_has_the_order_of_torch(ranks, micro_batches):
    table = schedules.zero_bubble(ranks, 2, micro_batches)
    assert torch_orders.zero_bubble(ranks, micro_batches) == [list(row) for row in table]


def test_stages_of_zero_bubble_lie_in_a_v():
    assert schedules.places(schedules.zero_bubble, 3, 2) == (0, 1, 2, 2, 1, 0)
    assert schedules.places(schedules.interleaved, 3, 2) == (0, 1, 2, 0, 1, 2)


def test_the_picture_has_a_line_for_each_rank():
    assert timing("1f1b", 2, 1, 2).picture().splitlines() == [
        "rank 0    0   1   .   . [0] [0]   . [1] [1]",
        "rank 1    .   0 [0] [0]   1 [1] [1]   .   .",
    ]


def test_the_picture_shows_backwards_in_two_parts():
    assert timing("zero_bubble", 2, 2, 1).picture().splitlines() == [
        "rank 0    0   .   .   0 [0] (0)   .   . [0] (0)",
        "rank 1    .   0   0   .   . [0] (0) [0] (0)   .",
    ]


BAD = {
    "leaves out the backward of micro-batch 1 on stage 1": [
        [("F", 0, 0), ("F", 0, 1), ("B", 0, 0), ("B", 0, 1)],
        [("F", 1, 0), ("B", 1, 0), ("F", 1, 1)],
    ],
    "lists the forward of micro-batch 0 on stage 0 twice": [
        [("F", 0, 0), ("F", 0, 0), ("F", 0, 1), ("B", 0, 0), ("B", 0, 1)],
        [("F", 1, 0), ("B", 1, 0), ("F", 1, 1), ("B", 1, 1)],
    ],
    "leaves out the gradient of the weights of micro-batch 0 on stage 1": [
        [("F", 0, 0), ("F", 0, 1), ("B", 0, 0), ("B", 0, 1)],
        [("F", 1, 0), ("I", 1, 0), ("F", 1, 1), ("B", 1, 1)],
    ],
    "does not end: rank 0 at the backward of micro-batch 1 on stage 0; rank 1 at the gradient of the weights of micro-batch 1 on stage 1": [
        [("F", 0, 0), ("F", 0, 1), ("B", 0, 0), ("B", 0, 1)],
        [("F", 1, 0), ("B", 1, 0), ("F", 1, 1), ("W", 1, 1), ("I", 1, 1)],
    ],
    "lists ('F', 2, 0)": [[("F", 2, 0)], []],
    "runs stage 1 on rank 0, and rank 1 has its layers": [
        [("F", 0, 0), ("F", 1, 0), ("F", 0, 1), ("B", 0, 0), ("B", 0, 1)],
        [("B", 1, 0), ("F", 1, 1), ("B", 1, 1)],
    ],
    "does not end: rank 0 at the backward of micro-batch 1 on stage 0; rank 1 at the backward of micro-batch 0": [
        [("F", 0, 0), ("B", 0, 1), ("F", 0, 1), ("B", 0, 0)],
        [("B", 1, 0), ("F", 1, 0), ("F", 1, 1), ("B", 1, 1)],
    ],
}


@pytest.mark.parametrize("message", BAD)
def test_a_schedule_that_cannot_run_is_refused(message):
    with pytest.raises(fa.errors.ArgumentError) as caught:
        schedules.timed(BAD[message], 2, 2, "mine")
    assert message in str(caught.value)


def backwards_late(ranks, virtual, micro_batches):
    return schedules.gpipe(ranks, virtual, micro_batches)


def test_a_schedule_of_ones_own_is_named_by_module_and_function():
    text = f"{__name__}:backwards_late"
    assert fa.strategy(f"pipeline(2, schedule='{text}')") == fa.pipeline(2, schedule=text)
    assert schedules.schedule_of(text) is backwards_late


@pytest.mark.parametrize("name", ["1f1", "no_module:fn", f"{__name__}:no_function"])
def test_an_unknown_schedule_raises(name):
    with pytest.raises(fa.errors.ArgumentError, match=r"fa\.pipeline"):
        fa.pipeline(2, schedule=name)


def test_a_plan_says_how_long_ranks_wait():
    spec = SimpleNamespace(
        mesh=SimpleNamespace(degrees={"pp": 4}),
        step=SimpleNamespace(settings=SimpleNamespace(micro_batches=2)),
    )
    axis = fa.pipeline(4).axes[0]
    first, picture, second = axis.plan_notes(spec)
    assert "60% of the time" in first
    assert "2 at most" in first
    assert "fewer micro-batches than stages" in second
    assert picture.endswith(timing("1f1b", 4, 1, 2).picture())


def test_the_page_shows_the_picture_of_the_data():
    page = (Path(__file__).parents[3] / "docs" / "parallelism.md").read_text()
    assert timing("1f1b", 4, 1, 4).picture() in page
    assert timing("zero_bubble", 2, 2, 4).picture() in page
