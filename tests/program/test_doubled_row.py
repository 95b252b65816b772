"""Totals and weights are compared before the first update, by one row and that row twice."""

from __future__ import annotations

import collections
import itertools
import random
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa
from fnaccel import errors
from fnaccel.world.world import current
from tests.tiny_models import Net, batch_of, loss_fn, program, whole_params

TEMPERATURE = 0.1


def sequence():
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def rows_of(batch):
    return len(batch[0])


def squared(model, batch):
    x, y = batch
    return (model(x) - y).square()


def smooth(model, batch):
    x, y = batch
    return F.cross_entropy(torch.cat([model(x), -model(x)], dim=1), (y[:, 0] > 0).long(), label_smoothing=0.1)


def penalty(model):
    return sum(
        p.square().sum() for p in (model.inp.weight, model.inp.bias)
    )  # the root's are whole under fsdp


# each trained with gradients that were too small or too large by the number of rows
WRONG = {
    "label smoothing": lambda m, b: fa.Mean(smooth(m, b), weight=rows_of(b)),
    "a mean and L2": lambda m, b: fa.Mean(squared(m, b).mean() + 0.01 * penalty(m), weight=rows_of(b)),
    "two means": lambda m, b: fa.Mean(squared(m, b).mean() + m(b[0]).abs().mean(), weight=rows_of(b)),
    "a sum by its rows": lambda m, b: fa.Mean(squared(m, b).sum() / rows_of(b), weight=rows_of(b)),
    "a mean of tokens": lambda m, b: fa.Mean(squared(m, b).mean(dim=1).mean() * 2, weight=3 * rows_of(b)),
    "aux": lambda m, b: fa.Mean(
        squared(m, b).sum(), rows_of(b), aux={"error": fa.Mean(squared(m, b).mean(), weight=rows_of(b))}
    ),
}
TOTALS = {
    "of a sum": lambda m, b: fa.Mean.of(squared(m, b).sum(), rows_of(b)),
    "of a sum in aux": lambda m, b: fa.Mean(
        squared(m, b).sum(), rows_of(b), aux={"error": fa.Mean.of(squared(m, b).sum(), rows_of(b))}
    ),
}


def contrastive(model, batch):
    z = F.normalize(torch.cat([model(batch[0]), batch[1]], dim=1), dim=1)
    logits = z @ z.T / TEMPERATURE
    return fa.Mean(F.cross_entropy(logits, torch.arange(len(z)), reduction="sum"), weight=len(z))


def pairs(model, batch):
    out = model(batch[0])
    return fa.Mean(torch.cdist(out, out + 1.0).sum(), weight=len(out))


def hinge(model, batch):
    x, y = batch
    return fa.Mean((1.0 - y.sign() * model(x)).clamp(min=0).sum(), weight=len(y))


def gradient_penalty(model, batch):
    x = batch[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return fa.Mean((squared(model, batch).sum() + slope.square().sum()), weight=len(x))


def in_batch_recall(model, batch):
    """How many rows are their own nearest: of equal rows only the first is."""
    x = torch.cat([model(batch[0]), batch[0]], dim=1)
    nearest = torch.cdist(x, x).argmin(dim=1) == torch.arange(len(x))
    return fa.Mean(loss_fn(model, batch).total, weight=len(x), aux={"recall": fa.Mean(nearest.sum(), len(x))})


RIGHT = {
    "in-batch recall": in_batch_recall,
    "a sum": loss_fn,
    "contrastive": contrastive,
    "pairs": pairs,
    "hinge": hinge,
    "a gradient penalty": gradient_penalty,
    "a mean of weight 1": lambda m, b: fa.Mean(squared(m, b).mean(), weight=1),
    "a bare mean": lambda m, b: squared(m, b).mean(),
    "a mean times its rows": lambda m, b: fa.Mean.of(squared(m, b).mean(), rows_of(b)),
    "a sum and a large L2": lambda m, b: fa.Mean(squared(m, b).sum() + 100.0 * penalty(m), weight=rows_of(b)),
    "zero": lambda m, b: fa.Mean(0.0 * squared(m, b).sum(), weight=rows_of(b)),
    "a constant in aux": lambda m, b: fa.Mean(
        squared(m, b).sum(),
        rows_of(b),
        aux={"temperature": fa.Mean(0.1, weight=1), "rows": fa.Sum(rows_of(b))},
    ),
}


@pytest.fixture(autouse=True)
def world():
    with fa.start(device="cpu") as started:
        yield started


def first_step(loss, **options):
    train_step = program(loss, **options)
    state = train_step.init()
    return train_step(state, batch_of(8)), train_step


class TestLosses:
    @pytest.mark.parametrize("strategy", ["local", "ddp", "fsdp"])
    @pytest.mark.parametrize("name", WRONG)
    def test_a_mean_that_is_given_as_a_total_is_named(self, name, strategy):
        train_step = program(WRONG[name], strategy=strategy)
        state = train_step.init()
        before = whole_params(state)
        with pytest.raises(errors.LossError, match=r"holds a mean[\s\S]*fa\.Mean\.of\(mean, n\)") as raised:
            train_step(state, batch_of(8))
        assert ("aux/error" in str(raised.value)) == (name == "aux")
        assert fa.tree.allclose(whole_params(train_step.live_state), before, rtol=0, atol=0)
        with pytest.raises(errors.LossError, match="holds a mean"):  # and not only once
            train_step(state, batch_of(8))

    @pytest.mark.parametrize("name", TOTALS)
    def test_a_total_that_is_given_as_a_mean_is_named(self, name):
        with pytest.raises(errors.LossError, match=r"fa\.Mean\.of takes a mean[\s\S]*8 times too large"):
            first_step(TOTALS[name])

    def test_under_accumulation_and_a_window(self):
        with pytest.raises(errors.LossError, match="holds a mean"):
            first_step(fa.accumulate(WRONG["label smoothing"], 2))
        train_step = program(WRONG["label smoothing"])
        with pytest.raises(errors.LossError, match="holds a mean"):
            train_step(train_step.init(), fa.data.Window([batch_of(4), batch_of(4)]))

    def test_a_weight_that_is_known_before_counts_too(self):
        step = fa.with_weight(lambda m, b: squared(m, b).mean(), rows_of)
        with pytest.raises(errors.LossError, match=r"loss under fa\.with_weight[\s\S]*return a sum"):
            first_step(step)

    def test_with_a_lent_model(self):
        teacher = fa.train_step(loss_fn, model=fa.distribute(Net, "local"), optimizer=None)

        def distil(model, batch, given):
            return fa.Mean(
                (model(batch[0]) - given["teacher"](batch[0])).square().mean(), weight=len(batch[0])
            )

        train_step = program(distil)
        with pytest.raises(errors.LossError, match="holds a mean"):
            train_step(train_step.init(seed=1), batch_of(8), given={"teacher": teacher.init()})

    def test_a_sharded_model_can_be_lent_before_its_first_step(self):
        """Its class is one of FSDP2's. The check must not put back what FSDP2 notes in the first forward."""

        def follow(model, batch, given):
            return fa.Mean((model(batch[0]) - given["other"](batch[0])).square().sum(), weight=len(batch[0]))

        first, second = (
            fa.train_step(follow, model=fa.distribute(sequence, "fsdp"), optimizer=fa.sgd(0.1))
            for _ in range(2)
        )
        one, two, batch = first.init(seed=0), second.init(seed=1), batch_of(8)
        for _ in range(2):
            one, _ = first(one, batch, given={"other": two})
            two, _ = second(two, batch, given={"other": one})
        assert (one.step, two.step) == (2, 2)

    @pytest.mark.parametrize("strategy", ["local", "fsdp"])
    @pytest.mark.parametrize("name", RIGHT)
    def test_no_other_loss_is_accused(self, name, strategy):
        if (name, strategy) == ("a gradient penalty", "fsdp"):
            strategy = "ddp"  # a second derivative through a unit is FSDP2's own error
        (state, _), _ = first_step(RIGHT[name], strategy=strategy)
        assert state.step == 1

    @pytest.mark.parametrize("strategy", ["local", "ddp", "fsdp"])
    def test_a_loss_that_raises_raises_its_own_error(self, strategy):
        def loss(model, batch):
            model(batch[0])
            raise ZeroDivisionError("of the user")

        train_step = program(loss, strategy=strategy)
        state = train_step.init()
        with pytest.raises(ZeroDivisionError, match="of the user"):
            train_step(state, batch_of(8))
        assert train_step.live_state is state

    def test_a_mean_with_its_aux_beside_it_names_aux(self):
        with pytest.raises(errors.LossError, match=r"returned \(fa\.Mean, aux\)[\s\S]*aux=aux"):
            first_step(lambda m, b: (fa.Mean(squared(m, b).sum(), rows_of(b)), {"rows": 1}))

    def test_a_batch_that_nothing_joins_is_left_alone(self):
        class Lines:
            def __init__(self, lines):
                self.lines = lines

        fa.data.register_batch(
            Lines, rows=lambda b: len(b.lines), cut=lambda b, first, stop: Lines(b.lines[first:stop])
        )
        train_step = program(lambda m, b: fa.Mean(m(b.lines).square().sum(), weight=len(b.lines)))
        state, _ = train_step(train_step.init(), Lines(batch_of(4)[0]))
        assert state.step == 1


class Queue(Net):
    """A queue of negatives: a buffer, a place in it, a list and a deque."""

    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.zeros(6, 1))
        self.place = 0
        self.seen = []
        self.recent = collections.deque(maxlen=3)

    def forward(self, x):
        out = super().forward(x)
        with torch.no_grad():
            for value in out.detach():
                self.queue[self.place % 6] += value
                self.place += 1
                self.seen.append(float(value))
                self.recent.append(float(value))
        return out + 0.1 * self.queue.mean()


class Meter:
    """A counter of the user's own."""

    def __init__(self):
        self.calls = 0
        self.sums = np.zeros(2)
        self.total = torch.zeros(())

    def add(self, value):
        self.calls += 1
        self.sums += 1.0
        self.total += value


METER = Meter()


class TestNothingIsLeftBehind:
    @pytest.mark.parametrize("strategy", ["local", "ddp"])
    def test_a_queue_of_negatives_trains_as_in_a_raw_loop(self, strategy):
        torch.manual_seed(0)
        model = Queue()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for seed in range(2):
            output = loss_fn(model, batch_of(4, seed))
            (output.total / output.weight).backward()
            optimizer.step()
            optimizer.zero_grad()
        train_step = program(model=Queue, strategy=strategy)
        state = train_step.init(seed=0)
        for seed in range(2):
            state, _ = train_step(state, batch_of(4, seed))
        assert fa.tree.allclose(whole_params(state), dict(model.named_parameters()), rtol=0, atol=1e-7)
        trained = train_step.engine.layout.model
        assert torch.allclose(trained.queue, model.queue)
        assert (trained.place, len(trained.seen), len(trained.recent)) == (8, 8, 3)

    def test_variables_and_generators_are_as_a_raw_loop_leaves_them(self):
        calls, seen, state_of = [], {}, random.getstate()
        draws = []
        number = 0
        places, counts = iter([10, 11, 12]), itertools.count()
        noise, numbers, dice = torch.Generator().manual_seed(1), np.random.default_rng(1), random.Random(1)
        first = (
            float(torch.rand((), generator=torch.Generator().manual_seed(1))),
            np.random.default_rng(1).random(),
            random.Random(1).random(),
        )

        def loss(model, batch):
            nonlocal number
            assert (next(places), next(counts)) == (10 + number, number)
            own = (float(torch.rand((), generator=noise)), numbers.random(), dice.random())
            number += 1
            calls.append(number)
            seen[number] = len(batch[0])
            draws.append((random.random(), np.random.rand()))
            METER.add(1.0)
            assert own == first
            return loss_fn(model, batch)

        np.random.seed(3)
        random.seed(3)
        expected = (random.random(), np.random.rand())
        np.random.seed(3)
        random.seed(3)
        before = METER.calls
        try:
            first_step(loss)
        finally:
            random.setstate(state_of)
        assert (calls, seen, number) == ([1], {1: 8}, 1)
        assert draws == [expected]
        assert METER.calls == before + 1
        assert METER.sums.tolist() == [METER.calls] * 2
        assert float(METER.total) == METER.calls

    def test_dropout_draws_the_same_numbers(self):
        def dropped(model, batch):
            x, y = batch
            return fa.Mean((F.dropout(model(x), 0.5) - y).square().sum(), weight=len(y))

        plain = program(dropped, rng="stream")
        torch.manual_seed(5)
        torch.manual_seed(0)
        model = Net()
        torch.manual_seed(5)
        output = dropped(model, batch_of(8))
        expected = float((output.total / output.weight).detach())
        state = plain.init(seed=0)
        torch.manual_seed(5)
        _, metrics = plain(state, batch_of(8))
        assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-6)

    def test_a_compiled_loss_compiles_once(self):
        graphs = []

        def backend(graph, _):
            graphs.append(graph)
            return graph.forward

        train_step = program(fa.compile(loss_fn, scope="loss", backend=backend))
        state = train_step.init()
        for seed in range(2):
            state, _ = train_step(state, batch_of(8, seed))
        assert len(graphs) == 1

    def test_a_batch_that_the_loss_changes_is_not_the_user_s(self):
        def loss(model, batch):
            batch[0].mul_(2.0)
            return loss_fn(model, batch)

        x, y = batch_of(8)
        expected = 2.0 * x.clone()
        train_step = program(loss)
        train_step(train_step.init(), (x, y))
        assert torch.equal(x, expected)


class Lazy(Net):
    """Registers a buffer at its first forward, of the size of its rows, and a module behind a flag."""

    def forward(self, x):
        if not hasattr(self, "place"):
            self.register_buffer("place", torch.arange(len(x)).float().view(-1, 1), persistent=False)
        return super().forward(x) + self.place


def test_what_a_first_forward_registers_has_the_size_of_the_batch():
    (_, metrics), _ = first_step(loss_fn, model=Lazy)
    torch.manual_seed(0)
    output = loss_fn(Lazy(), batch_of(8))
    assert float(metrics["loss"]) == pytest.approx(output.total.item() / output.weight, rel=1e-6)


def one_sided(kind):
    """A loss that is wrong, or raises, for the rows of one rank only, and talks to the other."""
    rank = current().rank

    def loss(model, batch):
        x, y = batch
        part = x[x[:, 0] < 50]
        if kind == "raises" and not len(part):
            raise ZeroDivisionError
        fa.reduce(torch.ones(()))
        mean = (model(x) - y).square().mean()
        return fa.Mean(mean * (len(y) if kind == "raises" or float(x[0, 0]) > 50 else 1), weight=len(y))

    x, y = batch_of(4, seed=rank)
    x[0, 0] += 100.0 * rank
    train_step = program(loss, strategy="ddp")
    try:
        train_step(train_step.init(), (x, y))
    except errors.LossError:
        return "accused"
    finally:
        train_step.close()
    return "trained"


def test_all_ranks_raise_or_none_does(pools):
    """A rank that raised alone left the others in a collective."""
    assert pools.run(2, one_sided, "wrong") == ["accused", "accused"]
    assert pools.run(2, one_sided, "raises") == ["trained", "trained"]


class Attributes(dict):
    """A dict whose entries are attributes, and which answers to every name."""

    __getattr__ = dict.get


class Slotted:
    __slots__ = ("count",)


class Refuses:
    """An object of the user's that raises at almost everything."""

    def __init__(self):
        self.values = [1]

    def __eq__(self, other):
        raise TypeError

    def __bool__(self):
        raise TypeError

    __hash__ = None  # type: ignore[assignment]


def test_odd_values_beside_a_loss_neither_break_it_nor_change():
    other = program()
    params = other.init().params  # read-only
    frozen = np.arange(3.0)
    frozen.setflags(write=False)
    groups, counter = collections.defaultdict(list), collections.Counter()
    options = Attributes(lam=0.5)
    ordered, recursive, expanded = collections.OrderedDict(a=1), [], torch.zeros(1).expand(3)
    recursive.append(recursive)
    slotted, refuses, lock = Slotted(), Refuses(), threading.Lock()
    meta, sparse = torch.empty(2, device="meta"), torch.eye(2).to_sparse()

    def loss(model, batch):
        groups["rows"].append(len(batch[0]))
        counter["calls"] += 1
        ordered.move_to_end("a")
        refuses.values.append(2)
        slotted.count = 1
        assert options.lam == 0.5
        seen = (params, frozen, recursive, expanded, lock, meta, sparse)
        assert len(seen) == 7
        return loss_fn(model, batch)

    (state, _), _ = first_step(loss)
    assert state.step == 1
    assert (dict(groups), dict(counter), dict(ordered)) == ({"rows": [8]}, {"calls": 1}, {"a": 1})
    assert refuses.values == [1, 2]
    assert options == {"lam": 0.5}


class TestMetrics:
    def shards(self):
        return fa.shard(DataLoader(TensorDataset(*batch_of(8)), batch_size=4))

    @pytest.mark.parametrize("strategy", ["local", "fsdp"])
    @pytest.mark.parametrize(
        ("score", "match"),
        [
            (lambda m, b: fa.Mean(squared(m, b).mean(), weight=rows_of(b)), "the result holds a mean"),
            (lambda m, b: {"error": fa.Mean(squared(m, b).mean(), rows_of(b))}, "error holds a mean"),
            (
                lambda m, b: {"error": fa.Mean.of(squared(m, b).sum(), rows_of(b))},
                r"fa\.Mean\.of takes a mean",
            ),
        ],
    )
    def test_a_wrong_metric_is_named(self, score, match, strategy):
        train_step = program(strategy=strategy)
        with pytest.raises(errors.LossError, match=match):
            fa.evaluate(train_step, train_step.init(), score, self.shards())

    def test_what_a_metric_collects_is_collected_once(self):
        collected = []

        def score(model, batch):
            collected.append(len(batch[0]))
            return {"error": fa.Mean(squared(model, batch).sum(), weight=rows_of(batch))}

        train_step = program()
        state = train_step.init()
        for _ in range(2):
            fa.evaluate(train_step, state, score, self.shards())
        assert collected == [4, 4] * 2

    def test_metrics_of_batch_norm_and_an_epoch_of_one_row(self):
        class Normed(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = nn.BatchNorm1d(3)
                self.out = nn.Linear(3, 1)

            def forward(self, x):
                return self.out(self.norm(x))

        train_step = program(model=Normed)
        state, _ = train_step(train_step.init(), batch_of(8))
        mean = state.buffers["norm.running_mean"].clone()
        one = fa.shard(DataLoader(TensorDataset(*batch_of(1)), batch_size=4))
        assert float(fa.evaluate(train_step, state, loss_fn, one)) > 0
        assert torch.equal(state.buffers["norm.running_mean"], mean)
