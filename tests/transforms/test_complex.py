"""Complex numbers and fp64 buffers under a precision: cast are floating-point parameters, and buffers of their dtype."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa
from fnaccel.errors import CapabilityError
from fnaccel.testing import assert_close, oracle_run
from fnaccel.world.world import current
from tests.parity.traps import Complex, Rotary, rank_batch, squares

KEPT = {"table": torch.complex64, "turned": torch.complex64, "wide": torch.float64}


class Fourier(nn.Module):
    """A complex parameter beside a batch norm: under fsdp(ignore=) both are whole on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = Complex(), nn.BatchNorm1d(3)

    def forward(self, x):
        return self.layer(self.norm(x))


def built(model, step, strategy="local"):
    return fa.train_step(step, model=fa.distribute(model, strategy), optimizer=fa.sgd(0.1))


@pytest.mark.parametrize("param", ["fp32", "bf16", "fp64"])
def test_buffers_keep_complex_numbers_and_digits(param):
    with fa.start(device="cpu"):
        policy = fa.transforms.Precision(param=param, compute=param)
        state = built(
            lambda: nn.Sequential(Rotary(), nn.BatchNorm1d(1)), fa.with_precision(squares, policy)
        ).init()
    kinds = {name.removeprefix("0."): value.dtype for name, value in state.buffers.items()}
    norm = state.params["1.weight"].dtype
    assert kinds == KEPT | {
        "1.running_mean": norm,
        "1.running_var": norm,
        "1.num_batches_tracked": torch.int64,
    }
    assert norm is getattr(torch, {"fp32": "float32", "bf16": "bfloat16", "fp64": "float64"}[param])


def test_buffers_of_a_model_in_fp64_follow_its_parameters():
    with fa.start(device="cpu"):
        state = built(lambda: nn.BatchNorm1d(3).double(), fa.with_precision(squares, "fp32")).init()
    kinds = {value.dtype for value in (*state.params.values(), *state.buffers.values())}
    assert kinds == {torch.float32, torch.int64}


def looked(strategy, model, folder):
    """What is gathered and exported after a step, and the scores before a save and after its restore."""
    train_step = built(model, fa.with_precision(squares, "bf16"), strategy)
    try:
        state, _ = train_step(train_step.init(seed=0), rank_batch(0, current().rank))
        shards = fa.shard(DataLoader(TensorDataset(*rank_batch(9, 0)), batch_size=4))
        scores = [float(fa.evaluate(train_step, state, squares, shards))]
        gathered = fa.interchange.gather_state_dict(state, dtype="bf16")
        fa.interchange.export_hf(f"{folder}/exported", state)
        fa.save(f"{folder}/saved", state)
        state, _ = train_step(state, rank_batch(1, current().rank))
        state = fa.restore(f"{folder}/saved", like=state)
        scores.append(float(fa.evaluate(train_step, state, squares, shards)))
        kinds = None if gathered is None else {name: value.dtype for name, value in gathered.items()}
        return kinds, scores
    finally:
        train_step.close()


@pytest.mark.parametrize(
    ("strategy", "ranks", "model"),
    [("local", 1, Complex), ("ddp", 2, Complex), ("ddp", 2, Rotary), ("fsdp", 2, Rotary)],
)
def test_they_are_saved_exported_and_evaluated(pools, tmp_path, strategy, ranks, model):
    safetensors = pytest.importorskip("safetensors.torch")
    results = pools.run(ranks, looked, strategy, model, str(tmp_path))
    wanted = {"weight"} if model is Complex else {"table", "turned"}
    assert {name for name, kind in results[0][0].items() if kind is torch.complex64} == wanted
    (file,) = (tmp_path / "exported").glob("*.safetensors")
    exported = safetensors.load_file(file)
    assert {name for name, value in exported.items() if value.is_complex()} == wanted
    assert all(scores[0] == scores[1] for _, scores in results)


def trained(strategy, step):
    train_step = built(Fourier, fa.transforms.sync_batch_norm(step), strategy)
    try:
        state, losses = train_step.init(seed=0), []
        for number in range(3):
            state, metrics = train_step(state, rank_batch(number, current().rank))
            losses.append(float(metrics["loss"]))
        return losses, {name: fa.tree.whole(value).detach().clone() for name, value in state.params.items()}
    finally:
        train_step.close()


@pytest.mark.filterwarnings("error:Casting complex")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp(ignore='layer.weight')"])
def test_gradients_of_complex_and_real_parameters_are_averaged(pools, strategy):
    batches = [[rank_batch(step, rank) for rank in range(2)] for step in range(3)]
    oracle = oracle_run(Fourier, squares, batches, lr=0.1)
    for losses, params in pools.run(2, trained, strategy, squares):
        assert_close(losses, oracle.losses)
        assert_close(params, oracle.params)


def given(strategy):
    """A loss of parameters as values, which fsdp gathers and reduces by itself."""

    def loss(model, batch):
        x, y = batch
        out = fa.call(model, fa.params(model), x)
        return fa.Mean((out - y).square().sum(), weight=len(y))

    return trained(strategy, fa.with_precision(loss, "fp32"))


def test_a_loss_of_parameters_as_values_sends_complex_gradients(pools):
    batches = [[rank_batch(step, rank) for rank in range(2)] for step in range(3)]
    oracle = oracle_run(Fourier, squares, batches, lr=0.1)
    for losses, params in pools.run(2, given, "fsdp(ignore='layer.weight')"):
        assert_close(losses, oracle.losses)
        assert_close(params, oracle.params)


@pytest.mark.parametrize(
    ("strategy", "reduce"), [("ddp(hook='bf16')", "fp32"), ("ddp", "bf16")], ids=["hook", "reduce"]
)
def test_ddp_sends_no_complex_gradient_in_bf16(pools, strategy, reduce):
    step = fa.with_precision(squares, fa.transforms.Precision(reduce=reduce))
    with pytest.raises(
        CapabilityError, match=r"layer\.weight is complex, and the hook 'bf16' sends real numbers"
    ):
        pools.run(2, trained, strategy, step)
