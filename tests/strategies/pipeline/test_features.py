"""Transforms, optimizers and loops on stages: what they give is what one process gives, on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fnaccel as fa
from fnaccel.cli import trace
from fnaccel.strategies.pipeline.split import split_model
from fnaccel.testing import assert_close
from tests.strategies.pipeline import models
from tests.strategies.pipeline.models import STEPS, loss_fn, rows_of
from tests.tiny_models import program, whole_params


def run(step, strategy, optimizer=None):
    """Metrics of some steps, and whole parameters."""
    train_step = program(step, strategy=strategy, optimizer=optimizer, model=models.deep_gpt)
    state, found = train_step.init(seed=0), []
    for number in range(STEPS):
        state, metrics = train_step(state, rows_of(number, 0))
        found.append(fa.tree.map(lambda x: torch.as_tensor(x, dtype=torch.float64), dict(metrics)))
    return found, whole_params(state)


def fp16(strategy):
    return run(fa.with_precision(fa.accumulate(loss_fn, 2), "fp16"), strategy)


def skipped(strategy):
    return run(fa.skip_nonfinite(fa.accumulate(loss_fn, 2)), strategy)


def blocks_compiled(strategy):
    return run(fa.compile(fa.accumulate(loss_fn, 2), "block", backend="eager"), strategy)


def count_tokens(tokens):
    return tokens[:, 1:].numel()


def weight_of_the_batch(strategy):
    return run(fa.with_weight(fa.accumulate(loss_fn, 2), count_tokens), strategy)


def spikes(strategy):
    return run(fa.transforms.on_spike(fa.accumulate(loss_fn, 2)), strategy)


def ascend(grads, info):
    return fa.tree.scale(grads, 0.05 / (fa.tree.norm(grads) + 1e-12))


def perturbed(strategy):
    return run(fa.perturb(fa.accumulate(loss_fn, 2), ascend), strategy)


class LargeVocabulary(nn.Module):
    """Twelve blocks of 72 parameters, and a head that weighs as five or six of them."""

    def __init__(self, *, tied):
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.blocks = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))
        self.head = nn.Linear(8, 50, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens)))


@pytest.mark.parametrize("tied", [False, True])
def test_by_size_the_stage_of_a_large_head_has_fewer_blocks(tied):
    for asked, most in (("size", 9), ("even", 6)):
        split = split_model(LargeVocabulary(tied=tied), asked, {"head": 1.0}, (0, 1))
        assert [element.stage for element in split.elements] == [0] * most + [1] * (12 - most)


def profiled(directory):
    with fa.start():
        strategy = "pipeline(2, schedule='interleaved', virtual=2)"
        train_step = program(fa.accumulate(loss_fn, 2), strategy=strategy, model=models.deep_gpt)
        state = train_step.init(seed=0)
        with fa.profile(directory, wait=1, warmup=0, active=2):
            for number in range(3):
                state, _ = train_step(state, rows_of(number, 0))
        train_step.close()


def test_a_profile_has_a_row_for_each_stage(pools, tmp_path, capsys):
    pools.run(2, profiled, tmp_path)
    ranks = fa.seeing.summarize(tmp_path)
    assert [sorted(rank.stages) for rank in ranks] == [[0, 2], [1, 3]]
    for rank in ranks:
        for phase in ("forward", "backward"):
            times = [times[phase] for times in rank.stages.values()]
            assert all(time > 0 for time in times)
            assert rank.phases[phase] == pytest.approx(sum(times))
    assert trace.run(["summarize", str(tmp_path)]) == 0
    rows = capsys.readouterr().out.partition("Stages")[2].splitlines()
    assert [row.split()[:2] for row in rows[3:7]] == [["0", "0"], ["1", "1"], ["2", "0"], ["3", "1"]]


def halved(grads, own, info):
    return {name: 0.5 * grad for name, grad in grads.items()}, own


def own_gradients(strategy):
    step = fa.Transform("halved", fa.Phase.GRADS, apply=halved)
    return run(fa.chain(fa.accumulate(2), step)(loss_fn), strategy)


def decayed(params, own, info):
    for value in params.values():
        value.mul_(0.99)
    return own


def own_update(strategy):
    step = fa.Transform("decayed", fa.Phase.UPDATE, apply=decayed)
    return run(fa.chain(fa.accumulate(2), step)(loss_fn), strategy)


def reporting(model, tokens):
    own = loss_fn(model, tokens)
    first = tokens[:, 0].float()
    aux = {
        "rows": fa.Concat(first),
        "top": fa.Max(first.max()),
        "mean": first.mean(),
        "inner": {"x": fa.Sum(1.0)},
    }
    return fa.Mean(own.total, weight=own.weight, aux=aux)


def aux_of_all_kinds(strategy):
    return run(fa.accumulate(reporting, 2), strategy)


def gradients_as_values(strategy):
    train_step = program(loss_fn, strategy=strategy, model=models.deep_gpt)
    state = train_step.init(seed=0)
    metrics, grads = fa.value_and_grad(train_step)(state, rows_of(0, 0))
    return [torch.as_tensor(metrics["loss"])], fa.tree.map(fa.tree.whole, dict(grads))


def trusted(strategy):
    """LAMB in parts: the norm of a parameter is that of all of it."""
    parts = (fa.optim.scale_by_adam(), fa.optim.trust_ratio())
    return run(loss_fn, strategy, fa.optim.chain(*parts, lr=0.01))


def adafactor(strategy):
    return run(loss_fn, strategy, fa.optim.adafactor(0.01))


def rmsprop(strategy):
    return run(loss_fn, strategy, fa.optim.from_torch(torch.optim.RMSprop, lr=0.01))


def scanned(strategy):
    train_step = program(fa.accumulate(loss_fn, 2), strategy=strategy, model=models.deep_gpt)
    shards = fa.shard(DataLoader(rows_of(0, 0, rows=26), batch_size=6))
    losses = []
    for state, metrics in fa.scan(train_step, train_step.init(seed=0), shards):
        losses.append(torch.as_tensor(metrics["loss"]))
    return losses, whole_params(state)


def whole_look(strategy):
    train_step = program(loss_fn, strategy=strategy, model=models.TiedGPT)
    state = train_step.init(seed=0)
    rows = rows_of(0, 0)[:, 1:]
    output = train_step.look(state, lambda model: model(rows), whole=True)
    return [output], {
        "sum": train_step.look(state, lambda m: sum(p.sum() for p in m.parameters()), whole=True)
    }


FEATURES = [
    fp16, skipped, blocks_compiled, weight_of_the_batch, spikes, perturbed, own_gradients, own_update,
    aux_of_all_kinds, gradients_as_values, trusted, adafactor, rmsprop, scanned, whole_look,
]  # fmt: skip


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_gives_on_stages_what_it_gives_on_one_process(pools, feature):
    ((numbers, params),) = pools.run(1, feature, "local")
    for found, own in pools.run(2, feature, "pipeline(2)"):
        precision = "fp16" if feature is fp16 else "fp32"
        assert_close(found, numbers, precision=precision)
        assert_close(own, params, precision=precision)


def planned(strategy):
    train_step = program(fa.accumulate(loss_fn, 2), strategy=strategy, model=models.deep_gpt)
    return train_step.plan.notes


def test_the_plan_draws_the_schedule_and_a_footprint_lists_the_stages(pools):
    notes = "\n".join(pools.run(2, planned, "pipeline(2)")[0])
    assert "rank 0    0   1   .   . [0] [0]   . [1] [1]" in notes
    assert "ranks wait 33% of the time" in notes
    sizes = fa.strategies.footprint(models.TiedGPT, "pipeline(4)", 4, optimizer=fa.adamw(0.1))
    assert sizes.stages[1] == "stage 1 on rank 1 of pp: blocks.1, 3,232 parameters, 12.9 kB"
    held = models.TiedGPT()
    largest = sum(
        x.numel() for n, x in held.named_parameters() if n.startswith(("embed", "position", "blocks.0"))
    )
    assert sizes.parameters == 4 * largest
    assert sizes.slots == 8 * largest


def test_a_simulated_rank_shows_its_layers():
    with fa.simulate(ranks=4):
        train_step = program(loss_fn, strategy="pipeline(2) * fsdp(2)", model=models.deep_gpt)
        state = train_step.init()
        assert tuple(state.params["blocks.3.up.weight"].shape) == (64, 16)
        assert "on rank 1 of pp" in str(fa.layout(state))
        assert "none" not in str(fa.layout(state, "blocks.3.up.weight"))
