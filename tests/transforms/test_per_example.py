"""`per_example`, `row_norms` and `with_gradient`: against a loop over the rows, on each strategy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fnaccel as fa
from fnaccel import errors
from tests.parameter_losses import accumulated, captured, equals, part_of, recomputed
from tests.tiny_models import Net, batch_of, program, whole_params

CLIP = 0.5


def squares(model, batch):
    x, y = batch
    error = (model(x) - y).square()
    aux = {
        "mae": fa.Mean(error.sqrt().sum(), weight=len(y)),
        "rows": fa.Sum(torch.ones(())),
        "each": fa.Concat(error[:, 0]),
    }
    return fa.Mean(error.sum(), weight=len(y), aux=aux)


def tokens(model, batch):
    """A weight that is a tensor, and differs between rows."""
    x, y = batch
    kept = (x > -0.3).sum()
    return fa.Mean((model(x) - y).square().sum() * 2, weight=kept)


def dropping(model, batch):
    x, y = batch
    return fa.Mean((F.dropout(model(x), 0.0) - y).square().sum(), weight=len(y))


def scalar(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()


LOSSES = {fn.__name__: fn for fn in (squares, tokens, dropping, scalar)}


def raw(name, steps=2, rows=12):
    """Losses, norms of the last step's rows, and parameters of a loop over rows in plain torch."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        x, y = batch_of(rows, seed=step)
        sums = [torch.zeros_like(p) for p in model.parameters()]
        total = weight = 0.0
        norms = []
        for i in range(rows):
            output = LOSSES[name](model, (x[i : i + 1], y[i : i + 1]))
            loss, more = (
                (output.total, float(output.weight)) if isinstance(output, fa.Mean) else (output, 1.0)
            )
            grads = torch.autograd.grad(loss, list(model.parameters()))
            norm = torch.stack([g.norm() for g in grads]).norm()
            norms.append(norm)
            for out, g in zip(sums, grads, strict=True):
                out += g * (CLIP / norm).clamp(max=1)
            total, weight = total + float(loss.detach()), weight + more
        for p, g in zip(model.parameters(), sums, strict=True):
            p.grad = g / weight
        optimizer.step()
        losses.append(total / weight)
    return losses, {n: p.detach().clone() for n, p in model.named_parameters()}, torch.stack(norms)


def trained(name, strategy, change=None, steps=2, chunk=None, **options):
    step = fa.per_example(LOSSES[name], clip=CLIP, chunk=chunk, **options)
    train_step = program(step if change is None else change(step), strategy=strategy, optimizer=fa.sgd(0.1))
    state = train_step.init(seed=0)
    losses = []
    for number in range(steps):
        batch = part_of(batch_of(12, seed=number), train_step.mesh["loss"].rank, train_step.mesh["loss"].size)
        state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, whole_params(state), {k: v for k, v in metrics.items() if k in ("mae", "rows", "each")}


WAYS = {
    "local": (1, fa.local(), None),
    "accumulated": (1, fa.local(), accumulated),
    "remat": (1, fa.local(), recomputed),
    "captured": (1, fa.local(), captured),
    "ddp": (2, fa.ddp(), None),
    "fsdp": (2, fa.fsdp(), None),
    "fsdp-accumulated": (2, fa.fsdp(), accumulated),
}


@pytest.mark.long_except(r"^(?!captured-)")
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("way", WAYS)
def test_equals_a_loop_over_rows(pools, way, name):
    ranks, strategy, change = WAYS[way]
    expected = raw(name)
    for found in pools.run(ranks, trained, name, strategy, change):
        assert equals(found[:2], expected[:2])


def test_chunks_are_the_same(pools):
    (expected,) = pools.run(1, trained, "tokens", fa.local())
    for chunk in (1, 5, 100):
        (found,) = pools.run(1, trained, "tokens", fa.local(), None, 2, chunk)
        assert equals(found[:2], expected[:2])


def test_aux_combines_over_rows(pools):
    found = pools.run(2, trained, "squares", fa.ddp())
    x, y = batch_of(12, seed=1)
    (before,) = pools.run(1, trained, "squares", fa.local(), None, 1)
    model = Net()
    model.load_state_dict(before[1])
    error = (model(x) - y).square().detach()
    for _, _, aux in found:
        assert float(aux["rows"]) == 12
        assert float(aux["mae"]) == pytest.approx(float(error.sqrt().mean()), rel=1e-5)
        assert torch.allclose(aux["each"].sort().values, error[:, 0].sort().values, rtol=1e-4)


def noisy(strategy, noise, seed, steps=1):
    step = fa.per_example(squares, clip=CLIP, noise=noise, seed=seed)
    train_step = program(step, strategy=strategy, optimizer=fa.sgd(1.0))
    state = train_step.init(seed=0)
    for number in range(steps):
        mesh = train_step.mesh["loss"]
        state, _ = train_step(state, part_of(batch_of(12, seed=number), mesh.rank, mesh.size))
    return whole_params(state)


def test_noise_is_that_of_one_whole_tensor_on_every_layout(pools):
    (expected,) = pools.run(1, noisy, fa.local(), 1.5, 7, 2)
    for strategy in (fa.ddp(), fa.fsdp(), fa.fsdp(units=None)):
        for found in pools.run(2, noisy, strategy, 1.5, 7, 2):
            assert fa.tree.allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_secret_noise_is_equal_on_ranks_and_differs_between_runs(pools):
    first, second = pools.run(2, noisy, fa.ddp(), 1.5, None)
    assert fa.tree.allclose(first, second)
    again, _ = pools.run(2, noisy, fa.ddp(), 1.5, None)
    assert not fa.tree.allclose(first, again)


class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1000, 1000))

    def forward(self, x):
        return x + self.weight[0, :1] * 0


def test_the_deviation_of_the_noise():
    with fa.start(device="cpu"):
        step = fa.per_example(lambda m, b: fa.Mean(m(b).sum(), weight=len(b)), clip=2.0, noise=1.5)
        train_step = fa.train_step(step, model=fa.distribute(Wide, "local"), optimizer=fa.sgd(1.0))
        state, _ = train_step(train_step.init(), torch.ones(8, 1))
        moved = whole_params(state)["weight"]
    assert float(moved.std()) == pytest.approx(1.5 * 2.0 / 8, rel=0.01)
    assert float(moved.mean()) == pytest.approx(0.0, abs=0.002)


def read(strategy, chunk=None):
    train_step = program(squares, strategy=strategy)
    state = train_step.init(seed=0)
    mesh = train_step.mesh["loss"]
    x, y = part_of(batch_of(12), mesh.rank, mesh.size, ragged=False)
    found = train_step.look(state, fa.row_norms(squares, chunk=chunk), (x, y))
    return found["norm"].value, whole_params(state)


def test_norms_are_read_without_an_update(pools):
    expected = raw("squares", steps=1)[2]
    for ranks, strategy in ((1, fa.local()), (2, fa.ddp()), (2, fa.fsdp())):
        found = pools.run(ranks, read, strategy)
        assert torch.allclose(torch.cat([norms for norms, _ in found]), expected, rtol=1e-4)
    (chunked,) = pools.run(1, read, fa.local(), 5)
    assert torch.allclose(chunked[0], expected, rtol=1e-4)


def evolved(strategy):
    """An evolution strategy: the gradient is given, none is computed."""

    def loss(model, batch):
        x, y = batch
        params = fa.params(model)
        grads = {name: value.detach().sin() * len(y) for name, value in params.items() if "bias" not in name}
        return fa.Mean(fa.with_gradient((model(x) - y).square().sum(), params, grads), weight=len(y))

    train_step = program(loss, strategy=strategy, optimizer=fa.sgd(0.1))
    state = train_step.init(seed=0)
    before = whole_params(state)
    mesh = train_step.mesh["loss"]
    state, _ = train_step(state, part_of(batch_of(12), mesh.rank, mesh.size))
    after = whole_params(state)
    expected = {n: v if "bias" in n else v - 0.1 * v.sin() for n, v in before.items()}
    return fa.tree.allclose(after, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("ranks", "strategy"), [(1, fa.local()), (2, fa.ddp()), (2, fa.fsdp())], ids=str)
def test_a_given_gradient(pools, ranks, strategy):
    assert pools.run(ranks, evolved, strategy) == [True] * ranks


def keyed(model, batch, *, info):
    """A mask for each row, by its place in the global batch."""
    x, y = batch
    x = fa.random.dropout(x, 0.4, key=info.key.fold_in(info.rows))
    return fa.Mean((model(x) - y).square().sum(), weight=len(y))


def by_key(strategy, change=None):
    step = fa.per_example(keyed, clip=CLIP)
    train_step = program(step if change is None else change(step), strategy=strategy, optimizer=fa.sgd(0.1))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch_of(16)), batch_size=8)
    losses, state = [], train_step.init(seed=0)
    for state, metrics in fa.scan(train_step, state, fa.shard(loader)):
        losses.append(float(metrics["loss"]))
    return losses, whole_params(state)


@pytest.mark.long
def test_a_row_has_its_own_key(pools):
    torch.manual_seed(0)
    model = Net()
    losses = []
    for step in range(2):
        x, y = (value[8 * step : 8 * step + 8] for value in batch_of(16))
        sums, total = [torch.zeros_like(p) for p in model.parameters()], 0.0
        for i in range(8):
            key = fa.random.key(0, step).fold_in(torch.tensor([i]))
            seen = fa.random.dropout(x[i : i + 1], 0.4, key=key)
            loss = (model(seen) - y[i : i + 1]).square().sum()
            grads = torch.autograd.grad(loss, list(model.parameters()))
            norm = torch.stack([g.norm() for g in grads]).norm()
            for out, g in zip(sums, grads, strict=True):
                out += g * (CLIP / norm).clamp(max=1) / 8
            total += float(loss.detach()) / 8
        with torch.no_grad():
            for p, g in zip(model.parameters(), sums, strict=True):
                p -= 0.1 * g
        losses.append(total)
    expected = losses, {n: p.detach() for n, p in model.named_parameters()}
    ways = (
        (1, fa.local(), None),
        (1, fa.local(), accumulated),
        (1, fa.local(), captured),
        (2, fa.fsdp(), None),
    )
    for ranks, strategy, change in ways:
        for found in pools.run(ranks, by_key, strategy, change):
            assert equals(found, expected)


def test_norms_of_a_loss_with_info():
    with fa.start(device="cpu"):
        train_step = program(keyed)
        state = train_step.init(seed=0)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch_of(16)), batch_size=8)
        first = fa.evaluate(train_step, state, fa.row_norms(keyed), fa.shard(loader))["norm"]
        second = fa.evaluate(train_step, state, fa.row_norms(keyed, chunk=3), fa.shard(loader))["norm"]
        assert first.shape == (16,)
        assert torch.allclose(first, second)


def test_bad_input():
    weight = torch.ones(3, requires_grad=True)
    with pytest.raises(errors.UnknownNameError, match="gradient of 'wieght'"):
        fa.with_gradient(weight.sum(), {"weight": weight}, {"wieght": weight})
    with pytest.raises(errors.TreeMismatchError, match=r"shape \[2\], not \[3\]"):
        fa.with_gradient(weight.sum(), {"weight": weight}, {"weight": weight[:2]})
    with pytest.raises(errors.ArgumentError, match="no scalar"):
        fa.with_gradient(weight, {"weight": weight}, {})
    with pytest.raises(errors.ArgumentError, match="clipped to 0"):
        fa.per_example(squares, clip=0)
    with pytest.raises(errors.ArgumentError, match="deviation -1"):
        fa.per_example(squares, clip=1, noise=-1)
    with pytest.raises(errors.ArgumentError, match="0 is no number of rows"):
        fa.per_example(squares, clip=1, chunk=0)


class Normed(Net):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(6)

    def forward(self, x):
        return self.out(self.norm(self.inp(x)))


def test_a_batch_norm_and_ragged_columns_are_refused():
    with fa.start(device="cpu"):
        train_step = program(fa.per_example(squares, clip=1.0), model=Normed)
        state = train_step.init()
        with pytest.raises(errors.CapabilityError, match="norm is a batch norm in training mode"):
            train_step(state, batch_of(4))
        train_step.close()
        train_step = program(fa.per_example(lambda m, b: squares(m, b[:2]), clip=1.0))
        with pytest.raises(errors.MicroBatchError, match=r"\[4, 3\], \[4, 1\], \[\]"):
            train_step(train_step.init(), (*batch_of(4), torch.tensor(1.0)))


REFUSED = {
    "0 is an nn.GRU": lambda: torch.nn.GRU(3, 6, batch_first=True),
    "0 is an nn.RNNCell": lambda: torch.nn.RNNCell(3, 6),
    "0 is an embedding with sparse gradients": lambda: torch.nn.Embedding(3, 6, sparse=True),
    "0 is an embedding with max_norm": lambda: torch.nn.EmbeddingBag(3, 6, max_norm=1.0),
}


@pytest.mark.parametrize("what", REFUSED)
def test_layers_without_gradients_of_rows_are_refused_by_name(what):
    with fa.start(device="cpu"):
        train_step = program(
            fa.per_example(squares, clip=1.0),
            model=lambda: torch.nn.Sequential(REFUSED[what]()),
            optimizer=fa.optim.from_torch(torch.optim.SGD, lr=0.1),  # which takes sparse gradients
        )
        state = train_step.init()
        with pytest.raises(errors.CapabilityError, match=what):
            train_step(state, batch_of(4))
        assert train_step.live_state is state


class Complex(Net):
    def __init__(self):
        super().__init__()
        self.phase = torch.nn.Parameter(torch.ones(1, dtype=torch.complex64))

    def forward(self, x):
        return super().forward(x) * self.phase.abs()


def test_complex_parameters_are_refused():
    with fa.start(device="cpu"):
        train_step = program(fa.per_example(squares, clip=1.0), model=Complex)
        with pytest.raises(errors.CapabilityError, match="phase is complex"):
            train_step(train_step.init(), batch_of(4))
        train_step.close()


def test_a_frozen_embedding_may_be_sparse():
    class Frozen(Net):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(3, 6, sparse=True).requires_grad_(False)

        def forward(self, x):
            return self.out(self.inp(x) + self.table(torch.zeros(len(x), dtype=torch.long)))

    with fa.start(device="cpu"):
        train_step = program(fa.per_example(squares, clip=1.0), model=Frozen)
        _, metrics = train_step(train_step.init(), batch_of(4))
        assert float(metrics["loss"]) > 0
        train_step.close()


class Recurrent(Net):
    def __init__(self):
        super().__init__()
        self.cells = torch.nn.LSTM(3, 6, batch_first=True)

    def forward(self, x):
        return self.out(self.cells(torch.stack([x, 2 * x], 1))[0][:, -1])


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_rows_of_an_lstm():
    batch = batch_of(4)
    with fa.start(device="cpu"):
        train_step = program(squares, model=Recurrent)
        state = train_step.init(seed=0)
        found = train_step.look(state, fa.row_norms(squares), batch)["norm"].value
        for index, norm in enumerate(found.tolist()):
            _, grads = fa.value_and_grad(train_step)(state, tuple(x[index : index + 1] for x in batch))
            assert norm == pytest.approx(float(fa.tree.norm(grads)), rel=1e-5)


def estimated(model, batch):
    x, y = batch
    params = fa.params(model)
    grads = {name: torch.ones_like(value) for name, value in params.items()}
    return fa.Mean(fa.with_gradient((model(x) - y).square().sum(), params, grads), weight=len(y))


def test_a_given_gradient_has_no_derivative():
    batch = batch_of(4)
    with fa.start():
        update = fa.pure(program(estimated))
        first = update.init(seed=0)

        def final(rate):
            values = first
            for _ in range(2):
                values, _ = update(values, batch, lr=rate)
            return update.loss(values, batch)

        assert torch.isfinite(final(0.1))
        rate = torch.tensor(0.1, requires_grad=True)
        with pytest.raises(fa.errors.CapabilityError, match="was given has no derivative"):
            final(rate).backward()
        with pytest.raises(fa.errors.CapabilityError, match="was given has no derivative"):
            torch.func.grad(final)(rate.detach())
        with pytest.raises(fa.errors.CapabilityError, match="have no derivative of their own"):
            fa.pure(program(fa.per_example(squares, clip=1.0)))


def test_a_batch_without_rows():
    with fa.start(), pytest.raises(fa.errors.MicroBatchError, match="without rows"):
        fa.per_example(squares, clip=1.0)(Net(), batch_of(0))
