"""Laws 3 and 4: what any layout saved, any layout restores, and the run goes on as if nothing had been."""

from __future__ import annotations

import functools

import pytest
import torch

from fnaccel.checkpoint import latest, restore, save
from fnaccel.state import Position
from tests.checkpoint.training import (
    LAYOUTS,
    check_restores_any,
    gathered,
    make,
    train,
    unequal,
    unlike,
    written_by_all,
)

EXTRAS = {"note": "kept", "table": torch.arange(6.0).reshape(2, 3)}


def write(layout, directory):
    step = make(layout)
    state = train(step, step.init(seed=3, extras=EXTRAS), 0, 2)
    object.__setattr__(state, "data", Position(epoch=1, samples=26))
    save(directory, state)
    return gathered(state), gathered(train(step, state, 2, 2))


@pytest.fixture(scope="module")
def saved(pools, tmp_path_factory):
    return written_by_all(pools, write, LAYOUTS, tmp_path_factory.mktemp("layouts"))


@pytest.mark.long_except(r"local|ddp\(\)', 3|fsdp\(\)', 3")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_any_layout_restores_any_other(pools, saved, layout):
    check_restores_any(pools, make, layout, saved)


def test_no_rank_writes_what_another_holds(saved):
    for (layout, ranks), (directory, _) in saved.items():
        files = list(latest(directory).glob("*.safetensors"))
        writers = {"ddp()": 1, "local()": 1, "hsdp(2, 1)": 1, "hsdp(2, 2)": 2}
        # 5 rows in chunks of 2 leave the fourth rank nothing to write
        assert len(files) == writers.get(layout, min(ranks, 3)), (layout, ranks)
        sizes = sum(file.stat().st_size for file in files)
        assert sizes < 14_000 + 7_000 * len(files) + 8_000 * ranks  # the random streams of each


def fresh(directory):
    """A snapshot stays as it is, and a new state with the same placements comes back."""
    from fnaccel.state import snapshot

    step = make("fsdp()")
    state = step.init(seed=9)
    like = snapshot(state)
    kept = gathered(like)
    found = restore(directory, like=like)
    assert unequal(gathered(like), kept) == []
    assert unequal(gathered(state), kept) == []
    assert type(found.params["first.weight"]) is type(like.params["first.weight"])
    assert found.params["first.weight"].placements == like.params["first.weight"].placements
    state = step.adopt(found)
    return unequal(gathered(state), gathered(found))


def test_into_a_snapshot(pools, saved):
    directory, _ = saved["hsdp(2, 2)", 4]
    assert pools.run(3, fresh, directory) == [[]] * 3


def onto_meta(directory, written):
    from fnaccel.errors import CapabilityError

    step = make("fsdp(init='meta')")
    state = step.init(seed=0)
    with pytest.raises(CapabilityError, match="without values"):
        train(step, state, 2, 1)
    state = restore(directory, like=state)
    wrong = unequal(gathered(state), written)
    train(step, state, 2, 1)
    return wrong


def test_a_model_built_without_values_is_ready_afterwards(pools, saved):
    directory, (written, _) = saved["ddp()", 2]
    assert pools.run(2, onto_meta, directory, written) == [[]] * 2


def halves(directory):
    from fnaccel.optim import sgd

    made = functools.partial(make, "fsdp()", optimizer=sgd(1e-2))
    first, second = made(), made()
    trees = {"a": first.init(seed=0), "b": second.init(seed=1)}
    wanted = {"a": gathered(trees["a"]), "b": gathered(trees["b"])}
    save(directory, trees)
    likes = {"b": first.init(seed=5), "a": second.init(seed=6)}
    found = restore(directory, like=likes)
    assert list(found) == ["b", "a"]
    second.adopt(found["a"])
    return unequal(gathered(found["a"]), wanted["a"]) + unequal(gathered(found["b"]), wanted["b"])


def test_several_states_in_one_tree(pools, tmp_path):
    assert pools.run(2, halves, tmp_path) == [[]] * 2


def half(layout):
    from torch import nn

    import fnaccel as fa
    from tests.checkpoint.training import squares

    def count(grads, own, info):
        return grads, {"calls": own["calls"] + 1.0, "name": own["name"]}

    counting = fa.Transform(
        "counting", fa.Phase.GRADS, init=lambda params: {"calls": torch.zeros(()), "name": "x"}, apply=count
    )
    step = fa.with_ema(fa.clip_norm(counting(fa.with_precision(squares, "fp16")), 1.0), 0.9)

    def small():
        return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1))

    return fa.train_step(step, model=fa.distribute(small, layout), optimizer=fa.adamw(1e-2))


def write_half(layout, directory):
    step = half(layout)
    state = train(step, step.init(seed=3), 0, 3)
    save(directory, state)
    return gathered(state)


def read_half(layout, directory, written):
    step = half(layout)
    state = restore(directory, like=step.init(seed=4), verify=True)
    wrong = unlike(state, written)
    train(step, state, 3, 1)
    return wrong


@pytest.mark.long
def test_loss_scale_averages_and_transform_state_in_any_layout(pools, tmp_path):
    layouts = [
        ("local()", 1),
        ("ddp()", 3),
        ("fsdp(reshard_after_forward=False)", 2),
        ("fsdp()", 3),
        ("hsdp(2, 2)", 4),
    ]
    for source, ranks in layouts:
        written = pools.run(ranks, write_half, source, tmp_path / f"{source}{ranks}")[0]
        assert {
            "scale/scale",
            "scale/growth",
            "scale/weight",
            "transforms/counting/calls",
            "updates",
        } <= written.keys()
        for layout, others in layouts:
            for wrong in pools.run(others, read_half, layout, tmp_path / f"{source}{ranks}", written):
                assert wrong == []
