"""Checkpoints, copies and exports of states whose parameters tensor parallelism cuts."""

from __future__ import annotations

import os
import signal

import pytest
import safetensors.torch
import torch
import transformers
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa
from fnaccel import errors
from tests.strategies.tensor.models import GPT, LENGTH, PLAN, SEQUENCE, VOCABULARY, loss_fn, rows_of
from tests.strategies.tensor.test_transformers import gpt2, llama
from tests.strategies.tensor.test_transformers import loss_fn as lm_loss
from tests.tiny_models import whole, whole_params

BOTH = fa.fsdp(2) * fa.tensor(2, PLAN)


def program(strategy, model=GPT, step=loss_fn, optimizer=None):
    return fa.train_step(step, model=fa.distribute(model, strategy), optimizer=optimizer or fa.adamw(0.01))


def everything(state):
    trees = (state.params, state.opt, state.ema or {})
    return tuple(fa.tree.map_tensors(whole, dict(part)) for part in trees)


def rows():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randint(0, VOCABULARY, (26, LENGTH + 1), generator=generator))


def loss_of_tuple(model, batch):
    return loss_fn(model, batch[0])


def scanned(strategy, folder, kill_at=None):
    """Six steps of ragged batches in random order. All ranks are killed in a step, or none."""
    train_step = program(strategy, step=fa.with_ema(fa.accumulate(loss_of_tuple, 2), 0.5))
    state = train_step.init(seed=0)
    if fa.checkpoint.latest(folder) is not None:
        state = fa.restore(folder, like=state)
    first = state.step
    data = fa.shard(DataLoader(rows(), batch_size=8, shuffle=True), seed=5)
    losses = []
    for state, metrics in fa.scan(train_step, state, data, steps=6):
        losses.append(float(metrics["loss"]))
        if state.step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if state.step % 2 == 0:
            fa.save(folder, state)
    return first, losses, everything(state), state.data


@pytest.mark.long
@pytest.mark.parametrize("plan", ["whole", "sequence"])
def test_a_run_that_is_killed_goes_on_with_the_same_bits(pools, tmp_path, plan):
    strategy = BOTH if plan == "whole" else fa.fsdp(2) * fa.tensor(2, SEQUENCE, sequence=True)
    expected = pools.run(4, scanned, strategy, tmp_path / "a")
    with pytest.raises(errors.LaunchError):
        pools.run(4, scanned, strategy, tmp_path / "b", 5)
    found = pools.run(4, scanned, strategy, tmp_path / "b")
    for (first, losses, state, data), (_, undisturbed, end, position) in zip(found, expected, strict=True):
        assert (first, losses, data) == (4, undisturbed[4:], position)
        torch.testing.assert_close(state, end, rtol=0, atol=0)


def copied(strategy):
    train_step = program(strategy, step=fa.with_ema(loss_fn, 0.5))
    state, _ = train_step(train_step.init(seed=0), rows_of(0, 0, rows=4))
    copy = fa.snapshot(state)
    before = everything(copy)
    state, _ = train_step(state, rows_of(1, 0, rows=4))
    once = everything(state)
    state = train_step.adopt(copy)
    again = everything(state)
    state, _ = train_step(state, rows_of(1, 0, rows=4))
    gathered = fa.interchange.gather_state_dict(state)
    return before, again, once, everything(state), gathered


@pytest.mark.long_except(r"^tensor")
@pytest.mark.parametrize("strategy", [fa.tensor(2, PLAN), BOTH])
def test_copies_of_a_state(pools, strategy):
    ranks = 4 if strategy == BOTH else 2
    for rank, (before, again, once, twice, gathered) in enumerate(pools.run(ranks, copied, strategy)):
        torch.testing.assert_close(before, again, rtol=0, atol=0)
        torch.testing.assert_close(once, twice, rtol=0, atol=0)
        if rank:
            assert gathered is None
        else:
            torch.testing.assert_close(gathered, once[0], rtol=0, atol=0)


def adopted(strategy, path, only=None):
    train_step = program(strategy)
    state = fa.interchange.adopt(path, like=train_step.init(seed=1), only=only)
    params = whole_params(state)
    state, metrics = train_step(state, rows_of(0, 0, rows=4))
    return params, float(metrics["loss"])


@pytest.mark.parametrize("strategy", [fa.tensor(2, PLAN), BOTH])
def test_adopting_a_file_of_whole_weights(pools, tmp_path, strategy):
    torch.manual_seed(3)
    weights = dict(GPT().state_dict())
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    expected = pools.run(1, adopted, "local", tmp_path / "model.safetensors")[0]
    for params, loss in pools.run(
        4 if strategy == BOTH else 2, adopted, strategy, tmp_path / "model.safetensors"
    ):
        torch.testing.assert_close(params, weights, rtol=0, atol=0)
        assert loss == pytest.approx(expected[1], abs=1e-5)


def restored_in_part(folder):
    train_step = program(BOTH)
    state = train_step.init(seed=0)
    fa.save(folder, state)
    saved = whole_params(state)
    other = program(fa.ddp(2) * fa.tensor(2, PLAN))
    state = other.init(seed=1)
    before = whole_params(state)
    state = fa.restore(folder, like=state, only="params/blocks.*.qkv.*")
    fa.checkpoint.save_on_main({"params": state.params}, folder / "params.pt")
    return saved, before, whole_params(state)


def test_restoring_some_parameters(pools, tmp_path):
    for saved, before, after in pools.run(4, restored_in_part, tmp_path):
        for name, value in after.items():
            assert torch.equal(value, (saved if "qkv" in name else before)[name])
    written = torch.load(tmp_path / "params.pt")["params"]
    torch.testing.assert_close(written, after, rtol=0, atol=0)


def exported(make, strategy, folder):
    train_step = program(strategy, make, lm_loss, fa.sgd(0.1))
    tokens = torch.randint(1, VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(0))
    state, _ = train_step(
        train_step.init(seed=0), {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    )
    fa.interchange.export_hf(folder, state)
    return train_step.look(state, lambda model: model(input_ids=tokens).logits), tokens


@pytest.mark.long_except(r"gpt2")
@pytest.mark.parametrize("strategy", ["tensor(2)", "fsdp(2) * tensor(2)"])
@pytest.mark.parametrize("make", [gpt2, llama])
def test_exports_load_in_transformers(pools, tmp_path, make, strategy):
    results = pools.run(4 if "*" in strategy else 2, exported, make, strategy, tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    for logits, tokens in results:
        torch.testing.assert_close(model(input_ids=tokens).logits, logits, rtol=1e-5, atol=1e-5)
