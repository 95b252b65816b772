"""Schedules: pure, equal on ints and tensors, and where they begin, peak and end."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fnaccel as fa
from fnaccel import errors

transformers = pytest.importorskip("transformers")

SCHEDULES = {
    "constant": fa.schedules.constant(0.3),
    "linear": fa.schedules.linear(0.3, 0.1, 10),
    "cosine": fa.schedules.cosine(0.3, 10, 0.01),
    "inverse_sqrt": fa.schedules.inverse_sqrt(0.3, warmup=4),
    "warmup_constant": fa.schedules.warmup_constant(0.3, warmup=4),
    "warmup_linear": fa.schedules.warmup_linear(0.3, warmup=4, total=20),
    "warmup_cosine": fa.warmup_cosine(0.3, warmup=4, total=20, end=0.03),
    **{
        f"warmup_stable_decay, {shape}": fa.schedules.warmup_stable_decay(
            0.3, warmup=4, total=20, decay=6, shape=shape, end=0.03
        )
        for shape in ("linear", "cosine", "sqrt")
    },
    "one_cycle": fa.schedules.one_cycle(0.3, total=20),
    "piecewise": fa.schedules.piecewise(0.3, boundaries=(5, 9), factors=(0.1, 0.5)),
    "joined": fa.schedules.joined(
        (fa.schedules.constant(0.1), fa.schedules.linear(0.1, 0.0, 5)), boundaries=(3,)
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
@given(updates=st.integers(0, 60))
def test_ints_and_tensors_agree(name, updates):
    schedule = SCHEDULES[name]
    on_device = schedule(torch.tensor(float(updates)))
    assert isinstance(on_device, torch.Tensor)
    assert float(on_device) == pytest.approx(float(schedule(updates)), abs=1e-7)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_values(name):
    schedule = SCHEDULES[name]
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert hash(schedule) == hash(pickle.loads(pickle.dumps(schedule)))
    assert "0x" not in repr(schedule)


def test_where_they_begin_peak_and_end():
    warm = fa.warmup_cosine(0.3, warmup=4, total=20, end=0.03)
    assert [round(warm(u), 6) for u in (0, 1, 2, 3, 4)] == [0.0, 0.075, 0.15, 0.225, 0.3]
    assert warm(20) == pytest.approx(0.03)
    assert warm(500) == pytest.approx(0.03)
    assert fa.schedules.linear(1.0, 0.0, 4)(3) == 0.25
    assert fa.schedules.piecewise(1.0, boundaries=(2, 4), factors=(0.1, 0.1))(4) == pytest.approx(0.01)
    assert fa.schedules.inverse_sqrt(1.0, warmup=4)(16) == pytest.approx(0.5)
    cycle = fa.schedules.one_cycle(1.0, total=10, warmup=0.5, start_div=10.0)
    assert (cycle(0), cycle(4)) == (pytest.approx(0.1), pytest.approx(1.0))
    assert fa.warmup_cosine(0.3, warmup=4, total=20, start=0.1)(0) == 0.1
    assert fa.warmup_cosine(0.3, warmup=0, total=20)(0) == 0.3


def rates_of(make, steps, lr=0.3):
    """The rates that a scheduler of another library sets at each update."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    scheduler = make(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


THEIRS = {
    "linear": (
        fa.schedules.warmup_linear(0.3, warmup=4, total=20),
        lambda o: transformers.get_linear_schedule_with_warmup(o, 4, 20),
    ),
    "cosine": (
        fa.warmup_cosine(0.3, warmup=4, total=20),
        lambda o: transformers.get_cosine_schedule_with_warmup(o, 4, 20),
    ),
    "without a warm-up": (
        fa.warmup_cosine(0.3, warmup=0, total=20),
        lambda o: transformers.get_cosine_schedule_with_warmup(o, 0, 20),
    ),
    "constant": (
        fa.schedules.warmup_constant(0.3, warmup=4),
        lambda o: transformers.get_constant_schedule_with_warmup(o, 4),
    ),
    **{
        f"stable, then {shape}": (
            fa.schedules.warmup_stable_decay(
                0.3, warmup=4, total=20, decay=decay, shape=shape, end=0.03, start=0.03
            ),
            lambda o, shape=shape, decay=decay: transformers.get_wsd_schedule(
                o, 4, decay, 20, decay_type="1-sqrt" if shape == "sqrt" else shape, min_lr_ratio=0.1
            ),
        )
        for shape, decay in (("linear", 6), ("cosine", 6), ("sqrt", 16))
    },
    "inverse square root": (
        fa.schedules.inverse_sqrt(0.3, warmup=4),
        lambda o: transformers.get_inverse_sqrt_schedule(o, 4),
    ),
    "one cycle": (
        fa.schedules.one_cycle(0.3, total=20),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.3, total_steps=20),
    ),
    "one cycle, peak between updates": (
        fa.schedules.one_cycle(0.3, total=19, warmup=0.37, start_div=7.0, end_div=50.0),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(
            o, 0.3, total_steps=19, pct_start=0.37, div_factor=7.0, final_div_factor=50.0
        ),
    ),
    "steps": (
        fa.schedules.piecewise(0.3, boundaries=(3, 6, 9, 12, 15), factors=(0.1,) * 5),
        lambda o: torch.optim.lr_scheduler.StepLR(o, 3),
    ),
}


@pytest.mark.parametrize("name", THEIRS)
def test_the_same_rates_as_torch_and_transformers(name):
    schedule, make = THEIRS[name]
    steps = 18
    assert [schedule(update) for update in range(steps)] == pytest.approx(rates_of(make, steps), abs=1e-9)


def test_a_torch_scheduler_becomes_a_pure_function():
    def factory(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.1)

    schedule = fa.schedules.from_torch_scheduler(factory, lr=1.0)
    assert [round(schedule(u), 6) for u in (7, 0, 3, 2)] == [0.01, 1.0, 0.1, 1.0]


def test_a_schedule_that_needs_the_host_is_shown_in_the_plan():
    from tests.tiny_models import loss_fn, program

    with fa.start():
        step = fa.skip_nonfinite(loss_fn)
        assert "host read" in str(program(step, optimizer=fa.sgd(lambda u: 0.1 if u < 3 else 0.01)).plan)
        assert "host read" not in str(program(step, optimizer=fa.sgd(fa.schedules.cosine(0.1, 5))).plan)


@pytest.mark.parametrize(
    "make",
    [
        lambda: fa.warmup_cosine(0.1, warmup=10, total=10),
        lambda: fa.schedules.linear(0.1, 0.0, 0),
        lambda: fa.schedules.joined((fa.schedules.constant(1.0),), boundaries=(3,)),
        lambda: fa.schedules.piecewise(0.1, boundaries=(1,), factors=()),
        lambda: fa.schedules.warmup_constant(0.1, warmup=-1),
        lambda: fa.schedules.one_cycle(0.1, total=3),
    ],
)
def test_schedules_that_cannot_be(make):
    with pytest.raises(errors.ArgumentError):
        make()


def rows_of_the_page():
    """(their scheduler, ours, five rates) of the table in docs/optimizers.md."""
    page = Path(__file__).parents[2] / "docs" / "optimizers.md"
    cells = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in page.read_text().splitlines()]
    found = [row for row in cells if len(row) == 3 and row[2].count(",") == 4 and "(" in row[1]]
    assert len(found) == 9
    return [(theirs, ours, [float(rate) for rate in rates.split(",")]) for theirs, ours, rates in found]


@pytest.mark.parametrize(("theirs", "ours", "rates"), rows_of_the_page())
def test_the_table_of_the_page(theirs, ours, rates):
    schedule = eval(f"fa.schedules.{ours}")
    assert [schedule(update) for update in range(5)] == pytest.approx(rates, abs=1e-4)
    if theirs == "LinearLR`, `PolynomialLR(o, 10)":
        theirs = "PolynomialLR(o, 10)"
    place = transformers if theirs.startswith("get_") else torch.optim.lr_scheduler
    make = eval(f"lambda o: place.{theirs}", {"place": place})
    assert rates_of(make, 5, lr=1.0) == pytest.approx(rates, abs=1e-4)
