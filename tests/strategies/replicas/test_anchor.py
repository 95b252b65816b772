"""The anchor of DiLoCo: evaluation reads it between two averages, and it may be in host memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa
from fnaccel.errors import AveragedError
from fnaccel.extend import Leaf, Updated
from fnaccel.strategies.replicas.boundary import Boundary
from tests.strategies.replicas.raw import rows
from tests.strategies.replicas.test_training import Normed
from tests.tiny_models import Net, batch_of, loss_fn, program, whole, whole_params


def made(strategy, **options):
    return program(loss_fn, strategy=strategy, optimizer=fa.adamw(0.02), **options)


def stepped(train_step, state, steps):
    inner = train_step.mesh.gradient_size
    while state.step < steps:
        x, y, _ = rows("ragged", state.step, train_step.mesh.batch_rank, inner)
        state, _ = train_step(state, (x, y))
    return state


def values_of(model):
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def scored(train_step, state):
    shards = fa.shard(DataLoader(TensorDataset(*batch_of(11, 9)), batch_size=4))
    return float(fa.evaluate(train_step, state, loss_fn, shards))


def read(strategy, reads):
    """The anchor, the replica's own parameters, and what is read of both, after the steps 4, 6 and 7."""
    train_step = made(strategy)
    state, found = train_step.init(seed=0), []
    for step in (4, 6, 7) if reads else ():
        state = stepped(train_step, state, step)
        before = whole_params(state)
        anchor = fa.tree.map_tensors(whole, dict(state.transforms["diloco"]["anchor"]))
        score = scored(train_step, state)
        looked = train_step.look(state, values_of, whole=True)
        own = train_step.look(state, values_of, whole=True, train=True)
        assert equal(whole_params(state), before)
        assert equal(fa.tree.map_tensors(whole, dict(state.transforms["diloco"]["anchor"])), anchor)
        found.append((anchor, before, score, looked, own))
    state = stepped(train_step, state, 10)
    end = whole_params(state)
    train_step.close()
    return found, end


def equal(first, second):
    return fa.tree.allclose(dict(first), dict(second), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("strategy", "ranks"), [("diloco(2, every=3)", 2), ("diloco(2, every=3) * fsdp(2)", 4)]
)
def test_evaluate_and_look_read_the_anchor(pools, strategy, ranks):
    expected = pools.run(ranks, read, strategy, False)
    found = pools.run(ranks, read, strategy, True)
    for (reads, end), (_, wanted) in zip(found, expected, strict=True):
        assert equal(end, wanted)  # and training goes on to the same bits
        for anchor, before, score, looked, own in reads:
            assert equal(looked, anchor)
            assert equal(own, before)
            net = Net()
            net.load_state_dict(anchor)
            x, y = batch_of(11, 9)
            assert score == pytest.approx(float(torch.nn.functional.mse_loss(net(x), y).detach()), rel=1e-5)
        assert not equal(reads[0][0], reads[0][1])
        assert equal(reads[1][0], reads[1][1])  # 6 is an average
    (first, _), (last, _) = found[0], found[-1]
    assert [score for *_, score, _, _ in first] == [score for *_, score, _, _ in last]


def after_four(train_step, folder, resume):
    """The state after four steps: made and saved, or restored."""
    state = train_step.init(seed=0)
    if resume:
        return fa.restore(folder, like=state)
    state = stepped(train_step, state, 4)
    fa.save(folder, state, between=True)
    return state


def resumed(folder, resume):
    """What is read after a restore, and after a snapshot was adopted, between two averages."""
    train_step = made("diloco(2, every=3)")
    state = after_four(train_step, folder, resume)
    score = scored(train_step, state)
    state = train_step.adopt(fa.snapshot(state))
    return score, scored(train_step, state), state.step


def test_the_anchor_of_a_restored_or_adopted_state_is_read(pools, tmp_path):
    found = [*pools.run(2, resumed, tmp_path, False), *pools.run(2, resumed, tmp_path, True)]
    assert set(found) == {(found[0][0], found[0][0], 4)}


def exported(folder):
    """The anchor, the parameters of the replica, and the export, between two averages."""
    train_step = made("diloco(2, every=3)")
    state = stepped(train_step, train_step.init(seed=0), 4)
    before = whole_params(state)
    path = fa.interchange.export_hf(folder, state)
    assert equal(whole_params(state), before)
    anchor = fa.tree.map_tensors(whole, dict(state.transforms["diloco"]["anchor"]))
    with pytest.raises(fa.errors.CheckpointError, match="after step 4 each rank holds values of its own"):
        fa.interchange.gather_state_dict(state)
    return anchor, before, load_file(path / "model.safetensors")


def test_exports_hold_the_anchor(pools, tmp_path):
    for anchor, before, file in pools.run(2, exported, tmp_path / "model"):
        assert equal(file, anchor)
        assert not equal(file, before)


def not_exported(folder, strategy, model):
    train_step = made(strategy, model=model)
    state = stepped(train_step, train_step.init(seed=0), 4)
    with pytest.raises(fa.errors.CheckpointError) as error:
        fa.interchange.export_hf(folder, state)
    return str(error.value)


@pytest.mark.parametrize(
    ("strategy", "model", "text"),
    [
        ("local_sgd(2, every=3)", Net, "after step 4 each rank holds values of its own"),
        ("diloco(2, every=3)", Normed, "state.buffers differs between ranks"),
    ],
)
def test_an_export_that_would_mix_replicas_names_the_next_average(pools, tmp_path, strategy, model, text):
    for found in pools.run(2, not_exported, tmp_path / "model", strategy, model):
        assert text in found
        assert "train on to step 6" in found


def failing(strategy):
    """An error in a look, and a save in one: the parameters of the replica come back."""
    train_step = made(strategy)
    state = stepped(train_step, train_step.init(seed=0), 4)
    before = whole_params(state)
    with pytest.raises(ZeroDivisionError):
        train_step.look(state, lambda model: 1 / 0)
    with pytest.raises(AveragedError):
        train_step.look(state, lambda model: fa.snapshot(state))
    assert equal(whole_params(state), before)


def test_an_error_in_a_look_leaves_the_parameters_of_the_replica(pools):
    pools.run(2, failing, "diloco(2, every=3)")


def refused(strategy, model):
    train_step = made(strategy, model=model)
    state = stepped(train_step, train_step.init(seed=0), 4)
    with pytest.raises(fa.errors.ArgumentError) as error:
        scored(train_step, state)
    return str(error.value)


@pytest.mark.parametrize(
    ("strategy", "model", "text"),
    [
        ("local_sgd(2, every=3)", Net, "after step 4 each rank holds values of its own"),
        ("diloco(2, every=3)", Normed, "each rank holds buffers of its own"),
    ],
)
def test_a_score_that_would_mix_replicas_names_the_next_average(pools, strategy, model, text):
    for found in pools.run(2, refused, strategy, model):
        assert text in found
        assert "evaluate after step 6" in found


def going_on(strategy, folder, resume):
    """Parameters and the state of the axis after seven steps, of a run that was saved after four."""
    train_step = made(strategy)
    state = after_four(train_step, folder, resume)
    if not resume:
        scored(train_step, state)
    state = stepped(train_step, state, 7)
    found = whole_params(state), fa.tree.map_tensors(whole, dict(state.transforms))
    train_step.close()
    return found


@pytest.mark.parametrize(("product", "ranks"), [("", 2), (" * fsdp(2)", 4)])
def test_an_anchor_in_host_memory_has_the_bits_of_one_on_the_device(pools, tmp_path, product, ranks):
    first = pools.run(ranks, going_on, f"diloco(2, every=3){product}", tmp_path / "device", False)
    other = pools.run(
        ranks, going_on, f"diloco(2, every=3, anchor='host'){product}", tmp_path / "host", False
    )
    again = pools.run(ranks, going_on, f"diloco(2, every=3, anchor='host'){product}", tmp_path / "host", True)
    for device, host, resumed in zip(first, other, again, strict=True):
        assert fa.tree.allclose(device, host, rtol=0, atol=0)
        assert fa.tree.allclose(host, resumed, rtol=0, atol=0)


@pytest.mark.parametrize("outer", ["sgd(0.7, momentum=0.9)", "adam(0.1)"])
@pytest.mark.parametrize(("anchor", "memory"), [("host", "cpu"), ("device", "cuda")])
def test_the_anchor_of_parameters_on_a_gpu_is_in_the_memory_that_is_asked_for(anchor, memory, outer):
    """On tensors that hold no values."""
    (axis,) = fa.diloco(1, every=2, warmup=1, anchor=anchor, outer=outer).axes
    with FakeTensorMode():
        param = torch.nn.Parameter(torch.empty(3, device="cuda"))
        layout = SimpleNamespace(
            leaves=[Leaf("weight", param, param.detach(), param)], mesh=SimpleNamespace(degrees={})
        )
        boundary = Boundary(axis, SimpleNamespace(layout=layout), SimpleNamespace(modules={}))
        own = boundary.first()
        for step in (1, 2, 3):  # a mean, nothing, an outer update
            tensors = [x for x in fa.tree.leaves(own) if isinstance(x, torch.Tensor)]
            assert {x.device.type for x in tensors} == {memory}
            assert len(tensors) == (2 if outer.startswith("sgd") else 3)
            if anchor == "host":  # the kernel runs on the CPU
                own = boundary(Updated(step=step, params={}, buffers={}, opt={}, ema=None, own=own))
        assert own["updates"] == (anchor == "host")
