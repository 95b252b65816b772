"""`fa.pure`: an update as a function, against the train step, finite differences, and runs in turn."""

from __future__ import annotations

import functools
import re

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fnaccel as fa
from fnaccel import _torch, errors
from tests.tiny_models import Net, batch_of, loss_fn

EXACT = 1e-12


class Wide(Net):
    """`Net` in double precision."""

    def __init__(self):
        super().__init__()
        self.double()


class Normed(nn.Module):
    """A batch norm, whose statistics are buffers, and a frozen layer."""

    def __init__(self):
        super().__init__()
        self.inp, self.norm, self.out = nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)
        self.double()

    def forward(self, x):
        return self.out(torch.tanh(self.norm(self.inp(x))))


@pytest.fixture(autouse=True)
def world():
    with fa.start(device="cpu") as world:
        yield world


@functools.cache
def rows(seed, count=12):
    x, y = batch_of(count, seed)
    return x.double(), y.double()


BATCHES = [rows(seed) for seed in range(4)]
LAST = rows(9, 8)
OPTIMIZERS = {
    "sgd": fa.sgd(0.05),
    "momentum": fa.sgd(0.05, momentum=0.9, weight_decay=0.01),
    "adam": fa.adam(0.05, weight_decay=0.01),
    "adamw": fa.adamw(0.05),
    "lamb": fa.optim.chain(
        fa.optim.scale_by_adam(eps=1e-6),
        fa.optim.add_decayed_weights(0.01, mask="*weight"),
        fa.optim.trust_ratio(),
        lr=fa.warmup_cosine(0.1, warmup=2, total=10),
    ),
}


def program(step=loss_fn, optimizer=None, model=Wide, **options):
    optimizer = OPTIMIZERS["adamw"] if optimizer is None else optimizer
    return fa.train_step(step, model=fa.distribute(model, fa.local()), optimizer=optimizer, **options)


def through(update, lr=None, steps=3, values=None, **options):
    """The loss after some updates."""
    values = update.init(seed=0) if values is None else values
    for number in range(steps):
        values, _ = update(values, BATCHES[number], lr=lr, **options)
    return update.loss(values, LAST)


def noise(grads, own, info):
    """A user's GRADS function with a state: a decayed mean of gradients, and a count."""
    mean = {name: 0.5 * own["mean"][name] + grad for name, grad in grads.items()}
    info.record("calls", own["calls"] + 1)
    return mean, {"mean": mean, "calls": own["calls"] + 1, "share": 0.5 * own["share"]}


def noise_of(params):
    return {"mean": {n: torch.zeros_like(p) for n, p in params.items()}, "calls": 0, "share": 1.0}


def shrunk(params, own, info):
    """A user's UPDATE function, which writes in place."""
    for value in params.values():
        value.mul_(0.99)
    return own + 1.0


NOISE = fa.Transform("mean", fa.Phase.GRADS, apply=noise, init=noise_of)
SHRINK = fa.Transform("shrink", fa.Phase.UPDATE, apply=shrunk, init=lambda params: 0.0)


def weighted(model, batch):
    """A weight that is a tensor, and aux of each kind."""
    x, y = batch
    error = (model(x) - y).square()
    aux = {"error": fa.Mean(error.sum(0), error.shape[0]), "rows": fa.Sum(len(y)), "bare": error.mean()}
    return fa.Mean(error.sum(), weight=(y > 0).sum(), aux=aux | {"all": fa.Concat(error[:, 0])})


def scalar(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y), {"size": x.abs().mean()}


def summed(model, batch):
    x, y = batch
    return (model(x) - y).square().sum()


def keyed(model, batch, *, info):
    x, y = batch
    x = fa.random.dropout(x, 0.5, key=info.key.fold_in(torch.arange(len(x))))
    scale = 1.0 if info.extras is None else info.extras["scale"]
    return fa.Mean(scale * (model(x) - y).square().sum(), weight=len(y))


def two(models, batch):
    x, y = batch
    return fa.Mean((models["a"](x) + models["b"](x) - y).square().sum(), weight=len(y))


STEPS = {
    "plain": loss_fn,
    "weighted": weighted,
    "scalar": scalar,
    "keyed": keyed,
    "accumulated": fa.accumulate(weighted, 4),
    "clip_norm": fa.clip_norm(loss_fn, 0.1),
    "clip_value": fa.clip_value(loss_fn, 0.01),
    "averaged": fa.with_ema(loss_fn, 0.75),
    "users": SHRINK(NOISE(fa.accumulate(loss_fn, 2))),
    "with_weight": fa.with_weight(summed, lambda batch: len(batch[0])),
    "everything": fa.with_ema(
        SHRINK(fa.skip_nonfinite(fa.clip_norm(NOISE(fa.accumulate(loss_fn, 3)), 0.5))), 0.75
    ),
}


def largest(state, values):
    """The largest difference between a state and values, which have to have the same names."""
    worst = 0.0
    for part in ("params", "buffers", "opt", "ema", "transforms"):
        shown = dict(fa.tree.items(getattr(state, part) or {}))
        held = dict(fa.tree.items(values[part]))
        assert shown.keys() == held.keys(), part
        for name, value in held.items():
            worst = max(
                worst, float((torch.as_tensor(shown[name]).detach().double() - value.double()).abs().max())
            )
    assert (state.step, float(state.updates)) == (int(values["step"]), float(values["updates"]))
    return worst


def both(step, optimizer, batches=BATCHES[:3], **options):
    """A state and values after the same updates, and the largest difference of their metrics."""
    train_step = program(step, optimizer, **options)
    update, state = fa.pure(train_step), train_step.init(seed=0)
    values = update.init(seed=0)
    worst = 0.0
    for batch in batches:
        state, expected = train_step(state, batch)
        values, metrics = update(values, batch)
        assert metrics.keys() == expected.keys()
        for name, value in expected.items():
            worst = max(worst, float((torch.as_tensor(value) - metrics[name]).abs().max()))
    return state, values, worst


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_are_those_of_the_step(name):
    state, values, worst = both(loss_fn, OPTIMIZERS[name])
    assert largest(state, values) < EXACT
    assert worst < 1e-6  # the train step reports some metrics in fp32


@pytest.mark.parametrize("name", STEPS)
def test_steps_are_those_of_the_step(name):
    # a rate that fp32 holds, since an update that may be left out takes its rate in fp32
    rate = fa.sgd(0.125, momentum=0.5) if name == "everything" else OPTIMIZERS["lamb"]
    state, values, worst = both(STEPS[name], rate)
    # the averages of a skip are moved by a factor in fp32, and fused SGD divides by one
    assert largest(state, values) < (1e-6 if name == "everything" else EXACT)
    assert worst < 1e-6


def test_models_by_name_frozen_parameters_groups_and_buffers():
    groups = fa.optim.optimizer_groups([("*bias", fa.sgd(0.1)), ("*", fa.adamw(0.01))])
    state, values, _ = both(
        two, {"a": groups, "b": fa.sgd(0.1)}, model={"a": Normed, "b": Wide}, frozen="a/inp*"
    )
    assert largest(state, values) < EXACT
    assert float(values["buffers"]["a"]["norm.num_batches_tracked"]) == 3


def test_rates_of_several_optimizers():
    """Oracle: two optimizers of torch."""
    groups = fa.optim.optimizer_groups([("*bias", fa.adam(0.1)), ("*", fa.sgd(0.01))])
    update = fa.pure(program(loss_fn, groups, model=Wide))
    values = update.init(seed=0)
    model = Wide()
    model.load_state_dict(values["params"])
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    others = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    optimizers = [torch.optim.Adam(biases, lr=0.3), torch.optim.SGD(others, lr=0.01)]
    for batch in BATCHES[:3]:
        values, metrics = update(values, batch, lr={"adam": 0.3})
        assert (float(metrics["lr/adam"]), float(metrics["lr/sgd"])) == (0.3, 0.01)
        model.zero_grad()
        loss = loss_fn(model, batch)
        (loss.total / loss.weight).backward()
        for optimizer in optimizers:
            optimizer.step()
    for name, param in model.named_parameters():
        assert torch.allclose(values["params"][name], param, atol=1e-12)
    for rate, words in (
        (0.5, "one rate, and the optimizers have several"),
        ({"adamw": 0.5}, "no optimizer .*'adamw'"),
    ):
        with pytest.raises(errors.ArgumentError, match=words) as raised:
            update(values, BATCHES[0], lr=rate)
        assert "lr={'adam': ..., 'sgd': ...}" in str(raised.value)
    alike = fa.optim.optimizer_groups([("*bias", fa.adam(0.1)), ("*", fa.sgd(0.1))])
    update = fa.pure(program(loss_fn, alike, model=Wide))
    update(update.init(), BATCHES[0], lr=0.5)


def test_rates_of_groups_have_the_names_of_a_train_step():
    """The rate of the first group was reported as that of the optimizer."""
    train_step = program(loss_fn, fa.sgd(0.1, groups={"*bias": {"lr": 0.2}, "inp*": {"lr": 0.3}}), model=Wide)
    update = fa.pure(train_step)
    _, metrics = train_step(train_step.init(), BATCHES[0])
    _, pure = update(update.init(), BATCHES[0])
    for found in (metrics, pure):
        rates = {name: float(value) for name, value in found.items() if name.startswith("lr")}
        assert rates == pytest.approx({"lr": 0.1, "lr/*bias": 0.2, "lr/inp*": 0.3})


def test_parameters_of_several_models_have_the_names_of_gradients():
    def decays(grads, own, info):
        assert grads.keys() <= info.params.keys()
        return {n: g + 0.1 * info.params[n] if n.startswith("b/") else g for n, g in grads.items()}, own

    step = fa.Transform("decays", fa.Phase.GRADS, apply=decays)(two)
    state, values, _ = both(step, fa.sgd(0.1), model={"a": Wide, "b": Wide})
    assert largest(state, values) < EXACT
    groups = {"a": fa.sgd(0.1), "b": fa.sgd(0.1, weight_decay=0.1)}
    expected, _, _ = both(two, groups, model={"a": Wide, "b": Wide})
    for path, value in fa.tree.items(expected.params):
        assert torch.allclose(dict(fa.tree.items(state.params))[path], value, atol=1e-12)


def test_bf16_is_that_of_the_step():
    state, values, worst = both(
        fa.with_precision(loss_fn, "bf16"),
        fa.adamw(0.01),
        [batch_of(12, seed) for seed in range(3)],
        model=Net,
    )
    assert largest(state, values) < 1e-6
    assert worst < 1e-6
    low = fa.with_precision(loss_fn, fa.transforms.Precision(param="bf16", compute="bf16"))
    state, values, _ = both(low, fa.adamw(0.01), [batch_of(12, seed) for seed in range(3)], model=Net)
    assert largest(state, values) < 1e-3
    assert values["params"]["out.weight"].dtype is torch.bfloat16


def test_an_update_that_is_left_out_moves_nothing():
    bad = (BATCHES[1][0] * float("nan"), BATCHES[1][1])
    step = fa.with_ema(fa.skip_nonfinite(NOISE(loss_fn)), 0.75)
    state, values, _ = both(step, OPTIMIZERS["lamb"], [BATCHES[0], bad, BATCHES[2]])
    assert largest(state, values) < 1e-6
    assert float(values["updates"]) == 2
    update = fa.pure(program(step))
    before, _ = update(update.init(), BATCHES[0])
    after, metrics = update(before, bad)
    assert float(metrics["skipped"]) == 1
    for part in ("params", "opt", "ema", "transforms", "updates"):
        pairs = zip(fa.tree.leaves(before[part]), fa.tree.leaves(after[part]), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), part


def test_an_update_is_left_out_for_what_a_transform_returns():
    """The gradients of the loss are finite, and those of the transform are not in the second step."""

    def breaks(grads, own, info):
        return {name: grad / (1.0 - own) for name, grad in grads.items()}, own + 1.0

    breaking = fa.Transform("breaks", fa.Phase.GRADS, apply=breaks, init=lambda params: torch.zeros(()))
    state, values, _ = both(breaking(fa.skip_nonfinite(loss_fn)), OPTIMIZERS["adam"], BATCHES[:3])
    assert largest(state, values) < 1e-8
    assert int(state.updates) == int(values["updates"]) == 1


def test_no_row_counts():
    update = fa.pure(program(weighted))
    before = update.init()
    after, metrics = update(before, (BATCHES[0][0], -BATCHES[0][1].abs()))
    assert float(metrics["skipped"]) == 1
    assert all(
        torch.equal(a, b)
        for a, b in zip(*map(fa.tree.leaves, (before["params"], after["params"])), strict=True)
    )


def test_nothing_is_written():
    update = fa.pure(program(STEPS["everything"], OPTIMIZERS["momentum"]))
    values = update.init()
    copies = fa.tree.map(torch.clone, values)
    update(values, BATCHES[0])
    assert all(torch.equal(a, b) for a, b in zip(*map(fa.tree.leaves, (values, copies)), strict=True))


def test_buffers_go_in_as_clones():
    update = fa.pure(program(model=Normed))
    values = update.init()
    copies = fa.tree.map(torch.clone, values["buffers"])
    after, _ = update(values, BATCHES[0])
    update.loss(values, BATCHES[0])
    assert all(torch.equal(value, copies[name]) for name, value in values["buffers"].items())
    assert not torch.equal(after["buffers"]["norm.running_mean"], copies["norm.running_mean"])


EPS = 1e-6


def slope(fn, at):
    return float((fn(at + EPS) - fn(at - EPS)) / (2 * EPS))


def close(found, expected, tolerance=1e-6):
    return abs(float(found) - expected) < tolerance * max(abs(expected), 1e-2)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_hypergradients_are_finite_differences(name):
    update = fa.pure(program(optimizer=OPTIMIZERS[name]))
    lr = torch.tensor(0.05, dtype=torch.float64)
    decay = torch.tensor(0.02, dtype=torch.float64)

    def by_rate(lr):
        return through(update, lr)

    def by_decay(decay):
        return through(update, 0.05, weight_decay=decay)

    assert close(torch.func.grad(by_rate)(lr), slope(by_rate, lr))
    assert close(torch.func.grad(by_decay)(decay), slope(by_decay, decay))
    first = update.init()

    def by_params(params):
        return through(update, 0.05, values=first | {"params": params})

    grads = torch.func.grad(by_params)(first["params"])
    for key, place in (("inp.weight", (2, 1)), ("blocks.0.mix.bias", (3,)), ("out.weight", (0, 4))):

        def moved(by, key=key, place=place):
            value = first["params"][key].clone()
            value[place] += by
            return by_params(first["params"] | {key: value})

        assert close(grads[key][place], float((moved(EPS) - moved(-EPS)) / (2 * EPS)))


@pytest.mark.parametrize(
    ("step", "optimizer", "options"),
    [
        (fa.clip_norm(loss_fn, 0.5), fa.sgd(0.1), {"max_norm": 0.4}),
        (fa.clip_value(loss_fn, 0.05), fa.sgd(0.1), {"max_value": 0.04}),
        (loss_fn, OPTIMIZERS["momentum"], {"momentum": 0.8}),
        (loss_fn, OPTIMIZERS["lamb"], {"scale_by_adam_eps": 1e-2}),
    ],
)
def test_numbers_of_the_description(step, optimizer, options):
    update = fa.pure(program(step, optimizer))
    (name, value), *_ = options.items()

    def by(number):
        return through(update, 0.05, **{name: number})

    number = torch.tensor(value, dtype=torch.float64)
    assert close(torch.func.grad(by)(number), slope(by, number))
    assert float(by(number)) != float(through(update, 0.05))
    mapped = torch.func.vmap(by)(torch.stack([number, 0.9 * number]))
    assert torch.allclose(mapped, torch.stack([by(number), by(0.9 * number)]), rtol=1e-12)


def test_betas_are_a_pair_and_backward_is_the_same():
    update = fa.pure(program(optimizer=fa.adam(0.05)))
    beta = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    through(update, 0.05, betas=(beta, 0.99)).backward()
    expected = torch.func.grad(lambda beta: through(update, 0.05, betas=(beta, 0.99)))(beta.detach())
    assert torch.allclose(beta.grad, expected)
    assert close(expected, slope(lambda beta: through(update, 0.05, betas=(beta, 0.99)), beta.detach()))


def test_rates_and_seeds_mapped_are_runs_in_turn():
    update = fa.pure(program(STEPS["everything"]))
    starts = [update.init(seed=seed) for seed in range(3)]
    stacked = fa.tree.map(lambda *leaves: torch.stack(leaves), *starts)
    rates = torch.tensor([0.01, 0.02, 0.05], dtype=torch.float64)

    def run(values, lr):
        for batch in BATCHES:
            values, metrics = update(values, batch, lr=lr)
        return values, metrics["loss"]

    mapped, losses = torch.func.vmap(run)(stacked, rates)
    for place, (values, lr) in enumerate(zip(starts, rates, strict=True)):
        alone, loss = run(values, lr)
        assert torch.allclose(losses[place], loss, rtol=1e-12)
        for a, b in zip(fa.tree.leaves(mapped), fa.tree.leaves(alone), strict=True):
            assert torch.allclose(a[place].double(), b.double(), rtol=1e-10, atol=1e-14)


def test_batch_norms_are_mapped_over_stacked_values():
    update = fa.pure(program(model=Normed))
    starts = [update.init(seed=seed) for seed in range(2)]
    stacked = fa.tree.map(lambda *leaves: torch.stack(leaves), *starts)
    mapped, _ = torch.func.vmap(lambda values: update(values, BATCHES[0]))(stacked)
    alone, _ = update(starts[1], BATCHES[0])
    assert torch.allclose(mapped["buffers"]["norm.running_var"][1], alone["buffers"]["norm.running_var"])


def graphs(fn, *args, backend="aot_eager"):
    """The result of a compiled function, and of how many graphs it is."""
    torch._dynamo.reset()
    before = _torch.compile_counts()[0]
    result = torch.compile(fn, fullgraph=True, backend=backend)(*args)
    return result, _torch.compile_counts()[0] - before


def four(update, values, batches, lr):
    losses = []
    for batch in batches:
        values, metrics = update(values, batch, lr=lr, weight_decay=0.02)
        losses.append(metrics["loss"])
    return values, torch.stack(losses)


@pytest.mark.long
def test_updates_are_one_graph():
    update = fa.pure(program(STEPS["clip_norm"], OPTIMIZERS["adam"]))
    values, lr = update.init(), torch.tensor(0.05, dtype=torch.float64)
    fn = functools.partial(four, update)
    expected, losses = fn(values, BATCHES[:2], lr)
    (found, compiled), count = graphs(fn, values, BATCHES[:2], lr)
    assert count == 1
    assert torch.allclose(compiled, losses, rtol=1e-12)
    for a, b in zip(fa.tree.leaves(found), fa.tree.leaves(expected), strict=True):
        assert torch.allclose(a.double(), b.double(), rtol=1e-10)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "aot_eager") for name in ("weighted", "keyed", "accumulated", "everything")),
        ("weighted", "inductor"),
        ("keyed", "inductor"),
    ],
)
def test_four_updates_are_one_graph(name, backend):
    update = fa.pure(program(STEPS[name], OPTIMIZERS["adamw"]))
    values, lr = update.init(), torch.tensor(0.05, dtype=torch.float64)
    fn = functools.partial(four, update)
    expected, _ = fn(values, BATCHES, lr)
    (found, _), count = graphs(fn, values, BATCHES, lr, backend=backend)
    assert count == 1
    for a, b in zip(fa.tree.leaves(found), fa.tree.leaves(expected), strict=True):
        assert torch.allclose(a.double(), b.double(), rtol=1e-8, atol=1e-12)


@pytest.mark.long
def test_a_hypergradient_and_many_rates_are_one_graph():
    update = fa.pure(program(optimizer=fa.adam(0.05)))
    values, rates = update.init(), torch.tensor([0.05, 0.02], dtype=torch.float64)

    def final(lr, values):
        return through(update, lr, values=values)

    for fn in (torch.func.grad(final), torch.func.grad_and_value(final)):
        mapped = torch.func.vmap(fn, (0, None))
        found, count = graphs(mapped, rates, values)
        assert count == 1
        pairs = zip(*map(fa.tree.leaves, (found, mapped(rates, values))), strict=True)
        assert all(torch.allclose(a, b, rtol=1e-10) for a, b in pairs)


@pytest.mark.parametrize("name", ["everything", "averaged", "keyed"])
def test_a_state_of_values_goes_on_as_the_run_does(name):
    train_step = program(STEPS[name], OPTIMIZERS["lamb"])
    update, state = fa.pure(train_step), train_step.init(seed=3)
    state, _ = train_step(state, BATCHES[0])
    values, _ = update(update.values(state), BATCHES[1])
    expected = state
    for batch in BATCHES[1:]:
        expected, _ = train_step(expected, batch)
    expected = fa.snapshot(expected)
    state = train_step.adopt(update.state(values))
    assert state.step == 2
    for batch in BATCHES[2:]:
        state, _ = train_step(state, batch)
    assert state.rng == expected.rng
    assert largest(state, update.values(expected)) < 1e-6


def test_the_train_step_is_left_alone():
    train_step = program(STEPS["everything"])
    update, state = fa.pure(train_step), train_step.init(seed=0)
    values = update.values(state)
    update(values, BATCHES[0])
    assert train_step.live_state is state
    assert largest(state, values) == 0
    expected = update.init(seed=0)
    assert all(torch.equal(a, b) for a, b in zip(*map(fa.tree.leaves, (values, expected)), strict=True))


def test_extras_batches_and_windows():
    update = fa.pure(program(keyed))
    values = update.init()
    plain = update.loss(values, BATCHES[0])
    assert torch.allclose(update.loss(values, BATCHES[0], extras={"scale": 2.0}), 2 * plain)
    data = list(
        fa.shard([torch.utils.data.default_collate([(x, y) for x, y in zip(*BATCHES[0], strict=True)])])
    )
    found, _ = update(values, data[0])
    expected, _ = update(values, BATCHES[0])
    window, _ = update(values, fa.data.Window([BATCHES[0], BATCHES[0]]))
    for a, b, c in zip(*(fa.tree.leaves(each["params"]) for each in (found, expected, window)), strict=True):
        assert torch.allclose(a, b)
        assert torch.allclose(a, c)


def test_a_built_module_is_copied():
    torch.manual_seed(0)
    model = Wide()
    train_step = program(model=model)
    update, state = fa.pure(train_step), train_step.init()
    state, _ = train_step(state, BATCHES[0])
    values, _ = update(update.init(), BATCHES[0])
    assert largest(state, values) < EXACT
    with pytest.raises(errors.OwnershipError, match="has its own modules"):
        fa.pure(train_step)


def segment(update, values, batches, lr):
    for batch in batches:
        values, _ = update(values, batch, lr=lr)
    return values


def segments(update, run, length):
    def final(lr):
        values = update.init()
        for first in range(0, 8, length):
            values = run(update, values, [BATCHES[i % 4] for i in range(first, first + length)], lr)
        return update.loss(values, LAST)

    return final


def test_recomputed_is_plain_and_keeps_less():
    update = fa.pure(program(SHRINK(fa.clip_norm(loss_fn, 0.5)), fa.adam(0.05)))
    lr = torch.tensor(0.05, dtype=torch.float64)
    plain, again = (segments(update, run, 2) for run in (segment, fa.recomputed(segment)))
    peaks = []
    for final in (plain, again):
        leaf = lr.clone().requires_grad_()
        with fa.estimate.LiveStorages() as storages:
            final(leaf).backward()
        peaks.append((storages.peak, leaf.grad))
    assert torch.allclose(peaks[0][1], peaks[1][1], rtol=1e-12)
    assert peaks[1][0] < 0.7 * peaks[0][0]
    for of in (torch.func.grad, lambda fn: torch.func.grad(torch.func.grad(fn))):
        assert torch.allclose(of(again)(lr), of(plain)(lr), rtol=1e-12)
    rates = torch.stack([lr, 0.5 * lr])
    assert torch.allclose(
        torch.func.vmap(torch.func.grad(again))(rates), torch.func.vmap(torch.func.grad(plain))(rates)
    )


def test_recomputed_draws_the_same_numbers_and_returns_any_tree():
    def fn(x, *, share):
        return {"out": F.dropout(x, share).sin(), "same": x, "number": 3}, (x * 2,)

    x = torch.randn(50, dtype=torch.float64, requires_grad=True)
    grads = []
    for run in (fn, fa.recomputed(fn)):
        torch.manual_seed(5)
        result, (twice,) = run(x, share=0.5)
        assert result["number"] == 3
        grads.append(torch.autograd.grad((result["out"] + result["same"] + twice).square().sum(), x)[0])
    assert torch.equal(*grads)


def test_recomputed_refuses_what_it_would_lose():
    lr = torch.tensor(0.1, requires_grad=True)
    with pytest.raises(errors.ArgumentError, match="'lr' from around it"):
        fa.recomputed(lambda x: x * lr)(torch.ones(2))


def around(call):
    return call


REFUSED = {
    "fp16": (fa.with_precision(loss_fn, "fp16"), fa.sgd(0.1), "fp16 needs a loss scale"),
    "compile": (fa.compile(loss_fn, scope="loss"), fa.sgd(0.1), "compiles a step with its state"),
    "call": (fa.Transform("mine", fa.Phase.CALL, apply=around)(loss_fn), fa.sgd(0.1), "mine stands around"),
    "perturb": (fa.perturb(loss_fn, lambda grads, info: grads), fa.sgd(0.1), "takes a second gradient"),
    "torch": (loss_fn, fa.optim.from_torch(torch.optim.RMSprop, lr=0.1), "RMSprop has no rule"),
    "adafactor": (loss_fn, fa.optim.adafactor(0.1), "Adafactor has no rule"),
    "later": (loss_fn, fa.optim.starting_at(3, fa.sgd(0.1)), "starts at update 3"),
    "none": (loss_fn, None, "no optimizer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_by_name(name):
    step, optimizer, message = REFUSED[name]
    train_step = fa.train_step(step, model=fa.distribute(Net, "local"), optimizer=optimizer)
    with pytest.raises(errors.CapabilityError, match=message):
        fa.pure(train_step)


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp(1) * ddp(1)", "tensor(1)"])
def test_strategies_are_refused(strategy):
    train_step = fa.train_step(loss_fn, model=fa.distribute(Net, strategy), optimizer=fa.sgd(0.1))
    with pytest.raises(errors.CapabilityError, match=re.escape(f"the strategy is {strategy}")):
        fa.pure(train_step)


def own_run(strategy):
    """The parameters after two updates of this rank alone, from its own seed. `init` takes all ranks or none."""
    with fa.start(device="cpu") as world:
        train_step = fa.train_step(loss_fn, model=fa.distribute(Wide, strategy), optimizer=fa.adamw(0.05))
        update = fa.pure(train_step)
        values = update.init(seed=world.rank)
        for number in range(2):
            values, _ = update(values, BATCHES[world.rank + number], lr=0.1 / (1 + world.rank))
        if strategy == "local":
            with pytest.raises(errors.AxisProductError, match="the world has 3"):
                train_step.init()
        return dict(values["params"])


@pytest.mark.parametrize("strategy", ["local", "ddp"])
def test_each_of_several_ranks_makes_updates_of_its_own(pools, strategy):
    update = fa.pure(program())
    for rank, params in enumerate(pools.run(3, own_run, strategy)):
        values = update.init(seed=rank)
        for number in range(2):
            values, _ = update(values, BATCHES[rank + number], lr=0.1 / (1 + rank))
        assert all(torch.equal(params[name], value) for name, value in values["params"].items())


def test_calls_are_refused():
    update = fa.pure(program(fa.clip_norm(loss_fn, 1.0)))
    values = update.init()
    with pytest.raises(errors.UnknownNameError, match=r"'max_norms'[\s\S]*max_norm"):
        update(values, BATCHES[0], max_norms=1.0)
    with pytest.raises(errors.UnknownNameError, match="nesterov"):
        update(values, BATCHES[0], nesterov=True)
    params = {name: value for name, value in values["params"].items() if name != "out.weight"}
    with pytest.raises(errors.TreeMismatchError, match=r"out\.weight"):
        update(values | {"params": params}, BATCHES[0])
    wide = values["params"] | {"out.bias": values["params"]["out.bias"][None]}
    with pytest.raises(errors.TreeMismatchError, match=r"out\.bias has shape \[1, 1\], not \[1\]"):
        update(values | {"params": wide}, BATCHES[0])
    with pytest.raises(errors.ArgumentError, match="not a dict"):
        update(program().init(), BATCHES[0])
    with pytest.raises(errors.ArgumentError, match="takes a train step"):
        fa.pure(loss_fn)
    host = fa.pure(program(optimizer=fa.sgd(lambda updates: [0.1, 0.2][int(updates)])))
    with pytest.raises(errors.CapabilityError, match="takes no tensor"):
        host(host.init(), BATCHES[0])
    host(host.init(), BATCHES[0], lr=0.1)


class Growing(Wide):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros_like(BATCHES[0][0][:1]))

    def forward(self, x):
        self.seen = torch.cat([self.seen, x.detach()])
        return super().forward(x)


def test_a_forward_may_change_the_shape_of_a_buffer():
    update = fa.pure(program(model=Growing))
    values = update.init()
    for batch in BATCHES[:2]:
        values, _ = update(values, batch)
    assert len(values["buffers"]["seen"]) == 1 + sum(len(batch[0]) for batch in BATCHES[:2])


def test_positions_are_kept_by_hand():
    train_step = program()
    update, state = fa.pure(train_step), train_step.init()
    made = attrs.evolve(update.state(update.values(state)), data=fa.state.Position(epoch=2, samples=8))
    assert train_step.adopt(made).data.epoch == 2
