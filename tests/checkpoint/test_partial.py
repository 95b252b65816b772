"""`restore(only=, skip=, rename=)`: what is chosen comes from the checkpoint, the rest stays."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fnaccel.checkpoint import restore, save
from fnaccel.errors import ArgumentError, TreeMismatchError
from fnaccel.optim import adamw, sgd
from fnaccel.program.train_step import train_step
from fnaccel.strategies import distribute, strategy
from fnaccel.world.world import start
from tests.checkpoint.training import gathered, make, squares, train, unequal


@pytest.fixture(autouse=True)
def world():
    with start(device="cpu") as found:
        yield found


def one(seed, **options):
    step = make("local()", **options)
    return train(step, step.init(seed=seed, extras={"own": seed}), 0, 2)


def test_only_the_parameters(tmp_path):
    first = one(1)
    save(tmp_path, first)
    wanted = gathered(first)
    state = one(2)
    before = gathered(state)
    found = gathered(restore(tmp_path, like=state, only="params"))
    for path, value in found.items():
        source = wanted if path.startswith("params/") else before
        assert torch.equal(value, source[path]) if isinstance(value, torch.Tensor) else value == source[path]


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({"only": ["params/first.*", "step"]}, lambda p: p.startswith("params/first.") or p == "step"),
        ({"skip": "opt"}, lambda p: not p.startswith("opt/")),
        ({"only": "params", "skip": ["*bias", "*gain"]}, lambda p: p.startswith("params/") and not p.endswith(("bias", "gain"))),
        ({"only": "data"}, lambda p: p.startswith("data/")),
        ({"skip": ()}, lambda p: True),
    ],
)  # fmt: skip
def test_patterns(tmp_path, options, taken):
    first, second = one(1), one(2)
    save(tmp_path, first)
    wanted, before = gathered(first), gathered(second)
    found = gathered(restore(tmp_path, like=second, **options))
    expected = {path: (wanted if taken(path) else before)[path] for path in found}
    assert unequal(found, expected) == []


class Backbone(nn.Module):
    """The same layers under other names, with another last one."""

    def __init__(self):
        super().__init__()
        from tests.checkpoint.training import Net

        inner = Net()
        self.stem, self.blocks, self.head = inner.first, inner.blocks, nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.stem(x))


def other():
    step = train_step(squares, model=distribute(Backbone, strategy("local")), optimizer=sgd(0.1))
    return step.init(seed=5)


def test_parameters_alone_into_another_model(tmp_path):
    first = one(1)
    save(tmp_path, first)
    wanted = gathered(first)
    state = other()
    head = state.params["head.weight"].clone()
    found = restore(
        tmp_path, like=state, only="params", skip=["*head.*", "*last.*"], rename={r"/first\.": "/stem."}
    )
    assert torch.equal(found.params["stem.weight"], wanted["params/first.weight"])
    assert torch.equal(found.params["blocks.1.line.weight"], wanted["params/blocks.1.line.weight"])
    assert torch.equal(found.params["head.weight"], head)
    again = restore(
        tmp_path, like=found, only="params/stem.*", rename=lambda name: name.replace("first", "stem")
    )
    assert torch.equal(again.params["stem.bias"], wanted["params/first.bias"])


def test_what_does_not_fit_is_listed_wholly_and_nothing_changes(tmp_path):
    save(tmp_path, one(1))
    state = other()
    before = gathered(state)
    with pytest.raises(TreeMismatchError) as raised:
        restore(tmp_path, like=state, only="params")
    for words in (
        "params/first.weight: only in the checkpoint",
        "params/stem.weight: only in like",
        "params/head.bias: only in like",
    ):
        assert words in raised.value.what
    with pytest.raises(
        TreeMismatchError,
        match=r"params/head.weight: float32 \[1, 5\] in the checkpoint, float32 \[3, 5\] in like",
    ):
        restore(tmp_path, like=state, only="params/head.weight", rename={"last": "head"})
    assert unequal(gathered(state), before) == []
    restore(tmp_path, like=state, only="params/blocks.*")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"only": "parms"}, "only='parms' matches no path(.|\n)*did you mean 'params'"),
        ({"rename": {"first": "last"}}, "both params/last"),
        ({"rename": {"(": ""}}, "no regular expression"),
        ({"rename": {r"^params/hed\.": "params/head."}}, r"hed\\\\.'?, which matches no path"),
        ({"rename": {"first": "first", "frist": "x"}}, "'frist', which matches no path"),
    ],
)
def test_bad_patterns(tmp_path, options, words):
    save(tmp_path, one(1))
    state = one(2)
    with pytest.raises(ArgumentError, match=words):
        restore(tmp_path, like=state, **options)
    assert state.step == 2


def test_extras_come_as_one_where_like_has_none(tmp_path):
    save(tmp_path, one(1))
    step = make("local()", optimizer=adamw(1e-2))
    found = restore(tmp_path, like=step.init(seed=3), skip=["opt", "updates"])
    assert found.extras == {"own": 1}
    assert restore(tmp_path, like=found, skip=["extras", "opt", "updates"]).extras == {"own": 1}


names = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 9), min_size=1)


@given(saved=names, mine=names, data=st.data())
def test_plain_trees(tmp_path_factory, saved, mine, data):
    root = tmp_path_factory.mktemp("tree")
    save(root, {"x": saved})
    only = data.draw(st.lists(st.sampled_from(sorted({*saved, *mine})), unique=True, min_size=1))
    if all(key in saved and key in mine for key in only):
        found = restore(root, like={"x": mine}, only=[f"x/{key}" for key in only])
        assert found == {"x": {**mine, **{key: saved[key] for key in only}}}
    else:
        with pytest.raises(TreeMismatchError):
            restore(root, like={"x": mine}, only=[f"x/{key}" for key in only])


def test_a_model_without_values_needs_all_of_them(tmp_path, pools):
    from fnaccel.errors import CapabilityError

    save(tmp_path, one(1))
    step = make("fsdp(init='meta')")
    with pytest.raises(CapabilityError, match="without values"):
        restore(tmp_path, like=step.init(seed=0), only="params/first.*")
    state = restore(tmp_path, like=step.init(seed=0), only=["params", "buffers"])
    train(step, state, 0, 1)
