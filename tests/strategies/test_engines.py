"""Engines on real ranks: every option gives the values of one process, or says why not."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fnaccel as fa
from fnaccel import errors
from fnaccel.testing import assert_close
from tests.strategies import runs
from tests.tiny_models import batch_of, loss_fn, program

ALIKE = [
    ("ddp(bucket_mb=0.0001)", "plain"), ("ddp(static_graph=True)", "plain"), ("ddp(sync_buffers=False)", "plain"),
    ("ddp(gradient_as_bucket_view=False)", "plain"), ("fsdp(forward_prefetch=1, backward_prefetch=2)", "plain"),
    ("ddp(unused_parameters=True)", "unused"), ("ddp", "ema"), ("ddp", "clip_value"), ("ddp", "weight"),
    ("ddp", "remat"), ("ddp", "compiled"), ("ddp", "method"), ("ddp", "tied"), ("ddp", "frozen"),
    ("ddp", "nadam"), ("ddp", "adafactor"), ("ddp", "noise"),
    ("fsdp(units=20)", "plain"), ("fsdp(units=('Linear', 'Block'))", "plain"), ("fsdp(offload=True)", "plain"),
    ("fsdp(ignore=('out.*', 'blocks.1.*'))", "plain"), ("fsdp(init='rank0')", "plain"), ("fsdp", "ema"),
    ("fsdp", "clip_value"), ("fsdp", "weight"), ("fsdp", "remat"), ("fsdp", "compiled"), ("fsdp", "method"),
    ("fsdp(methods=('encode',))", "block_method"), ("fsdp", "unused"), ("fsdp", "tied"), ("fsdp", "frozen"),
    ("fsdp", "nadam"), ("fsdp", "adafactor"), ("fsdp(offload=True)", "adafactor"), ("fsdp", "noise"), ("hsdp(2, 1)", "ema"),
]  # fmt: skip


@functools.cache
def single(pools, kind):
    """The same case on one process, with all ranks' rows as one batch."""
    return pools.run(1, one_process, kind)[0]


def one_process(kind):
    rows, runs.ROWS = runs.ROWS, (sum(runs.ROWS[:2]),)
    try:
        return runs.trained("local", kind)
    finally:
        runs.ROWS = rows


@pytest.mark.parametrize(("strategy", "kind"), ALIKE, ids=lambda value: str(value).replace(" ", ""))
def test_options_change_the_layout_and_not_the_values(pools, strategy, kind):
    expected = single(pools, kind)
    for result in pools.run(2, runs.trained, strategy, kind):
        assert_close(result["losses"], expected["losses"])
        assert_close(result["params"], expected["params"])
        if "ema" in expected:
            assert_close(result["ema"], expected["ema"])


def test_a_hook_of_ones_own_averages_as_the_default_does(pools):
    expected = single(pools, "plain")
    for hook in (runs.averaging, fa.strategies.comm_hook(runs.Averaging.run, runs.Averaging())):
        for result in pools.run(2, runs.trained, fa.ddp(hook=hook), "plain"):
            assert_close(result["params"], expected["params"])
    assert "averaging" in str(fa.ddp(hook=runs.averaging))
    text = "ddp(hook='tests.strategies.runs:averaging')"
    assert str(fa.strategy(text)) == text
    for result in pools.run(2, runs.trained, text, "plain"):
        assert_close(result["params"], expected["params"])
    with pytest.raises(errors.UnknownNameError, match="can't be imported"):
        fa.strategy("ddp(hook='tests.strategies.runs:nothing')")


def test_units_are_gathered_ahead_in_order(pools):
    forward, backward = pools.run(2, runs.prefetched, "fsdp(forward_prefetch=2, backward_prefetch=2)")[0]
    assert forward == [["blocks.0", "blocks.1"], ["blocks.1"], []]
    assert backward == [[], ["blocks.0"], ["blocks.1", "blocks.0"]]
    assert pools.run(2, runs.prefetched, "fsdp")[0] == ([], [])


@pytest.mark.parametrize("options", ["", "forward_prefetch=1", "backward_prefetch=2"])
def test_a_unit_that_is_skipped_after_it_was_gathered_is_not_stale(pools, options):
    """The second micro-batch leaves a block out, which the update changes."""
    expected = pools.run(2, runs.trained, "fsdp(units=None)", "skipped")[0]
    for result in pools.run(2, runs.trained, f"fsdp({options})", "skipped"):
        assert_close(result["losses"], expected["losses"])
        assert_close(result["params"], expected["params"])


def test_the_classes_that_a_model_does_not_split(pools):
    assert pools.run(2, runs.units_of_gpt2)[0] == ["transformer.h.0", "transformer.h.1"]


POWERSGD = [
    fa.strategies.powersgd(batched=batched, wrap=wrap, start_powerSGD_iter=2, matrix_approximation_rank=2)
    for batched in (False, True)
    for wrap in (None, "fp16", "bf16")
]


@pytest.mark.parametrize("hook", ["fp16", "bf16", *POWERSGD], ids=lambda hook: getattr(hook, "name", hook))
def test_communication_hooks_stay_near(pools, hook):
    """PowerSGD compresses from its third update on, and these runs have three."""
    expected = single(pools, "weight")
    first, second = pools.run(2, runs.trained, fa.ddp(hook=hook), "weight")
    assert_close(first["params"], second["params"])
    assert_close(first["losses"], expected["losses"], precision="bf16")


def test_fp16_agrees_over_layouts(pools):
    expected = single(pools, "fp16")
    for strategy in ("ddp", "fsdp"):
        for result in pools.run(2, runs.trained, strategy, "fp16"):
            assert_close(result["losses"], expected["losses"], precision="fp16")


def test_a_module_is_rank_zeros_on_every_rank(pools):
    one, two = pools.run(2, runs.many, [("ddp", "module"), ("fsdp", "module")])
    assert_close(one[0]["params"], two[0]["params"])
    assert_close(one[1]["params"], one[0]["params"])


def test_a_sharded_state_is_sharded_and_never_stale(pools):
    for rank in pools.run(2, runs.fsdp_layout):
        assert (rank["local"], rank["moment"], rank["global"]) == ((3, 6), (3, 6), (6, 6))
        assert torch.equal(rank["looked"], rank["again"])
        assert not torch.equal(rank["looked"], rank["after"])
        assert torch.allclose(rank["after"], rank["expected"], atol=1e-6)
        assert torch.allclose(rank["adopted"], rank["doubled"], atol=1e-5)


def test_a_model_without_values_raises_until_it_has_some(pools):
    for raised, loss in pools.run(2, runs.meta_init):
        assert raised == "CapabilityError"
        assert loss == loss


def test_gan_behaves_as_two_raw_loops(pools):
    expected = raw_gan()
    for strategy in ("local", "ddp", "fsdp"):
        for result in pools.run(1 if strategy == "local" else 2, gan_of, strategy):
            assert result["counts"] == (4, 2)
            assert_close(result["losses"], expected["losses"])
            assert_close(result["disc"], expected["disc"])
            assert_close(result["gen"], expected["gen"])


def gan_of(strategy):
    if strategy != "local":
        return runs.gan(strategy)
    cut = runs.gan_rows
    runs.gan_rows = lambda step: (raw_rows(step), None)
    try:
        return runs.gan("local")
    finally:
        runs.gan_rows = cut


def raw_rows(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(9, 3, generator=generator), torch.randn(9, 2, generator=generator)


def raw_gan():
    torch.manual_seed(1)
    disc = nn.Linear(3, 1)
    torch.manual_seed(2)
    gen = nn.Linear(2, 3)
    disc_rule = torch.optim.SGD(disc.parameters(), lr=0.2)
    gen_rule = torch.optim.AdamW(gen.parameters(), lr=0.05)
    losses = []
    for step in range(4):
        real, noise = raw_rows(step)
        disc_rule.zero_grad()
        d = (F.softplus(-disc(real)).sum() + F.softplus(disc(gen(noise).detach())).sum()) / 9
        d.backward()
        disc_rule.step()
        if step % 2:
            gen_rule.zero_grad()
            g = F.softplus(-disc(gen(noise))).sum() / 9
            g.backward()
            nn.utils.clip_grad_norm_(gen.parameters(), 0.1)
            gen_rule.step()
            losses.append((float(d.detach()), float(g.detach())))
    named = {"disc": disc, "gen": gen}
    return {
        "losses": losses,
        **{k: {n: p.detach() for n, p in m.named_parameters()} for k, m in named.items()},
    }


def test_a_sharded_teacher_is_lent_to_a_replicated_student(pools):
    first, second = pools.run(2, runs.mixed_teacher)
    for same, before, after, _ in (first, second):
        assert same
        assert before != after
    assert_close(first[3], second[3])


@pytest.mark.parametrize(
    ("strategy", "kind", "error", "says"),
    [
        ("fsdp", "block_method", "CapabilityError", "methods="),
        ("ddp", "unused", "CapabilityError", "unused_parameters=True"),
        ("fsdp(units=('Blok',))", "plain", "ArgumentError", "'Block'"),
        ("fsdp(ignore=('outt.*',))", "plain", "ArgumentError", "matches no parameter"),
        ("ddp(3)", "plain", "AxisProductError", "3"),
        ("fsdp(units='no_split')", "plain", "ArgumentError", "_no_split_modules"),
        ("fsdp(backward_prefetch=0)", "plain", "ArgumentError", "always gathers one ahead"),
        ("fsdp(init='rank0')", "module", "ArgumentError", "factory"),
        ("ddp(1, bucket_mb=3) * fsdp(2)", "plain", "CapabilityError", "no meaning"),
        ("ddp(hook='fp16')", "plain", "CapabilityError", "with_weight"),
        ("fsdp", "sharded_adafactor", "CapabilityError", "whole=True"),
    ],
)
def test_what_cannot_be_says_why(pools, strategy, kind, error, says):
    for found in pools.run(2, runs.error_of, strategy, kind):
        assert found is not None
        assert found[0] == error
        assert says in found[1]
        assert found[1].count("\n") == 2


def test_ddp_names_a_parameter_without_a_gradient_before_the_update(pools):
    """The wrapper says so in the next step, after an update with gradients that were not averaged."""
    for error, same, live in pools.run(2, runs.unused_first_step):
        assert "blocks.0.mix.weight" in error
        assert "got no gradient in this step" in error
        assert same
        assert live


def test_ddp_names_a_parameter_that_only_early_micro_batches_use(pools):
    """It has a gradient, of this rank alone, and so have all that share its bucket."""
    for error, same, live in pools.run(2, runs.unused_last_micro_batch):
        assert "some parameters got none in the last micro-batch" in error
        assert same
        assert live


def test_ranks_with_different_plans_raise_instead_of_hanging(pools):
    with pytest.raises(errors.PlanMismatchError, match=r"n=2.*rank 1 has.*n=3"):
        pools.run(2, runs.different_plans)


def test_ranks_with_strategies_of_other_axes_raise_before_they_make_groups(pools):
    with pytest.raises(
        errors.PlanMismatchError, match=r"rank 0 has ddp\(2\) \* fsdp\(2\), rank 1 has fsdp\(\)"
    ):
        pools.run(4, runs.different_meshes)


@pytest.mark.parametrize("kind", ["units", "remat", "rate", "selection"])
def test_ranks_with_different_functions_raise_too(pools, kind):
    with pytest.raises(errors.PlanMismatchError, match="ranks hold different plans"):
        pools.run(2, runs.different_functions, kind)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp(reshard_after_forward=False)"])
def test_a_micro_batch_that_fails_leaves_nothing_behind(pools, strategy):
    expected = pools.run(2, runs.trained, "ddp", "plain", steps=1)[0]["params"]
    for found in pools.run(2, runs.failing_late, strategy):
        assert_close(found, expected)


def test_a_rank_without_elements_clips_nothing(pools):
    first, second = pools.run(2, runs.tiny_clip, "fsdp")
    assert_close(first, second)
    assert_close(first, pools.run(2, runs.tiny_clip, "ddp")[0])


@pytest.mark.parametrize("kind", ["names", "one"])
def test_ranks_with_different_aux_raise_instead_of_adding_them_up(pools, kind):
    with pytest.raises(errors.LossError, match="the losses of ranks differ"):
        pools.run(2, runs.different_aux, kind)


def test_ranks_with_different_seeds_raise(pools):
    with pytest.raises(errors.PlanMismatchError, match=r"different seeds: \[0, 1\]"):
        pools.run(2, runs.different_seeds)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"remainder": "wrap"}, {"remainder": "drop"}, {"dispatch": True}])
def test_evaluate_counts_every_row_once_and_in_order(pools, ranks, options):
    n = 11
    _x, _y = batch_of(n)
    results = pools.run(ranks, runs.scores, "local" if ranks == 1 else "ddp", n, 4, options)
    for found, averaged in results:
        assert found["rows"] == n
        assert found["index"] == list(range(n))
        assert found["mean"] == pytest.approx(found["error"], abs=1e-6)
        assert averaged == pytest.approx(found["error"], abs=1e-9)  # before any step they are equal
        assert found["error"] == pytest.approx(results[0][0]["error"], abs=1e-6)


def test_evaluate_under_fsdp_runs_fillers_on_every_rank(pools):
    for found, _ in pools.run(3, runs.scores, "fsdp", 5, 4, {}):
        assert found["rows"] == 5
        assert found["index"] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"dispatch": True}])
def test_two_ragged_epochs_are_the_same_on_any_ranks(pools, options):
    accumulate = 1 if "window" in options else 2
    expected = pools.run(1, runs.epoch_losses, "local", 13, 6, accumulate, options)[0]
    for ranks, strategy in ((2, "ddp"), (3, "fsdp"), (2, "fsdp(reshard_after_forward=False)")):
        for result in pools.run(ranks, runs.epoch_losses, strategy, 13, 6, accumulate, options):
            assert result["positions"] == expected["positions"]
            assert_close(result["losses"], expected["losses"])
            assert_close(result["params"], expected["params"])


def test_a_weight_tied_across_units_raises_before_the_first_step():
    class Shared(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(2))
            self.blocks[1].weight = self.blocks[0].weight

        def forward(self, x):
            return self.blocks[1](self.blocks[0](x)).sum(1, keepdim=True)

    with fa.start(device="cpu"):
        train_step = program(strategy="fsdp", model=Shared)
        with pytest.raises(
            errors.CapabilityError, match=r"blocks.0.weight and blocks.1.weight are one parameter"
        ):
            train_step.init(seed=0)


def test_a_weight_of_a_unit_that_is_tied_outside_of_it_raises_by_name():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.embed(x))

    with fa.start(device="cpu"):
        train_step = program(strategy="fsdp(units=('Linear',))", model=Tied)
        with pytest.raises(
            errors.CapabilityError, match=r"head.weight and embed.weight are one parameter, in a unit"
        ):
            train_step.init(seed=0)


def of_two_dtypes(block):
    """A model whose head is fp64, and with `block` one of its blocks, too, which is a unit of its own."""

    class Mixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(2))
            self.head = torch.nn.Linear(3, 1).double()
            if block:
                self.blocks[1].bias.data = self.blocks[1].bias.data.double()

        def forward(self, x):
            for inner in self.blocks:
                x = inner(x)
            return self.head(x.double()).float()

    return Mixed


def test_two_dtypes_in_a_unit_raise_before_the_first_step():
    with fa.start(device="cpu"):
        with pytest.raises(
            errors.CapabilityError, match=r"in blocks.1 weight is float32 and bias is float64"
        ):
            program(strategy="fsdp", model=of_two_dtypes(block=True)).init(seed=0)
        train_step = program(strategy="fsdp", model=of_two_dtypes(block=False))
        state, _ = train_step(train_step.init(seed=0), (torch.ones(2, 3), torch.ones(2, 1)))
        assert state.step == 1
        step = fa.with_precision(loss_fn, "fp32")
        assert program(step, strategy="fsdp", model=of_two_dtypes(block=True)).init(seed=0).step == 0


@pytest.mark.parametrize("key", ["a/b", 1])
def test_a_model_has_a_name_that_paths_can_hold(key):
    with pytest.raises(errors.ArgumentError, match="a model can't be called"):
        fa.distribute({key: lambda: torch.nn.Linear(1, 1)}, "local")
