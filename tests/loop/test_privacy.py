"""Epsilon: the accountants of Opacus, and each claim that would be false."""

from __future__ import annotations

import sys

import attrs
import pytest
import torch
from opacus.accountants import PRVAccountant, RDPAccountant
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa
from fnaccel.errors import ArgumentError, CapabilityError, MissingBackendError, UnknownNameError
from tests.tiny_models import Net, batch_of, whole_params

ROWS, SIZE, NOISE = 512, 64, 1.2


@pytest.fixture(autouse=True)
def world():
    with fa.start():
        yield


def squares(model, batch):
    x, y = batch
    return fa.Mean((model(x) - y).square().sum(), weight=len(y))


def private(step=squares, **options):
    return fa.per_example(step, **{"clip": 0.5, "noise": NOISE, "rows": SIZE, "seed": 7, **options})


def program(step, strategy="local"):
    return fa.train_step(step, model=fa.distribute(Net, strategy), optimizer=fa.sgd(0.2))


def drawn(sampling="poisson", size=SIZE, **options):
    return fa.shard(
        DataLoader(TensorDataset(*batch_of(ROWS)), batch_size=size), sampling=sampling, seed=5, **options
    )


def trained(step, shards, strategy="local", steps=6):
    train_step = program(step, strategy)
    state = train_step.init(seed=0)
    for state, _ in fa.scan(train_step, state, shards, steps=steps):
        pass
    return train_step, state


@pytest.mark.parametrize(("accountant", "kind"), [("prv", PRVAccountant), ("rdp", RDPAccountant)])
def test_epsilon_is_that_of_opacus(accountant, kind):
    train_step, state = trained(private(), drawn(), steps=20)
    found = fa.epsilon(train_step, state, drawn(), delta=1e-5, accountant=accountant)
    by_hand = kind()
    for _ in range(20):
        by_hand.step(noise_multiplier=NOISE, sample_rate=SIZE / ROWS)
    assert found == pytest.approx(by_hand.get_epsilon(delta=1e-5), rel=1e-12)
    assert 1 < found < 10


@pytest.mark.long
def test_epsilon_of_no_step_and_of_more_steps():
    train_step = program(private())
    state = train_step.init()
    shards = drawn()
    assert fa.epsilon(train_step, state, shards, delta=1e-5) == 0.0
    before = 0.0
    for state, _ in fa.scan(train_step, state, shards, steps=9):
        after = fa.epsilon(train_step, state, shards, delta=1e-5)
        assert after > before
        before = after


def by_hand(batches):
    """DP-SGD without noise, one row at a time, divided by the expected rows."""
    torch.manual_seed(0)
    model = Net()
    for x, y in batches:
        sums = [torch.zeros_like(p) for p in model.parameters()]
        for row in range(len(x)):
            grads = torch.autograd.grad(
                (model(x[row : row + 1]) - y[row]).square().sum(), [*model.parameters()]
            )
            norm = torch.cat([g.flatten() for g in grads]).norm()
            for total, g in zip(sums, grads, strict=True):
                total += g * (0.5 / norm).clamp(max=1)
        with torch.no_grad():
            for p, total in zip(model.parameters(), sums, strict=True):
                p -= 0.2 * total / SIZE
    return dict(model.named_parameters())


def four(step):
    return fa.accumulate(step, 4)


def compiled(step):
    return fa.compile(step, backend="aot_eager")


def weighted(step):
    return fa.with_weight(step, lambda batch: 3.0 * len(batch[0]))


def params_of(strategy, change, noise):
    step = private(noise=noise)
    train_step, state = trained(step if change is None else change(step), drawn(), strategy)
    epsilon = fa.epsilon(train_step, state, drawn(), delta=1e-5) if noise else None
    return whole_params(state), epsilon, train_step.compilation


WAYS = {
    "local": (1, "local", None), "accumulated": (1, "local", four), "weighted": (1, "local", weighted),
    "compiled": (1, "local", compiled), "ddp": (2, "ddp", None), "fsdp": (2, "fsdp", four),
}  # fmt: skip


@pytest.mark.long_except(r"^(?!compiled)")
@pytest.mark.parametrize("way", WAYS)
def test_the_sum_is_divided_by_the_expected_rows(pools, way):
    ranks, strategy, change = WAYS[way]
    batches = [batch.data for _, batch in zip(range(6), drawn(), strict=False)]
    assert len({len(x) for x, _ in batches}) > 1
    expected = by_hand(batches)
    for found, _, compilation in pools.run(ranks, params_of, strategy, change, 0.0):
        assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)
        assert compilation is None or compilation.recompilations <= 1  # the number of rows is a symbol


def test_noise_and_epsilon_are_those_of_one_process(pools):
    [(alone, spent, _)] = pools.run(1, params_of, "local", None, NOISE)
    assert any(not torch.allclose(alone[name], plain) for name, plain in by_hand([]).items())
    for found, epsilon, _ in pools.run(2, params_of, "fsdp", four, NOISE):
        assert epsilon == spent
        assert all(torch.allclose(found[name], alone[name], atol=1e-5) for name in alone)


def test_a_run_that_is_resumed(tmp_path):
    _, state = trained(private(), drawn(), steps=11)
    fa.save(tmp_path, state)
    later = program(private())
    restored = fa.restore(tmp_path, like=later.init())
    for restored, _ in fa.scan(later, restored, drawn(), steps=20):
        pass
    straight, whole = trained(private(), drawn(), steps=20)
    expected = fa.epsilon(straight, whole, drawn(), delta=1e-5)
    assert fa.epsilon(later, restored, drawn(), delta=1e-5) == expected
    assert all(torch.equal(a, whole.params[name]) for name, a in restored.params.items())
    saved = "".join(path.read_text() for path in tmp_path.rglob("*.json"))
    assert '"seed": 5' not in saved


def reads(grads, own, info):
    return grads, own


FALSE_CLAIMS = {
    "no draws": (private(), drawn(None), "sampling=\"poisson\""),
    "the weight divides": (private(rows=None), drawn(), "the divisor is the weight"),
    "another number divides": (private(rows=65), drawn(), "64 rows are expected .* is 65"),
    "no noise": (private(noise=0.0), drawn(), "no noise"),
    "no rows": (squares, drawn(), "no noise"),
    "a clip before the noise": (
        private(fa.clip_norm(squares, 1.0)), drawn(), "clip_norm stands beside the noise",
    ),
    "a second gradient": (
        fa.perturb(private(), lambda grads, info: fa.tree.scale(grads, 0.1)), drawn(), "perturb stands",
    ),
    "a transform of the user's": (
        fa.Transform("mine", fa.Phase.GRADS, apply=reads)(private()), drawn(), "mine stands",
    ),
    "fp16": (fa.with_precision(private(), "fp16"), drawn(), "fp16"),
    "batches that may be empty": (private(rows=8), drawn(size=8), "no row with the probability"),
}  # fmt: skip


@pytest.mark.parametrize("claim", FALSE_CLAIMS)
def test_false_claims(claim):
    step, shards, words = FALSE_CLAIMS[claim]
    train_step = program(step)
    state = train_step.init()
    for state, _ in fa.scan(train_step, state, shards, steps=1):
        pass
    with pytest.raises(ArgumentError, match=words):
        fa.epsilon(train_step, state, shards, delta=1e-5)


def test_steps_on_other_data_and_bad_arguments(monkeypatch):
    train_step, state = trained(private(), drawn(), steps=2)
    state, _ = train_step(state, batch_of(SIZE))
    with pytest.raises(ArgumentError, match="has made 3 steps, and stands after 2 batches"):
        fa.epsilon(train_step, state, drawn(), delta=1e-5)
    for delta in (0, 1, -1.0):
        with pytest.raises(ArgumentError, match="delta"):
            fa.epsilon(train_step, state, drawn(), delta=delta)
    with pytest.raises(UnknownNameError, match="no accountant 'pvr'"):
        fa.epsilon(train_step, state, drawn(), delta=1e-5, accountant="pvr")
    with pytest.raises(ArgumentError, match="no number of rows"):
        fa.per_example(squares, clip=1.0, rows=0)
    train_step, state = trained(private(), drawn(), steps=2)
    monkeypatch.setitem(sys.modules, "opacus.accountants", None)
    with pytest.raises(MissingBackendError, match="privacy"):
        fa.epsilon(train_step, state, drawn(), delta=1e-5)


def test_little_noise_is_answered_at_once():
    """Noise of 0.01 took 9 GB, and of 0.001 all memory."""
    for noise in (0.01, 0.001):
        train_step, state = trained(private(noise=noise), drawn(), steps=2)
        with pytest.raises(ArgumentError, match=r'by "rdp", and "prv" would need'):
            fa.epsilon(train_step, state, drawn(), delta=1e-5)
        assert fa.epsilon(train_step, state, drawn(), delta=1e-5, accountant="rdp") > 1e3


def test_other_shards_of_equal_batches():
    train_step, state = trained(private(), drawn(), steps=2)
    other = fa.shard(
        DataLoader(TensorDataset(*batch_of(ROWS + 1)), batch_size=SIZE), sampling="poisson", seed=5
    )
    with pytest.raises(ArgumentError, match="the last batch was one of 512 rows, and these shards have 513"):
        fa.epsilon(train_step, state, other, delta=1e-5)


def test_a_delta_that_allows_to_publish_a_row():
    train_step, state = trained(private(), drawn(), steps=2)
    with pytest.warns(UserWarning, match="more than 1 over the 512 rows"):
        fa.epsilon(train_step, state, drawn(), delta=1e-2)


def test_the_gradient_without_its_noise_is_not_shown():
    with pytest.raises(CapabilityError, match=r"per_example\.noise comes after the gradient"):
        fa.value_and_grad(program(private()))
    train_step = program(private(noise=0.0))
    fa.value_and_grad(train_step)(train_step.init(), batch_of(SIZE))


def test_noise_of_no_clip():
    with pytest.raises(ArgumentError, match=r"noise of 1\.2 times clip=inf"):
        private(clip=float("inf"))
    private(clip=float("inf"), noise=0.0)


def other_noise():
    """Half of the run with little noise, the other half with more."""
    _, state = trained(private(noise=0.3), drawn(), steps=4)
    later = program(private())
    later.init(seed=0)
    return later, later.adopt(fa.snapshot(state))


def without_noise():
    _, state = trained(squares, drawn(), steps=4)
    later = program(private())
    first = later.init(seed=0)
    params = {
        "params": dict(fa.snapshot(state).params),
        "step": state.step,
        "updates": state.updates,
        "data": state.data,
    }
    return later, later.adopt(attrs.evolve(fa.snapshot(first), **params))


@pytest.mark.parametrize("before", [other_noise, without_noise])
def test_updates_that_others_made(before):
    train_step, state = before()
    for state, _ in fa.scan(train_step, state, drawn(), steps=8):
        pass
    assert state.step == 8
    with pytest.raises(ArgumentError, match="not all updates"):
        fa.epsilon(train_step, state, drawn(), delta=1e-5)


# dynamo's own, as it traces an autograd function (torch 2.13)
@pytest.mark.long_except(r"plain|skip")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("change", [None, fa.skip_nonfinite(), compiled], ids=["plain", "skip", "compiled"])
def test_a_row_that_is_not_finite_is_one_of_zeros(bad, change):
    x, y = batch_of(16)
    x[3, 1] = bad
    others = [row for row in range(16) if row != 3]
    found = []
    for batch in ((x, y), (x[others], y[others])):
        step = private(noise=0.0)
        train_step = program(step if change is None else change(step))
        state, metrics = train_step(train_step.init(seed=0), batch)
        assert not float(metrics.get("skipped", 0.0))
        found.append(whole_params(state))
    assert all(torch.allclose(found[0][name], found[1][name], atol=1e-7) for name in found[0])


def test_the_seed_that_everyone_knows_is_named():
    loader = DataLoader(TensorDataset(*batch_of(ROWS)), batch_size=SIZE)
    shards = fa.shard(loader, sampling="poisson")
    train_step, state = trained(private(), shards, steps=2)
    with pytest.warns(UserWarning, match=r"drawn by the seed 0[\s\S]*secrets\.randbits"):
        fa.epsilon(train_step, state, shards, delta=1e-5)
