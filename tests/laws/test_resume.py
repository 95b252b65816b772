"""Laws 4 and 14: where a run is cut changes nothing, and every sample is seen as often as without cuts."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.laws.resume import ITEMS, LOADERS, SAME_ON_ANY_RANKS, SHARDS, run

LAYOUTS = {1: ["local"], 2: ["ddp", "fsdp"], 3: ["ddp", "fsdp"], 4: ["hsdp(2, 2)", "ddp"]}


@st.composite
def cases(draw):
    loader = draw(st.sampled_from(sorted(LOADERS)))
    shards = draw(st.sampled_from(sorted(SHARDS)))
    if shards == "dispatch" and "workers" in loader:
        shards = "plain"
    ranks = draw(st.sampled_from(sorted(LAYOUTS)))
    case = {
        "strategy": draw(st.sampled_from(LAYOUTS[ranks])),
        "precision": draw(st.sampled_from(["fp32", "bf16", "fp16"])),
        "dropout": 0.3,
        "rng": draw(st.sampled_from(["fold", "stream"])),
        "loader": loader,
        "shards": shards,
    }
    return ranks, case


@pytest.mark.long
@settings(max_examples=4)
@given(drawn=cases(), cuts=st.lists(st.integers(1, 12), min_size=1, max_size=2, unique=True))
def test_a_cut_changes_no_bit(pools, tmp_path_factory, drawn, cuts):
    ranks, case = drawn
    root = tmp_path_factory.mktemp("resume")
    total = 13
    straight = pools.run(ranks, run, case, root / "straight", [], total)
    parts = pools.run(ranks, run, case, root / "parts", sorted(cuts), total)
    for (seen, end, losses, place), (seen_again, end_again, losses_again, place_again) in zip(
        straight, parts, strict=True
    ):
        assert seen_again == seen
        assert losses_again == losses
        assert place_again == place
        assert [name for name in end if not torch.equal(end[name], end_again[name])] == []


@pytest.mark.long_except(r"plain-(workers|iterable|any iterable)$")
@pytest.mark.parametrize("loader", SAME_ON_ANY_RANKS)
@pytest.mark.parametrize("shards", ["plain", "window"])
def test_other_ranks_go_on_with_the_same_samples(pools, tmp_path, loader, shards):
    case = {"precision": "fp32", "dropout": 0.0, "rng": "fold", "loader": loader, "shards": shards}
    total, cuts = 12, [3, 7]
    [straight] = pools.run(1, go_on, case | {"strategy": "local"}, tmp_path / "one", total)
    layouts = [(2, "fsdp"), (1, "local"), (4, "hsdp(2, 2)")]
    seen = []
    for (ranks, strategy), stop in zip(layouts, [*cuts, total], strict=True):
        seen += pools.run(ranks, go_on, case | {"strategy": strategy}, tmp_path / "parts", stop)[0]
    assert [sorted(ids) for ids, _ in seen] == [sorted(ids) for ids, _ in straight]
    assert [loss for _, loss in seen] == pytest.approx([loss for _, loss in straight], rel=1e-5)


def go_on(case, directory, stop):
    """One part of a run, on these ranks, saved at its end: up to a step, or (None) the end of the epoch."""
    import fnaccel as fa
    from tests.laws import resume

    resume.JITTER = 0.0
    train_step = resume.make(case["strategy"], case["precision"], case["dropout"], case["rng"])
    state = fa.resume_or_init(directory, train_step, seed=3, extras={"losses": []})
    loader = LOADERS[case["loader"]]()
    resume.quiet(loader)
    seen = []
    shards = fa.shard(loader, seed=4, **SHARDS[case["shards"]])
    epochs = 1 if stop is None else None
    for state, metrics in fa.scan(train_step, state, shards, steps=stop, epochs=epochs):
        seen.append((metrics["ids"].tolist(), float(metrics["loss"])))
    fa.save(directory, state)
    train_step.close()
    return seen


@settings(max_examples=8)
@given(
    loader=st.sampled_from(sorted(set(LOADERS) - {"any iterable"})),
    first=st.sampled_from([1, 2, 3, 4]),
    second=st.sampled_from([1, 2, 3, 4]),
    cut=st.integers(1, 2),
    window=st.sampled_from([None, 2]),
)
def test_law_14_an_epoch_is_the_data_set(pools, tmp_path_factory, loader, first, second, cut, window):
    root = tmp_path_factory.mktemp("epoch")
    case = {"precision": "fp32", "dropout": 0.0, "rng": "fold", "loader": loader}
    case["shards"] = "pairs" if window else "plain"
    seen = pools.run(first, go_on, case | {"strategy": LAYOUTS[first][0]}, root, cut)[0]
    seen += pools.run(second, go_on, case | {"strategy": LAYOUTS[second][-1]}, root, None)[0]
    assert Counter(one for ids, _ in seen for one in ids) == Counter(range(ITEMS))
