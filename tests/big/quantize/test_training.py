"""Training an adapter on quantized weights: codes never change, states resume, and nothing else trains."""

from __future__ import annotations

import copy

import pytest
import torch

import fnaccel as fa
from fnaccel.errors import ArgumentError, CapabilityError
from tests.big.quantize.models import RECORDS, Net, made, same

peft = pytest.importorskip("peft")


def loss_fn(model, batch):
    x, y = batch
    return fa.Mean((model(x) - y).square().sum(), weight=len(x))


def batch(seed=0):
    return made(lambda: (torch.randn(6, 128), torch.randn(6, 8)), seed)


def adapted(record=None, target=("up", "down")):
    model = fa.big.quantize(Net(), record or fa.big.Nf4(double=True))
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=list(target), lora_dropout=0.1))


def program(model=adapted, strategy=None, step=loss_fn, **options):
    model = fa.distribute(model, strategy or fa.local())
    return fa.train_step(step, model=model, optimizer=fa.adamw(1e-2), **options)


@pytest.fixture
def world():
    with fa.start() as world:
        yield world


@pytest.mark.parametrize("record", RECORDS, ids=str)
@pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated:UserWarning")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_adapter_trains_and_codes_stay(world, record, precision):
    train_step = program(lambda: adapted(record), step=fa.with_precision(loss_fn, precision))
    state = train_step.init(seed=0)
    codes = {name: value.clone() for name, value in state.buffers.items()}
    assert {name.split(".")[-1] for name in codes} >= {"codes"}
    assert all(type(value) is torch.Tensor for value in state.buffers.values())
    assert all(".lora_" in name for name in state.opt)
    losses = []
    for _ in range(12):
        state, metrics = train_step(state, batch())
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.7 * losses[0]
    assert same(dict(state.buffers), codes)


def test_a_first_step_does_not_copy_codes(world, monkeypatch):
    train_step = program()
    state = train_step.init(seed=0)
    assert train_step._owner.instance.moving_buffers._slots == []
    state, _ = train_step(state, batch())
    assert len(state.buffers) == 12


@pytest.mark.parametrize("strategy", [fa.local(), fa.ddp(), fa.fsdp()], ids=str)
def test_a_saved_run_goes_on_to_the_same_bits(world, strategy, tmp_path):
    batches = [batch(seed) for seed in range(6)]
    train_step = program(strategy=strategy)
    state = train_step.init(seed=0)
    for number, rows in enumerate(batches):
        if number == 3:
            fa.save(tmp_path / "run", state)
        state, metrics = train_step(state, rows)
    again = program(strategy=strategy)
    resumed = fa.restore(tmp_path / "run", like=again.init(seed=9))
    assert resumed.step == 3
    for rows in batches[3:]:
        resumed, after = again(resumed, rows)
    assert float(after["loss"]) == float(metrics["loss"])
    for tree in ("params", "buffers"):
        assert same(dict(getattr(resumed, tree)), dict(getattr(state, tree)))


def test_a_failed_step_leaves_the_state_live(world):
    train_step = program()
    state = train_step.init(seed=0)
    codes = {name: value.clone() for name, value in state.buffers.items()}
    with pytest.raises(RuntimeError, match="shape"):
        train_step(state, (torch.randn(6, 5), torch.randn(6, 8)))
    assert same(dict(state.buffers), codes)
    state, _ = train_step(state, batch())
    assert state.step == 1


def test_quantized_weights_are_not_trained(world):
    def quantized():
        return fa.big.quantize(Net(), fa.big.Nf4())

    with pytest.raises(CapabilityError, match="no other parameter is trained") as raised:
        program(quantized())  # before anything is built
    assert "peft.get_peft_model" in raised.value.fix
    with pytest.raises(CapabilityError, match="every other parameter is trained"):
        program(quantized().requires_grad_(True))
    train_step = program(quantized)  # a factory's model is known when it is built
    with pytest.raises(CapabilityError, match=r"up.weight \(and 1 more\) is quantized \(nf4\)"):
        train_step.init(seed=0)
    lent = fa.train_step(loss_fn, model=fa.distribute(quantized(), fa.local()), optimizer=None)
    assert lent.look(lent.init(), lambda model: model(batch()[0])).shape == (6, 8)


def test_saying_what_stays_allows_the_rest_to_train(world):
    model = fa.big.quantize(Net(), fa.big.Nf4()).requires_grad_(True)
    train_step = program(model, frozen=("up.weight", "down.weight"))
    state = train_step.init(seed=0)
    before = copy.deepcopy(dict(state.params))
    state, _ = train_step(state, batch())
    assert not torch.equal(state.params["up.bias"], before["up.bias"])
    train_step.close()
    head = fa.big.quantize(Net(), fa.big.Nf4())
    head.lm_head.requires_grad_(True)
    state = program(head).init(seed=0)
    assert list(state.opt) == ["lm_head.weight", "lm_head.bias"]
    with pytest.raises(ArgumentError, match="matches no parameter"):
        program(adapted, frozen=("upper.weight",)).init(seed=0)


def test_a_quantized_teacher_needs_no_words(world):
    def distil(models, rows):
        with torch.no_grad():
            goal = models["teacher"](rows[0])
        return fa.Mean((models["student"](rows[0]) - goal).square().sum(), weight=len(rows[0]))

    models = {"student": Net(), "teacher": fa.big.quantize(Net(), fa.big.Int8())}
    train_step = program(models, step=distil)
    state, _ = train_step(train_step.init(seed=0), batch())
    assert state.buffers["teacher"]["up.codes"].dtype is torch.int8


def different_ranks(strategy):
    """Codes after `init` of models that differ between ranks, and whether a forward sends them again."""
    rank = fa.world.world.current().rank
    model = made(lambda: fa.big.quantize(Net(), fa.big.Nf4()), seed=rank)
    train_step = program(
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["up"])), strategy=strategy
    )
    state = train_step.init(seed=0)
    name = next(name for name in state.buffers if name.endswith("up.base_layer.codes"))
    first = state.buffers[name].clone()
    with torch.no_grad():
        state.buffers[name].fill_(rank)  # nobody does this: it shows whether buffers are broadcast
    state, _ = train_step(state, batch())
    return first, int(state.buffers[name][0])


@pytest.mark.parametrize("strategy", ["ddp()", "fsdp()"])
def test_codes_are_those_of_rank_0_and_are_sent_once(pools, strategy):
    (first, mark), (other, other_mark) = pools.run(2, different_ranks, strategy)
    assert torch.equal(first, other)
    assert (mark, other_mark) == (0, 1)
