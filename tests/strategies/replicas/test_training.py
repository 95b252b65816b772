"""Replicas that train apart, against raw PyTorch: every strategy, uneven rows, accumulation, clip, skips."""

from __future__ import annotations

import pytest
import torch

import fnaccel as fa
from tests.strategies.replicas.raw import loss_fn, replicas_by_hand, rows
from tests.tiny_models import Net, program, whole_params


def joined(kind, step, ranks, replicas):
    """The rows of each replica."""
    inner = ranks // replicas
    parts = [
        [rows(kind, step, replica * inner + rank, inner) for rank in range(inner)]
        for replica in range(replicas)
    ]
    return [tuple(map(torch.cat, zip(*part, strict=True))) for part in parts]


def trained(strategy, steps, kind, transform=None):
    step = loss_fn if transform is None else transform(loss_fn)
    train_step = program(step, strategy=strategy, optimizer=fa.adamw(0.02, weight_decay=0.1))
    state, losses, norms = train_step.init(seed=0), [], []
    inner = train_step.mesh.gradient_size
    for number in range(steps):
        state, metrics = train_step(state, rows(kind, number, train_step.mesh.batch_rank, inner))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics.get("grad_norm", 0.0)))
    params = whole_params(state)
    train_step.close()
    return params, losses, norms


def accumulated(step):
    return fa.accumulate(step, 2)


def clipped(step):
    return fa.clip_norm(step, 0.5)


def checked(step):
    return fa.skip_nonfinite(step)


def check(found, ranks, replicas, steps, every, kind, **options):
    wanted, losses = replicas_by_hand(
        steps, every, lambda step: joined(kind, step, ranks, replicas), **options
    )
    inner = ranks // replicas
    for rank, (params, metrics, _) in enumerate(found):
        assert metrics == pytest.approx(losses, rel=1e-5), rank
        for name, value in wanted[rank // inner].items():
            assert torch.allclose(params[name], value, atol=1e-6), (rank, name)


PRODUCTS = [
    ("local_sgd(2, every=3)", 2, 2, 3),
    ("local_sgd(4, every=2)", 4, 4, 2),
    ("local_sgd(2, every=2) * fsdp(2)", 4, 2, 2),
]


@pytest.mark.parametrize("kind", ["even", "ragged", "a replica without rows"])
@pytest.mark.parametrize(("strategy", "ranks", "replicas", "every"), PRODUCTS)
def test_local_sgd_is_one_loop_a_replica(pools, strategy, ranks, replicas, every, kind):
    steps = 3 * every + 1  # three averages, and one step after the last
    found = pools.run(ranks, trained, strategy, steps, kind)
    check(found, ranks, replicas, steps, every, kind)
    weights = [params["out.weight"] for params, *_ in found]
    assert not all(torch.equal(weights[0], other) for other in weights)


TRANSFORMED = [(accumulated, {}), (clipped, {"clip": 0.5}), (checked, {})]


@pytest.mark.parametrize(("transform", "options"), TRANSFORMED)
@pytest.mark.parametrize(("strategy", "ranks", "replicas", "every"), [PRODUCTS[0], PRODUCTS[2]])
def test_transforms_act_in_each_replica(pools, strategy, ranks, replicas, every, transform, options):
    steps = 3 * every
    found = pools.run(ranks, trained, strategy, steps, "ragged", transform)
    check(found, ranks, replicas, steps, every, "ragged", **options)
    if transform is clipped:
        assert found[0][2] != found[-1][2]  # the norm of a replica


def outer_of(params):
    return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


DILOCO = [
    ("diloco(2, every=3)", 2, 2, 3),
    ("diloco(4, every=2)", 4, 4, 2),
    ("diloco(2, every=2) * fsdp(2)", 4, 2, 2),
]


@pytest.mark.parametrize(("strategy", "ranks", "replicas", "every"), DILOCO)
def test_diloco_moves_an_anchor_by_torchs_sgd(pools, strategy, ranks, replicas, every):
    steps = 3 * every + 1
    found = pools.run(ranks, trained, strategy, steps, "ragged")
    check(found, ranks, replicas, steps, every, "ragged", outer=outer_of)


@pytest.mark.parametrize("maker", ["local_sgd", "diloco"])
def test_the_first_steps_average_each_time(pools, maker):
    found = pools.run(2, trained, f"{maker}(2, every=3, warmup=2)", 9, "ragged")
    outer = outer_of if maker == "diloco" else None
    check(found, 2, 2, 9, 3, "ragged", warmup=2, outer=outer)


def test_slots_may_be_averaged_too(pools):
    found = pools.run(2, trained, "local_sgd(2, every=3, slots='average')", 10, "ragged")
    check(found, 2, 2, 10, 3, "ragged", average_slots=True)


TENSOR = "tensor(2, plan={'blocks.*.mix': 'colwise_gather'})"


def test_ranks_of_tensor_are_one_replica(pools):
    found = pools.run(4, trained_of_rows, f"local_sgd(2, every=2) * {TENSOR}", 7)
    wanted, losses = replicas_by_hand(7, 2, lambda step: [rows("ragged", step, r) for r in range(2)])
    for rank, (params, metrics, _) in enumerate(found):
        assert metrics == pytest.approx(losses, rel=1e-5)
        for name, value in wanted[rank // 2].items():
            assert torch.allclose(params[name], value, atol=1e-6), (rank, name)


def trained_of_rows(strategy, steps):
    """As `trained`, for axes whose ranks read the same rows."""
    train_step = program(loss_fn, strategy=strategy, optimizer=fa.adamw(0.02, weight_decay=0.1))
    state, losses = train_step.init(seed=0), []
    for number in range(steps):
        state, metrics = train_step(state, rows("ragged", number, train_step.mesh.batch_rank))
        losses.append(float(metrics["loss"]))
    params = whole_params(state)
    train_step.close()
    return params, losses, []


def by_rows(strategy, steps):
    train_step = program(loss_fn, strategy=strategy, optimizer=fa.sgd(0.1))
    state = train_step.init(seed=0)
    for number in range(steps):
        state, _ = train_step(state, rows("ragged", number, train_step.mesh.batch_rank))
    return whole_params(state)


def test_weighed_by_rows_an_average_after_each_step_is_ddp(pools):
    found = pools.run(2, by_rows, "local_sgd(2, every=1, weighting='rows')", 4)
    wanted = pools.run(2, by_rows, "ddp", 4)
    for params, ddp in zip(found, wanted, strict=True):
        assert fa.tree.allclose(params, ddp, rtol=0, atol=1e-6)
    other = pools.run(2, by_rows, "local_sgd(2, every=1)", 4)[0]
    assert not fa.tree.allclose(other, wanted[0], rtol=0, atol=1e-4)


def leaving_out(strategy, steps, precision=None):
    step = fa.skip_nonfinite(loss_fn) if precision is None else fa.with_precision(loss_fn, precision)
    train_step = program(step, strategy=strategy, optimizer=fa.adamw(0.02, weight_decay=0.1))
    state, found = train_step.init(seed=0), []
    for number in range(steps):
        state, metrics = train_step(state, broken(number, train_step.mesh.batch_rank))
        scale = float(metrics["loss_scale"]) if precision else 0.0
        found.append((float(metrics["skipped"]), int(state.updates), scale))
    return whole_params(state), found


def broken(step, rank):
    """Rows that are not finite on rank 1 in its second step."""
    x, y, weights = rows("even", step, rank)
    return (x * float("nan") if (step, rank) == (1, 1) else x), y, weights


@pytest.mark.parametrize("maker", ["local_sgd", "diloco"])
def test_a_replica_leaves_out_updates_by_itself(pools, maker):
    found = pools.run(2, leaving_out, f"{maker}(2, every=3)", 7)
    outer = outer_of if maker == "diloco" else None
    wanted, _ = replicas_by_hand(7, 3, lambda step: [broken(step, r) for r in range(2)], outer=outer)
    for (params, _), own in zip(found, wanted, strict=True):
        for name, value in own.items():
            assert torch.allclose(params[name], value, atol=1e-6), name
    first, second = ([(skipped, updates) for skipped, updates, _ in steps] for _, steps in found)
    assert first == [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (0, 6), (0, 7)]
    assert second == [(0, 1), (1, 1), (0, 3), (0, 4), (0, 5), (0, 6), (0, 7)]  # 3 is the larger count


def test_a_loss_scale_is_the_smallest_of_all_replicas_after_an_average(pools):
    precision = fa.transforms.Precision(compute="fp16", init_scale=8.0)
    (_, first), (_, second) = pools.run(2, leaving_out, "local_sgd(2, every=3)", 5, precision)
    assert [scale for *_, scale in first] == [8.0, 8.0, 8.0, 4.0, 4.0]
    assert [scale for *_, scale in second] == [8.0, 8.0, 4.0, 4.0, 4.0]


class Normed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)
        self.out = torch.nn.Linear(3, 1)

    def forward(self, x):
        return self.out(self.norm(x))


def normed(strategy, steps):
    step = fa.with_ema(loss_fn, decay=0.5)
    train_step = program(step, strategy=strategy, optimizer=fa.sgd(0.05), model=Normed)
    state, found = train_step.init(seed=0), []
    for number in range(steps):
        state, _ = train_step(state, rows("even", number, train_step.mesh.batch_rank))
        found.append(
            fa.tree.map_tensors(torch.clone, (dict(state.params), dict(state.buffers), dict(state.ema)))
        )
    return found


def test_buffers_and_averages_become_means(pools):
    apart = pools.run(2, normed, "local_sgd(2, every=3)", 3)
    alone = pools.run(2, normed, "local_sgd(2, every=9)", 3)  # the same steps, without an average
    (_, one, ema), (_, other, other_ema) = (found[2] for found in alone)
    for _, buffers, averages in (found[2] for found in apart):
        for name in ("norm.running_mean", "norm.running_var"):
            assert torch.allclose(buffers[name], (one[name] + other[name]) / 2, rtol=1e-6)
        assert int(buffers["norm.num_batches_tracked"]) == 3
        for name, value in averages.items():
            assert torch.allclose(value, (ema[name] + other_ema[name]) / 2, rtol=1e-6), name


def test_changes_that_are_sent_in_16_bits_are_rounded_to_8_bits(pools):
    exact = pools.run(2, trained, "diloco(2, every=3)", 3, "even")[0][0]
    sent = pools.run(2, trained, "diloco(2, every=3, send='bfloat16')", 3, "even")[0][0]
    torch.manual_seed(0)
    first = dict(Net().named_parameters())
    for name, value in exact.items():
        most = (
            1.33 * (first[name] - value).abs().max().item()
        )  # rate 0.7, and Nesterov's first step is 1.9 of it
        error = (sent[name] - value).abs().max().item()
        assert 0 < error <= 2 * 2**-8 * most, name


@pytest.mark.parametrize("scope", ["block", "loss"])
def test_blocks_and_losses_compile(pools, scope):
    transform = {"block": compiled_block, "loss": compiled_loss}[scope]
    found = pools.run(2, trained, "local_sgd(2, every=2)", 5, "even", transform)
    check(found, 2, 2, 5, 2, "even")


def compiled_block(step):
    return fa.compile(step, scope="block", backend="aot_eager")


def compiled_loss(step):
    return fa.compile(step, scope="loss", backend="aot_eager")


class Grown(torch.nn.Module):
    """Its cache has a row for each of the batch: another size on each rank."""

    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(3, 1)
        self.register_buffer("turns", torch.ones(1, dtype=torch.complex64))
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, x):
        self.cache = torch.arange(float(len(x)))
        self.turns = self.turns * (1 + 1j * len(x))
        return self.out(x)


def grown(folder):
    train_step = program(loss_fn, strategy="local_sgd(2, every=2)", optimizer=fa.sgd(0.1), model=Grown)
    state, turns = train_step.init(seed=0), 1
    for number in range(2):
        batch = rows("ragged", number, train_step.mesh.batch_rank)
        turns *= 1 + 1j * len(batch[0])
        state, _ = train_step(state, batch)
    fa.save(folder, state)
    return turns, state.buffers["turns"].item(), len(state.buffers["cache"])


def test_caches_stay_each_ranks_own_and_complex_buffers_become_means(pools, tmp_path):
    (one, found, size), (other, also, other_size) = pools.run(2, grown, tmp_path)
    assert found == also == pytest.approx((one + other) / 2, rel=1e-6)
    assert size != other_size
