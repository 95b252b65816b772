"""`loss_fn(model, batch, *, info)`: keys, rows, numbers and extras, equal on any ranks and in any micro-batches."""

from __future__ import annotations

import functools

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter
from torch.utils.data import DataLoader, IterableDataset

import fnaccel as fa
from fnaccel.errors import LossError
from fnaccel.step.loss_info import takes_info
from tests.tiny_models import Net, batch_of, program, whole_params

EXTRAS = {"scale": 1.5, "curriculum": 2}


def noisy(model, batch, *, info):
    """Dropout and noise by key and row, a factor of the extras, and a factor of the step."""
    x, y = batch
    rows = info.key.fold_in(info.rows)
    x = fa.random.dropout(x, 0.2, key=rows.fold_in(0)) + 0.1 * fa.random.normal(rows.fold_in(1), (3,))
    total = F.mse_loss(model(x), y, reduction="sum") * info.extras["scale"]
    return fa.Mean(
        total / (1 + 0.1 * info.step) + 0 * info.updates * info.extras["curriculum"], weight=len(y)
    )


def rows_of_data():
    x, y = batch_of(22)
    return list(zip(x, y, strict=True))


def by_hand(steps):
    """The same in plain PyTorch: the global batch at once, places counted from 0."""
    torch.manual_seed(0)
    model, losses = Net(), []
    for step, start in enumerate(range(0, 8 * steps, 8)):
        batch = tuple(part[start : start + 8] for part in batch_of(22))
        key = fa.random.key(0).fold_in(step)
        info = fa.LossInfo(key, step=step, updates=step, extras=EXTRAS, rows=torch.arange(len(batch[0])))
        loss = noisy(model, batch, info=info)
        mean = loss.total / loss.weight
        grads = torch.autograd.grad(mean, list(model.parameters()))
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads, strict=True):
                p -= 0.1 * g
        losses.append(float(mean.detach()))
    return losses, {name: p.detach() for name, p in model.named_parameters()}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(rows_of_data())


def loader_of(kind):
    if kind == "stream":
        return DataLoader(Stream(), batch_size=8)
    if kind == "groups":
        groups = [list(range(8)), list(range(8, 16)), list(range(16, 22))]
        return DataLoader(rows_of_data(), batch_sampler=groups)
    return DataLoader(rows_of_data(), batch_size=8)


def trained(strategy, micro_batches=1, compiled="", kind="map", **options):
    step = fa.accumulate(noisy, micro_batches) if micro_batches > 1 else noisy
    counter = CompileCounter()
    if compiled:
        step = fa.compile(step, scope=compiled, backend=counter)
    train_step = program(step, strategy=strategy)
    state, losses = train_step.init(seed=0, extras=EXTRAS), []
    for batch in fa.shard(loader_of(kind), **options).on(train_step.mesh):
        state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"]))
    result = losses, whole_params(state), counter.frame_count
    train_step.close()
    return result


def check(result, steps=3):
    losses, params, graphs = result
    expected_losses, expected = by_hand(steps)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-6, atol=1e-6)
    for name, value in expected.items():
        torch.testing.assert_close(params[name], value, rtol=1e-6, atol=1e-6)
    return graphs


@pytest.mark.parametrize(
    ("ranks", "strategy", "micro_batches", "options"),
    [
        (1, "local", 1, {}),
        (1, "local", 4, {}),
        (2, "ddp", 1, {}),
        (2, "ddp", 4, {}),
        (2, "fsdp", 4, {}),
        (2, "ddp", 1, {"kind": "stream"}),
        (2, "ddp", 1, {"kind": "groups"}),
        (2, "ddp", 1, {"dispatch": True}),
        (2, "tensor(2, {'inp': 'colwise_gather'})", 2, {}),
        pytest.param(2, "fsdp", 1, {}, marks=pytest.mark.long),
        pytest.param(3, "ddp", 2, {"kind": "groups"}, marks=pytest.mark.long),
        pytest.param(3, "ddp", 2, {"kind": "stream"}, marks=pytest.mark.long),
        pytest.param(4, "ddp(2) * fsdp(2)", 2, {}, marks=pytest.mark.long),
    ],
)
def test_a_mask_for_each_row_is_that_of_one_process(pools, ranks, strategy, micro_batches, options):
    for result in pools.run(ranks, functools.partial(trained, **options), strategy, micro_batches):
        check(result)


@pytest.mark.parametrize(
    ("ranks", "strategy", "micro_batches", "scope"),
    [
        pytest.param(1, "local", 1, "step", marks=pytest.mark.long),
        pytest.param(1, "local", 2, "step", marks=pytest.mark.long),
        (1, "local", 1, "loss"),
        pytest.param(2, "fsdp", 1, "step", marks=pytest.mark.long),
        pytest.param(2, "ddp", 1, "step", marks=pytest.mark.long),
        pytest.param(1, "local", 1, "block", marks=pytest.mark.long),
    ],
)
def test_compiled(pools, ranks, strategy, micro_batches, scope):
    for result in pools.run(ranks, trained, strategy, micro_batches, scope):
        check(result)


@attrs.frozen
class Schedule:
    scale: float
    noisy: bool = False


def by_record(model, batch, *, info):
    total = model(batch[0]).sum() * info.extras["schedule"].scale
    return fa.Mean(total + info.step if info.extras["schedule"].noisy else total, weight=len(batch[0]))


def test_an_object_in_the_extras_is_an_input_too():
    counter, losses = CompileCounter(), []
    with fa.start(device="cpu"):
        train_step = program(fa.compile(by_record, scope="step", backend=counter), optimizer=fa.sgd(0.0))
        state = train_step.init(extras={"schedule": Schedule(1.0)})
        for number in range(4):
            state = state.with_extras({"schedule": Schedule(float(number))})
            state, metrics = train_step(state, batch_of(4))
            losses.append(float(metrics["loss"]))
        assert counter.frame_count == 1
        torch.testing.assert_close(losses, [number * losses[1] for number in range(4)])
        assert state.extras["schedule"] == Schedule(3.0)
        train_step(state.with_extras({"schedule": Schedule(1.0, noisy=True)}), batch_of(4))
        assert counter.frame_count == 2  # a bool is the program's


def test_one_graph_serves_all_steps():
    """Steps, updates and extras are inputs: other values of them compile nothing again."""
    counter = CompileCounter()
    with fa.start(device="cpu"):
        train_step = program(fa.compile(noisy, scope="step", backend=counter))
        state = train_step.init(seed=0, extras=EXTRAS)
        batches = list(fa.shard(DataLoader(rows_of_data(), batch_size=4, drop_last=True)))
        for number, batch in enumerate(batches):
            state = state.with_extras({"scale": 1.0 + number, "curriculum": number})
            state, _ = train_step(state, batch)
        assert state.step == 5
    assert counter.frame_count == 1


def test_the_batches_of_a_window_count_on():
    seen = []

    def loss(model, batch, *, info):
        seen.append(info.rows.tolist())
        return fa.Mean(model(batch[0]).sum(), weight=len(batch[0]))

    with fa.start(device="cpu"):
        train_step = program(fa.accumulate(loss, 2))
        state = train_step.init()
        (window,) = fa.shard(DataLoader(rows_of_data(), batch_size=8), window=3)
        seen.clear()
        train_step(state, window)
    assert seen[-6:] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
        [12, 13, 14, 15],
        [16, 17, 18],
        [19, 20, 21],
    ]


def keys_and_rows(strategy, **options):
    seen = []

    def loss(model, batch, *, info):
        seen.append((int(info.key.bits), info.rows.tolist()))
        return fa.Mean(model(batch[0]).sum(), weight=len(batch[0]))

    train_step = program(fa.accumulate(loss, 2), strategy=strategy)
    state = train_step.init(seed=3)
    for batch in fa.shard(loader_of("map"), **options).on(train_step.mesh):
        state, _ = train_step(state, batch)
    train_step.close()
    return seen[-6:]


def test_a_key_knows_no_rank_and_no_micro_batch(pools):
    for rank, seen in enumerate(pools.run(2, keys_and_rows, "ddp")):
        keys = [int(fa.random.key(3, step).bits) for step in range(3)]
        assert [key for key, _ in seen] == [key for key in keys for _ in range(2)]
        first = [0, 4][rank]
        assert [rows for _, rows in seen][:2] == [[first, first + 1], [first + 2, first + 3]]


def test_loaders_of_each_rank_have_places_behind_each_other(pools):
    for rank, seen in enumerate(pools.run(2, functools.partial(keys_and_rows, per_rank=True), "ddp")):
        assert seen[0][1][0] == 8 * rank


def test_a_batch_that_shard_did_not_make_has_no_rows():
    with fa.start(device="cpu"):
        train_step = program(noisy)
        state = train_step.init(extras=EXTRAS)
        with pytest.raises(LossError, match="places of its rows in the global batch") as caught:
            train_step(state, batch_of(4))
        assert "fa.shard(loader).on(train_step.mesh)" in str(caught.value)
        compiled = program(fa.compile(noisy, scope="step", backend="eager"))
        with pytest.raises(LossError, match="places of its rows"):
            compiled(compiled.init(extras=EXTRAS), batch_of(4))


def negatives(model, batch, *, info):
    """In-batch negatives of all ranks: the log of a sum over the rows of the global batch that count."""
    x, _ = batch
    z = model(x)
    others = fa.gather(z.detach(), valid=int(info.valid.sum()))
    return fa.Mean((z @ others.T).logsumexp(-1).sum(), weight=len(x))


def with_negatives():
    train_step = program(negatives, strategy="ddp")
    state, losses = train_step.init(seed=0), []
    for batch in fa.shard(DataLoader(rows_of_data(), batch_size=20)).on(train_step.mesh):
        state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


def test_rows_that_do_not_count_are_left_out_by_a_loss(pools):
    """The last batch has two rows: of three ranks one has none, and runs a copy."""
    expected = pools.run(1, with_negatives)[0]
    assert pools.run(3, with_negatives)[0] == pytest.approx(expected, rel=1e-5)


def test_a_row_alone_counts_as_its_micro_batch_does():
    """`fa.per_example` gives a loss function one row after the other."""
    rows = torch.arange(3)
    info = fa.LossInfo(fa.random.key(0), rows=rows, valid=torch.tensor(False))
    assert info.valid.tolist() == [False] * 3
    assert info.of_rows(rows[:1]).valid.tolist() == [False]
    assert fa.LossInfo(fa.random.key(0), rows=rows).of_rows(rows[:1]).valid.tolist() == [True]


def test_the_rest_of_info_needs_no_shard():
    def loss(model, batch, *, info):
        x = fa.random.dropout(batch[0], 0.5, key=info.key)
        return fa.Mean(model(x).sum(), weight=len(x), aux={"step": fa.Sum(torch.as_tensor(info.step))})

    with fa.start(device="cpu"):
        train_step = program(loss)
        state = train_step.init()
        for step in range(2):
            state, metrics = train_step(state, batch_of(4))
            assert metrics["step"] == step


def test_transforms_of_the_forward_see_a_model_and_a_batch():
    seen = []

    def watch(loss_fn):
        def watched(*args, **keywords):
            seen.append((len(args), keywords))
            return loss_fn(*args, **keywords)

        return watched

    with fa.start(device="cpu"):
        step = fa.Transform("watch", fa.Phase.FORWARD, apply=watch)(noisy)
        train_step = program(step)
        state = train_step.init(extras=EXTRAS)
        train_step(state, next(iter(fa.shard(loader_of("map")))))
    assert set(map(str, seen)) == {"(2, {})"}


def test_looks_and_metrics_get_it():
    def score(model, batch, *, info):
        value = model(batch[0]).sum() * 0
        return {
            "rows": fa.Concat(info.rows + value.long()),
            "step": fa.Mean(info.step + value, weight=1),
            "scale": fa.Mean(value + info.extras["scale"], weight=1),
        }

    with fa.start(device="cpu"):
        train_step = program(noisy)
        state = train_step.init(extras=EXTRAS)
        shards = fa.shard(loader_of("map"))
        batch = next(iter(shards))
        state, _ = train_step(state, batch)
        scores = fa.evaluate(train_step, state, score, shards)
        assert scores["rows"].tolist() == list(range(22))  # places in the data set
        assert (float(scores["step"]), float(scores["scale"])) == (1, 1.5)
        assert train_step.look(state, lambda model, *, info: info.step) == 1
        assert train_step.look(state, train_step.as_loss(lambda model, batch, *, info: info.step), 0) == 1
        with pytest.raises(LossError, match="places"):
            train_step.look(state, noisy, batch.data)
        told = functools.partial(noisy, info=train_step.loss_info(state, batch))
        assert float(train_step.look(state, told, batch.data).total) > 0
        assert train_step.flops(state, batch) > 0
        assert train_step.probe(batch).difference == 0


def test_second_gradients_draw_the_same():
    seen = []

    def again(grads, own, info):
        second = info.gradients_at(dict(info.params))
        seen.append(max(float((second[name] - grads[name]).abs().max()) for name in grads))
        return grads, own

    with fa.start(device="cpu"):
        step = fa.Transform("again", fa.Phase.GRADS, apply=again, needs="second gradient")(
            fa.accumulate(noisy, 2)
        )
        train_step = program(step)
        train_step(train_step.init(extras=EXTRAS), next(iter(fa.shard(loader_of("map")))))
    assert seen == [0.0]


def plain(model, batch):
    return batch


def keyword(model, batch, info):
    return batch


def only(model, batch, *, info):
    return batch


def wraps(fn, takes):
    if takes:
        return functools.wraps(fn)(lambda *args, **keywords: fn(*args, **keywords))
    return functools.wraps(fn)(lambda model, batch: fn(model, batch, info=None))


@pytest.mark.parametrize(
    ("fn", "positional", "takes"),
    [
        (plain, 2, False),
        (keyword, 2, True),
        (keyword, 3, False),
        (only, 2, True),
        (only, 3, True),
        (functools.partial(only, info=1), 2, False),
        (functools.partial(only), 2, True),
        pytest.param(wraps(only, takes=True), 2, True, id="wrapped, takes it"),
        pytest.param(wraps(only, takes=False), 2, False, id="wrapped, takes none"),
        pytest.param(wraps(functools.partial(only, info=1), takes=True), 2, False, id="wrapped partial"),
        (lambda model, batch, **keywords: 0, 2, False),
        (len, 2, False),
    ],
)
def test_functions_with_info(fn, positional, takes):
    assert takes_info(fn, positional) is takes


def lent(model, batch, given, *, info):
    return fa.Mean(model(batch[0]).sum() + given["a"](batch[0]).sum() * 0 + info.step, weight=len(batch[0]))


def test_beside_lent_models():
    with fa.start(device="cpu"):
        first, second = program(lent), program(noisy)
        lends = second.init(extras=EXTRAS)
        state, _ = first(first.init(), batch_of(4), given={"a": lends})
        assert state.step == 1


def test_a_step_that_is_called_by_hand():
    info = fa.LossInfo(fa.random.key(0), extras=EXTRAS, rows=torch.arange(4))
    step = fa.clip_norm(noisy, 1.0)
    assert float(step(Net(), batch_of(4), info=info).total.detach()) > 0


def test_estimates_run_it():
    def loss(model, batch, *, info):
        x = fa.random.dropout(batch[0], 0.1, key=info.key.fold_in(info.rows))
        return fa.Mean(F.mse_loss(model(x), batch[1], reduction="sum"), weight=len(x))

    batch = tuple(part.to("meta") for part in batch_of(4))
    estimate = fa.estimate.training(
        loss, model=fa.distribute(Net, "local"), optimizer=fa.sgd(0.1), batch=batch, ranks=1
    )
    assert estimate.total > 0


def noisy_score(model, batch, *, info):
    x = fa.random.dropout(batch[0], 0.5, key=info.key.fold_in(info.rows))
    return fa.Mean(model(x).square().sum(), weight=len(x))


def evaluated(strategy, batch_size):
    train_step = program(strategy=strategy)
    state = train_step.init(seed=0)
    loader = DataLoader(rows_of_data(), batch_size=batch_size)
    score = float(fa.evaluate(train_step, state, noisy_score, fa.shard(loader)))
    train_step.close()
    return score


def test_an_evaluation_knows_no_rank_and_no_batch_size(pools):
    (expected,) = pools.run(1, evaluated, "local", 8)
    for ranks, strategy, size in ((1, "local", 5), (2, "ddp", 8), (2, "fsdp", 7)):
        assert pools.run(ranks, evaluated, strategy, size) == [pytest.approx(expected, abs=1e-6)] * ranks


class Rows(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x)


def by_tokens(model, batch, *, info):
    scale = fa.random.uniform(info.key.fold_in(info.rows))[:, None, None]  # a number for each sequence
    return fa.Mean(
        (model(batch["x"]) * scale).square().sum(), weight=batch["x"].shape[0] * batch["x"].shape[1]
    )


def over_sequences(strategy):
    x = torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(0))
    train_step = program(by_tokens, strategy=strategy, model=Rows)
    state = train_step.init(seed=0)
    for batch in fa.shard(DataLoader([{"x": row} for row in x], batch_size=4)).on(train_step.mesh):
        looked = train_step.look(
            state,
            train_step.as_loss(functools.partial(by_tokens, info=train_step.loss_info(state, batch))),
            batch.data,
        )
        state, metrics = train_step(state, batch)
    result = float(metrics["loss"]), float(looked.total), whole_params(state)
    train_step.close()
    return result


def test_ranks_with_parts_of_a_sequence_share_its_rows(pools):
    ((loss, total, params),) = pools.run(1, over_sequences, "local")
    found = pools.run(2, over_sequences, "context(2, cut={'x': 1})")
    assert sum(part for _, part, _ in found) == pytest.approx(total, rel=1e-6)
    for other, _, values in found:
        assert other == pytest.approx(loss, rel=1e-6)
        for name, value in params.items():
            torch.testing.assert_close(values[name], value, rtol=1e-6, atol=1e-6)
