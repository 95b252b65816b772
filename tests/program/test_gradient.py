"""`value_and_grad`, `perturb` and arithmetic on trees: the gradient of a step as a value, against one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fnaccel as fa
from fnaccel import errors
from tests.parameter_losses import accumulated, part_of
from tests.tiny_models import Net, batch_of, loss_fn, program, whole_params


class Rich(nn.Module):
    """Dropout and a batch norm, which a gradient must leave as they are."""

    def __init__(self):
        super().__init__()
        self.inp, self.norm, self.out = nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)
        self.spare = nn.Linear(2, 2)

    def forward(self, x):
        return self.out(F.dropout(self.norm(self.inp(x)), 0.3, self.training))


def whole(tree):
    return {name: fa.tree.whole(value).clone() for name, value in tree.items()}


def differentiated(strategy, change=None, make=Net, looks=1):
    """Metrics and whole gradients at a first state, and what two updates make of it."""
    step = loss_fn if change is None else change(loss_fn)
    train_step = program(step, strategy=strategy, optimizer=fa.adamw(0.01), model=make)
    state = train_step.init(seed=0)
    mesh = train_step.mesh["loss"]
    batch = part_of(batch_of(12), mesh.rank, mesh.size)
    metrics = grads = None
    for _ in range(looks):
        metrics, grads = fa.value_and_grad(train_step)(state, batch)
        assert train_step.live_state is state
    for number in range(2):
        state, seen = train_step(state, part_of(batch_of(12, seed=number), mesh.rank, mesh.size))
        if looks and number == 0:
            assert torch.equal(torch.as_tensor(metrics["loss"]), torch.as_tensor(seen["loss"])) or abs(
                float(metrics["loss"]) - float(seen["loss"])
            ) < 1e-6 * abs(float(seen["loss"]))
    buffers = {name: value.clone() for name, value in state.buffers.items()}
    return metrics and float(metrics["loss"]), grads and whole(grads), whole_params(state), buffers


def scaled(step):
    return fa.with_precision(step, fa.transforms.Precision(compute="fp16", init_scale=1024.0))


def clipped(step):
    return fa.clip_norm(fa.remat(step), 0.01)


def captured(step):
    return fa.compile(fa.clip_norm(step, 0.01), backend="aot_eager")


def raw():
    torch.manual_seed(0)
    model = Net()
    x, y = batch_of(12)
    loss = (model(x) - y).square().sum() / 12
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}


WAYS = {
    "local": (1, fa.local(), None),
    "accumulated": (1, fa.local(), accumulated),
    "clipped": (1, fa.local(), clipped),
    "captured": (1, fa.local(), captured),
    "ddp": (2, fa.ddp(), None),
    "fsdp": (2, fa.fsdp(), None),
    "fsdp-accumulated": (2, fa.fsdp(), accumulated),
    "fsdp-captured": (2, fa.fsdp(), captured),
    "tensor": (2, fa.tensor(2, plan={"blocks.*.mix": "colwise_gather"}), None),
}


@pytest.mark.parametrize(
    "way", [pytest.param(w, marks=[pytest.mark.long] if "captured" in w else []) for w in WAYS]
)
def test_the_gradient_is_that_of_one_process_and_moves_nothing(pools, way):
    ranks, strategy, change = WAYS[way]
    loss, grads = raw()
    undisturbed = pools.run(ranks, differentiated, strategy, change, Net, 0)
    for found, plain in zip(
        pools.run(ranks, differentiated, strategy, change, Net, 2), undisturbed, strict=True
    ):
        assert found[0] == pytest.approx(loss, rel=1e-6)
        assert fa.tree.allclose(found[1], grads, rtol=1e-5, atol=1e-6)
        assert all(torch.equal(found[2][name], plain[2][name]) for name in plain[2])


@pytest.mark.parametrize(
    ("ranks", "strategy"), [(1, fa.local()), (2, fa.ddp(unused_parameters=True)), (2, fa.fsdp())], ids=str
)
def test_buffers_dropout_and_parameters_without_a_gradient(pools, ranks, strategy):
    undisturbed = pools.run(ranks, differentiated, strategy, None, Rich, 0)
    for found, plain in zip(
        pools.run(ranks, differentiated, strategy, None, Rich, 1), undisturbed, strict=True
    ):
        assert not found[1]["spare.weight"].any()
        assert all(torch.equal(found[2][name], plain[2][name]) for name in plain[2])
        assert all(torch.equal(found[3][name], plain[3][name]) for name in plain[3])


def test_fp16_is_unscaled():
    with fa.start(device="cpu"):
        train_step = program(scaled(loss_fn), strategy=fa.local())
        state = train_step.init(seed=0)
        _, grads = fa.value_and_grad(train_step)(state, batch_of(12))
        assert fa.tree.allclose(grads, raw()[1], rtol=2e-2, atol=2e-3)
        assert float(state.scale["scale"]) == 1024.0


def ascend(grads, info):
    return fa.tree.scale(grads, 0.05 / (fa.tree.norm(grads) + 1e-12))


def flat_start():
    layer = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(layer.weight)
    return layer


def of_squares(model, batch):
    """Its gradient is 0 if the parameters are."""
    return fa.Mean(model(batch[0]).square().sum(), weight=len(batch[0]))


UNGUARDED = fa.perturb(lambda grads, info: fa.tree.scale(grads, 0.05 / fa.tree.norm(grads)))
ORDERS = {
    "inside": lambda loss: UNGUARDED(fa.skip_nonfinite(loss)),
    "around": lambda loss: fa.skip_nonfinite(UNGUARDED(loss)),
    "captured": lambda loss: fa.compile(UNGUARDED(fa.skip_nonfinite(loss)), backend="eager"),
}


@pytest.mark.parametrize("strategy", ["local", "ddp", "fsdp"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_move_that_is_not_finite_is_skipped_on_either_side(order, strategy):
    with fa.start(device="cpu"):
        train_step = program(ORDERS[order](of_squares), model=flat_start, strategy=strategy)
        state, metrics = train_step(train_step.init(seed=0), batch_of(8))
        assert float(metrics["skipped"]) == 1.0
        assert whole(state.params)["weight"].tolist() == [[0.0] * 3]


def test_the_move_of_the_pages_is_finite_without_a_gradient():
    with fa.start(device="cpu"):
        train_step = program(fa.perturb(of_squares, ascend), model=flat_start)
        state, _ = train_step(train_step.init(seed=0), batch_of(8))
        assert whole(state.params)["weight"].tolist() == [[0.0] * 3]


def frozen_and_several():
    models = {"one": Net, "two": Net}

    def loss(models, batch):
        x, y = batch
        return fa.Mean((models["one"](x) + models["two"](x) - y).square().sum(), weight=len(y))

    train_step = fa.train_step(
        fa.perturb(loss, ascend),
        model=fa.distribute(models, fa.fsdp()),
        optimizer={"one": fa.sgd(0.1), "two": fa.sgd(0.1)},
        frozen="two/inp.*",
    )
    state = train_step.init(seed=0)
    _, grads = fa.value_and_grad(train_step)(state, batch_of(4))
    state, metrics = train_step(state, batch_of(4))
    return sorted(grads), sorted(grads["two"]), float(metrics["loss"])


def test_several_models_and_frozen_parameters(pools):
    for names, inner, loss in pools.run(2, frozen_and_several):
        assert names == ["one", "two"]
        assert "inp.weight" not in inner
        assert "out.weight" in inner
        assert loss > 0


def arithmetic(strategy):
    train_step = program(strategy=strategy)
    state = train_step.init(seed=0)
    params = dict(state.params)
    assert not any(value.requires_grad for value in params.values())
    x, y = fa.tree.scale(params, 2.0), fa.tree.axpy(-0.5, params, params)
    return (
        float(fa.tree.norm(params)),
        float(fa.tree.dot(x, y)),
        whole(fa.tree.lerp(x, y, torch.tensor(0.25))),
        [type(value).__name__ for value in y.values()],
    )


def test_arithmetic_on_any_layout(pools):
    (expected,) = pools.run(1, arithmetic, fa.local())
    torch.manual_seed(0)
    flat = torch.cat([p.detach().flatten() for p in Net().parameters()])
    assert expected[0] == pytest.approx(float(flat.norm()), rel=1e-6)
    assert expected[1] == pytest.approx(float(flat @ flat), rel=1e-5)
    for ranks, strategy in ((2, fa.ddp()), (2, fa.fsdp()), (4, fa.hsdp(2, 2)), (3, fa.fsdp())):
        for found in pools.run(ranks, arithmetic, strategy):
            assert found[:2] == pytest.approx(expected[:2], rel=1e-5)
            assert fa.tree.allclose(found[2], expected[2], rtol=1e-5, atol=1e-7)
            assert ("DTensor" in found[3]) == (str(strategy) != "ddp()")


def test_bad_input():
    with pytest.raises(errors.ArgumentError, match="takes a train step, not function"):
        fa.value_and_grad(loss_fn)
    with pytest.raises(errors.ArgumentError, match="a leaf is int, not a tensor"):
        fa.tree.norm({"a": 1})
    with pytest.raises(ValueError, match="a is missing"):
        fa.tree.dot({"a": torch.ones(1)}, {"b": torch.ones(1)})
    assert float(fa.tree.norm({})) == 0.0
    with fa.start(device="cpu"):
        train_step = program(fa.perturb(loss_fn, lambda grads, info: {"out.weight": grads["out.weight"]}))
        state = train_step.init()
        with pytest.raises(errors.TreeMismatchError, match="moves differ"):
            train_step(state, batch_of(4))
        stale = state
        train_step.close()
        train_step = program()
        state = train_step.init()
        with pytest.raises(errors.UnleasedStateError):
            fa.value_and_grad(train_step)(fa.snapshot(state), batch_of(4))
        train_step(state, batch_of(4))
        with pytest.raises(errors.StaleStateError):
            fa.value_and_grad(train_step)(state, batch_of(4))
        assert stale is not state


def test_deepspeed_keeps_gradients_to_itself():
    from fnaccel.engine.engine import Runtime

    class Bound:
        pass

    with fa.start(device="cpu"):
        train_step = program()
        state = train_step.init()
        engine = train_step.engine
        object.__setattr__(engine, "runtime", Runtime(bound=Bound()))
        with pytest.raises(errors.CapabilityError, match="keeps gradients to itself"):
            fa.value_and_grad(train_step)(state, batch_of(4))


def test_arithmetic_is_differentiated_and_mapped():
    tree = {"a": torch.tensor([3.0, 4.0]), "b": torch.ones(2, 2)}
    factor = torch.tensor(0.3)

    def size(factor):
        return fa.tree.norm(fa.tree.axpy(factor, tree, fa.tree.scale(tree, factor)))

    expected = 2 * float(fa.tree.norm(tree))
    leaf = factor.clone().requires_grad_()
    assert torch.autograd.grad(size(leaf), leaf)[0].item() == pytest.approx(expected)
    assert torch.func.grad(size)(factor).item() == pytest.approx(expected)
    assert torch.func.vmap(size)(torch.stack([factor, 2 * factor])).tolist() == pytest.approx(
        [expected * 0.3, expected * 0.6]
    )


def test_arithmetic_is_one_graph():
    def moved(first, second):
        factor = fa.tree.dot(first, second) / fa.tree.norm(first)
        return fa.tree.lerp(fa.tree.axpy(factor, first, second), fa.tree.scale(first, 2.0), 0.5)

    first = {"a": torch.tensor([3.0, 4.0]), "b": [torch.ones(2, 2)]}
    second = fa.tree.scale(first, -0.5)
    found = torch.compile(moved, fullgraph=True, backend="eager")(first, second)
    assert fa.tree.allclose(found, moved(first, second))


def test_arithmetic_of_two_shapes():
    for fn in (fa.tree.dot, lambda x, y: fa.tree.axpy(1.0, x, y), lambda x, y: fa.tree.lerp(x, y, 0.5)):
        with pytest.raises(fa.errors.ArgumentError, match=r"the shapes \[2\] and \[1\]"):
            fn({"x": torch.ones(2)}, {"x": torch.ones(1)})
