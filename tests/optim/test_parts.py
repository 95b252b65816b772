"""Optimizers from parts: the rules by hand, by optax's numbers, in place and as a function, and on every strategy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import fnaccel as fa
from fnaccel import errors
from fnaccel.optim import chain_kernel, fused, kernels
from fnaccel.optim.fused import BoundFused
from fnaccel.optim.operations import FAST, PURE
from fnaccel.testing import assert_close, count_collectives
from tests.optim import chains
from tests.optim.chains import CHAINS, LAMB, SETS, SHAPES, Hand, parts, run, unfused
from tests.parity import traps
from tests.tiny_models import Net, batch_of, loss_fn, program, whole, whole_params

RECORD = json.loads((Path(__file__).parent / "optax_record.json").read_text())


def far(some, others):
    return max(float((a - b).abs().max()) for a, b in zip(some, others, strict=True))


# -- rules -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ops", SETS)
@pytest.mark.parametrize("name", CHAINS)
def test_equals_the_loop_by_hand(name, ops):
    chain, by_hand = CHAINS[name]
    hand = Hand(chains.first_params())
    for step in range(7):
        by_hand(hand, chains.grads_of(step), step + 1, 0.01 * (step + 1))
    params, _ = run(chain, lambda step: 0.01 * (step + 1), SETS[ops], updates=7)
    assert far(params, hand.params) < 1e-12


@pytest.mark.parametrize("ops", SETS)
@pytest.mark.parametrize(
    ("name", "chain", "rate"),
    [
        ("lamb", LAMB, lambda step: 1e-3 * step),
        ("adamw", (parts.scale_by_adam(), parts.add_decayed_weights(0.01)), 1e-2),
        ("sgd", (parts.trace(0.9, nesterov=True),), 1e-2),
    ],
    ids=["lamb", "adamw", "sgd"],
)
def test_equals_the_recorded_numbers_of_optax(name, chain, rate, ops):
    params, _ = run(chain, rate, SETS[ops])
    for leaf, value in zip(SHAPES, params, strict=True):
        wanted = torch.tensor(RECORD[name][leaf], dtype=torch.float64)
        assert far([value.ravel()], [wanted]) < 1e-12


EACH = [
    parts.add_decayed_weights(0.1), parts.scale_by_adam(), parts.scale_by_rms(), parts.trace(0.9),
    parts.trace(0.9, nesterov=True), parts.scale_by_lion(), parts.trust_ratio(eps=1e-3), parts.clip_norm(0.5),
    parts.adaptive_clip(0.01), parts.centralize(), parts.lookahead(every=2),
    parts.masked(parts.scale_by_adam(), "*weight"), parts.masked(parts.masked(parts.trace(0.9), "*weight"), "a*"),
]  # fmt: skip


@pytest.mark.parametrize("missing", [(), (0, 3)], ids=["all", "some"])
@pytest.mark.parametrize("part", EACH, ids=str)
def test_a_part_in_place_is_the_part_as_a_function(part, missing):
    """Also if some parameters have no gradient in one update. A list that is read after it was written to shows."""
    chain = (part, parts.trace(0.5), parts.scale_by_rms())  # which keep and change what the part returned
    fast, fast_slots = run(chain, 0.1, FAST, missing=missing)
    pure, pure_slots = run(chain, 0.1, PURE, missing=missing)
    assert far(fast, pure) < 1e-14
    for some, others in zip(fast_slots, pure_slots, strict=True):
        assert some.keys() == others.keys()
        assert all(far(some[name], others[name]) < 1e-14 for name in some)


@pytest.mark.parametrize("part", EACH, ids=str)
def test_a_part_as_a_function_writes_to_nothing(part):
    params = chains.first_params()
    every = [chains.placed(part, chains.leaves_of(params))]
    chosen = [params[i] for i in every[0].places or range(len(params))]
    slots = [every[0].part.init(chosen)]
    grads = chains.grads_of(0)
    tensors = [*params, *grads, *(value for values in slots[0].values() for value in values)]
    before = [tensor.clone() for tensor in tensors]
    chains.run_parts(
        PURE, every, grads, slots, params, chains.UpdateInfo(torch.tensor(2.0), torch.tensor(0.1))
    )
    assert all(torch.equal(now, then) for now, then in zip(tensors, before, strict=True))


@pytest.mark.parametrize("name", CHAINS)
def test_rates_by_vmap_and_by_finite_differences(name):
    chain, _ = CHAINS[name]

    def final(rate):
        return torch.cat([p.ravel() for p in run(chain, rate, updates=4)[0]])

    rates = torch.tensor([0.01, 0.02], dtype=torch.float64)
    each = torch.vmap(final)(rates)
    assert far(each, [final(rate) for rate in rates]) < 1e-15
    slope = torch.func.grad(lambda rate: final(rate).square().sum())(rates[0])
    step = 1e-6
    raised, lowered = (final(rates[0] + sign * step).square().sum() for sign in (1, -1))
    assert float(slope) == pytest.approx(float((raised - lowered) / (2 * step)), rel=1e-6)


# -- beside the fused kernels ------------------------------------------------------------------------------

FUSED = {
    "sgd": fa.sgd(0.05), "momentum": fa.sgd(0.05, momentum=0.9, weight_decay=0.1),
    "nesterov": fa.sgd(0.05, momentum=0.9, nesterov=True), "adam": fa.adam(0.05, betas=(0.8, 0.9), weight_decay=0.1),
    "adamw": fa.adamw(0.05, eps=1e-6),
}  # fmt: skip


def trained(
    optimizer, step=loss_fn, steps=4, strategy="local", dtype=torch.float64, state=None, rows=5, **options
):
    """The state and the metrics after some updates in fp64. Each rank has rows of its own."""

    def make():
        return Net().to(dtype)

    train_step = program(step, strategy=strategy, optimizer=optimizer, model=make, **options)
    state = train_step.init(seed=0) if state is None else fa.restore(state, like=train_step.init(seed=3))
    for number in range(steps):
        batch = batch_of(12, int(state.step))
        share = 12 // train_step.mesh.batch_size
        place = slice(share * train_step.mesh.batch_rank, share * (train_step.mesh.batch_rank + 1))
        state, metrics = train_step(state, tuple(part[place].to(dtype) for part in batch))
    return state, metrics if steps else {}


@pytest.fixture
def world():
    with fa.start() as started:
        yield started


@pytest.mark.parametrize("name", FUSED)
def test_the_rule_is_the_fused_kernel(name, world):
    optimizer = FUSED[name]
    chain = parts.chain(*optimizer.parts, lr=optimizer.lr)
    wanted, _ = trained(optimizer)
    with unfused():
        by_rule, _ = trained(chain)
    assert far(whole_params(by_rule).values(), whole_params(wanted).values()) < 1e-15
    assert by_rule.opt["out.bias"].keys() == wanted.opt["out.bias"].keys()
    by_kernel, _ = trained(chain)
    assert far(whole_params(by_kernel).values(), whole_params(wanted).values()) == 0.0


@pytest.mark.parametrize("name", FUSED)
def test_a_chain_with_the_records_of_a_fused_kernel_is_bound_to_it(name):
    chain = parts.chain(*FUSED[name].parts, lr=0.1)
    assert isinstance(chain.kernel.bind([]), BoundFused)
    assert chain.parts == FUSED[name].parts


def test_a_mask_of_the_decay_is_a_group_of_the_fused_kernel(world):
    chain = parts.chain(parts.scale_by_adam(), parts.add_decayed_weights(0.3, mask="*weight"), lr=0.05)
    wanted, _ = trained(fa.adamw(0.05, weight_decay=0.0, groups={"*weight": {"weight_decay": 0.3}}))
    found, _ = trained(chain)
    assert far(whole_params(found).values(), whole_params(wanted).values()) == 0.0
    with unfused():
        by_rule, _ = trained(parts.chain(*chain.parts, lr=0.05))
    assert far(whole_params(by_rule).values(), whole_params(wanted).values()) < 1e-15


@pytest.mark.parametrize(
    "chain",
    [
        (parts.trace(0.9), parts.add_decayed_weights(0.1)),
        (parts.scale_by_adam(), parts.trace(0.9)),
        (parts.add_decayed_weights(0.1), parts.add_decayed_weights(0.1)),
        (parts.scale_by_adam(), parts.trust_ratio()),
        (parts.masked(parts.scale_by_adam(), "*weight"),),
    ],
    ids=str,
)
def test_other_records_are_no_fused_kernel(chain):
    assert fused.fused_of(chain) is None


def test_a_chain_prints_itself_and_a_fused_optimizer_its_parts(world):
    lamb = parts.chain(*LAMB, lr=0.1)
    assert (
        "clip_norm(max_norm=0.5), masked(part=add_decayed_weights(decay=0.01), mask='*weight')"
        in lamb.describe()
    )
    assert str(program(optimizer=lamb).plan).count("trust_ratio(coefficient=1.0, eps=0.0), lr=0.1") == 1
    assert repr(fa.adam(0.1, weight_decay=0.2).parts) == (
        "(add_decayed_weights(decay=0.2), scale_by_adam(betas=(0.9, 0.999), eps=1e-08))"
    )
    assert fa.optim.from_torch(torch.optim.RMSprop).parts is None
    assert lamb == parts.chain(*LAMB, lr=0.1)


def test_torch_s_rmsprop_and_its_slots(world):
    wanted, _ = trained(fa.optim.from_torch(torch.optim.RMSprop, lr=0.01, momentum=0.9))
    found, _ = trained(parts.chain(parts.scale_by_rms(), parts.trace(0.9), lr=0.01))
    assert far(whole_params(found).values(), whole_params(wanted).values()) < 1e-14
    assert found.opt["out.bias"].keys() == wanted.opt["out.bias"].keys() - {"step"}


# -- in a step ---------------------------------------------------------------------------------------------


def captured(step):
    return fa.compile(step, scope="step", backend="aot_eager")


STEPS = {
    "accumulated": lambda step: fa.accumulate(step, 3),
    "skipping": fa.skip_nonfinite,
    "captured": captured,
    "captured, skipping, accumulated": lambda step: captured(fa.skip_nonfinite(fa.accumulate(step, 3))),
    "averaged": lambda step: fa.with_ema(step, 0.9),
}
BOTH = (*LAMB, parts.lookahead(every=2))


@pytest.mark.long_except(r"^(?!captured)")
@pytest.mark.parametrize("name", STEPS)
def test_equals_the_plain_step(name, world):
    optimizer = parts.chain(*BOTH, lr=fa.warmup_cosine(0.1, warmup=2, total=9))
    wanted, _ = trained(optimizer)
    found, metrics = trained(optimizer, STEPS[name](loss_fn))
    assert far(whole_params(found).values(), whole_params(wanted).values()) < 1e-6
    assert float(metrics["lr"]) == pytest.approx(optimizer.lr(3))
    if name == "averaged":
        assert not fa.tree.allclose(found.ema, whole_params(found))


@pytest.mark.long
def test_equals_the_plain_step_by_inductor(world):
    optimizer = parts.chain(*BOTH, lr=0.05)
    wanted, _ = trained(optimizer, dtype=torch.float32)
    found, _ = trained(optimizer, fa.compile(fa.skip_nonfinite(loss_fn), scope="step"), dtype=torch.float32)
    assert_close(whole_params(found), whole_params(wanted))


@pytest.mark.parametrize("kind", ["bf16", "fp16", "stored"])
def test_low_precision(kind, world):
    """Autocast in bf16 and fp16, and parameters that are stored in bf16: slots are too, sums are in fp32."""
    optimizer = parts.chain(*BOTH, lr=0.02)
    wanted, _ = trained(optimizer, dtype=torch.float32)
    step = loss_fn if kind == "stored" else fa.with_precision(loss_fn, kind)
    dtype = torch.bfloat16 if kind == "stored" else torch.float32
    found, _ = trained(optimizer, step, dtype=dtype)
    for name, value in whole_params(found).items():
        assert value.dtype == dtype
        torch.testing.assert_close(value.float(), whole_params(wanted)[name], atol=0.03, rtol=0.03)
    assert found.opt["out.weight"]["exp_avg_sq"].dtype == dtype


@pytest.mark.parametrize("how", ["eager", "captured"])
def test_a_skipped_update_moves_no_slot(how, world):
    """Eight batches with a NaN in the fourth are the seven others."""
    optimizer = parts.chain(*BOTH, parts.trace(0.5), lr=0.05)
    step = fa.skip_nonfinite(loss_fn)
    train_step = program(captured(step) if how == "captured" else step, optimizer=optimizer)
    states = []
    for poison in (True, False):
        state = train_step.init(seed=0)
        for number in range(8):
            x, y = batch_of(5, number)
            if number == 3:
                if not poison:
                    continue
                before = fa.snapshot(state)
                y = y / 0.0
            state, metrics = train_step(state, (x, y))
            if number == 3:
                assert float(metrics["skipped"]) == 1
                for tree in ("params", "opt"):
                    now = getattr(fa.snapshot(state), tree)
                    assert fa.tree.allclose(now, getattr(before, tree), rtol=0, atol=0)
        states.append(fa.snapshot(state))
    for tree in ("params", "opt"):
        assert fa.tree.allclose(getattr(states[0], tree), getattr(states[1], tree), rtol=0, atol=0)


class OnDevice(torch.Tensor):
    """A number that the host can't read for nothing."""

    device = torch.device("meta")

    def to(self, device, **_):
        return self.as_subclass(torch.Tensor)


def test_a_skip_that_only_the_device_knows(world):
    """On accelerators the host does not wait: both outcomes are computed, and one is chosen."""
    for chain in (BOTH, (parts.scale_by_lion(),)):
        params = [nn.Parameter(leaf) for leaf in chains.first_params()]
        leaves = chains.leaves_of([param.detach() for param in params])
        group = fa.extend.Group(tuple(map(fa.extend.Member, range(4), leaves)), {}, None, 0.1)
        for skip in (0.0, 1.0):
            bound = chain_kernel.BoundChain(chain, [group])
            before = [leaf.shard.clone() for leaf in leaves]
            slots = {k: v.clone() for k, v in fa.tree.items(bound.slots) if v is not None}

            decided = torch.tensor(skip).as_subclass(OnDevice)
            bound.apply(chains.grads_of(0), [0.1], 1.0, decided, torch.tensor(2.0))
            moved = [far([leaf.shard], [old]) for leaf, old in zip(leaves, before, strict=True)]
            assert (max(moved) == 0) == bool(skip)
            same = [torch.equal(v, slots[k]) for k, v in fa.tree.items(bound.slots)]
            assert all(same) == bool(skip)


def test_members_of_groups_and_late_starts(world):
    """A norm is one of the member's parameters, and updates count from a member's own start."""
    lamb = parts.chain(*LAMB[:1], *LAMB[2:], lr=0.05)
    groups = fa.optim.optimizer_groups(
        [("out*", fa.optim.starting_at(2, lamb)), ("*", parts.chain(*BOTH, lr=0.02))]
    )
    state, _ = trained(groups, steps=2)
    before = whole_params(state)
    first = program(optimizer=fa.sgd(0.0), model=lambda: Net().double()).init(seed=0)
    assert torch.equal(before["out.weight"], whole_params(first)["out.weight"])
    assert not torch.equal(before["inp.weight"], whole_params(first)["inp.weight"])
    state, metrics = trained(groups, steps=3)
    assert metrics["lr/optim.chain.0"] == 0.05
    assert float(state.opt["out.weight"]["exp_avg"].abs().sum()) > 0
    moved = whole_params(state)["out.weight"] - before["out.weight"]
    assert float(moved.norm()) == pytest.approx(0.05 * float(before["out.weight"].norm()))


def test_slots_of_a_second_part_have_names_of_their_own(world):
    chain = parts.chain(
        parts.trace(0.9), parts.scale_by_adam(), parts.masked(parts.trace(0.5), "out*"), lr=0.1
    )
    state, _ = trained(chain)
    assert set(state.opt["out.bias"]) == {"momentum_buffer", "exp_avg", "exp_avg_sq", "momentum_buffer.1"}
    assert set(state.opt["inp.bias"]) == {"momentum_buffer", "exp_avg", "exp_avg_sq"}


def test_lookahead_begins_at_weights_that_were_adopted(world, tmp_path):
    torch.manual_seed(5)
    torch.save(Net().state_dict(), tmp_path / "net.pt")
    train_step = program(optimizer=parts.chain(parts.lookahead(every=1, step_size=0.0), lr=0.5))
    state = fa.interchange.adopt(tmp_path / "net.pt", like=train_step.init(seed=0))
    before = whole_params(state)
    state, _ = train_step(state, batch_of(5))
    assert_close(whole_params(state), before)


def test_complex_parameters(world):
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2, 3, dtype=torch.complex64))

        def forward(self, x):
            return (x.to(torch.complex64) @ self.w.T).abs().sum(1, keepdim=True)

    wanted = program(optimizer=fa.adamw(0.1), model=Complex)
    with unfused():
        found = program(optimizer=parts.chain(*fa.adamw(0.1).parts, lr=0.1), model=Complex)
        ends = []
        for train_step in (wanted, found):
            state = train_step.init(seed=0)
            for number in range(3):
                state, _ = train_step(state, batch_of(4, number))
            ends.append(state.params["w"].clone())
    torch.testing.assert_close(*ends)
    with pytest.raises(
        errors.CapabilityError,
        match="centralize goes by rows or matrices of real numbers, and 'w' is complex",
    ):
        program(optimizer=parts.chain(parts.centralize(), lr=0.1), model=Complex).init()


# -- on ranks ----------------------------------------------------------------------------------------------

WHOLE = (parts.clip_norm(0.5), parts.adaptive_clip(0.05), parts.scale_by_adam(eps=1e-6), parts.trust_ratio(),
         parts.masked(parts.trust_ratio(coefficient=0.5), "*weight"), parts.centralize(), parts.lookahead(every=2))  # fmt: skip


def on_ranks(strategy, how, chain, saved=None, restored=None, steps=4):
    step = STEPS[how](loss_fn) if how else loss_fn
    optimizer = parts.chain(*chain, lr=fa.schedules.linear(0.1, 0.01, total=9))
    state, _ = trained(optimizer, step, steps, strategy, state=restored)
    if saved:
        fa.save(saved, state)
    return whole_params(state), {name: fa.tree.map(whole, dict(slots)) for name, slots in state.opt.items()}


ROWS = [
    ("ddp(2)", 2, None), ("fsdp(2)", 2, None), ("fsdp(2)", 2, "accumulated"), ("fsdp(2)", 2, "skipping"),
    pytest.param("fsdp(2)", 2, "captured, skipping, accumulated", marks=pytest.mark.long), ("fsdp(4)", 4, None), ("hsdp(2, 2)", 4, None), ("tensor(2)", 2, None),
    ("fsdp(2) * tensor(2)", 4, "skipping"),
]  # fmt: skip


def strategy_of(text):
    return text.replace("tensor(2)", "tensor(2, {'inp': 'colwise', 'blocks.0.mix': 'rowwise'})")


@pytest.mark.parametrize(("strategy", "ranks", "how"), ROWS)
def test_equals_one_process(pools, strategy, ranks, how):
    wanted, slots = pools.run(1, on_ranks, "local", None, WHOLE)[0]
    for params, found in pools.run(ranks, on_ranks, strategy_of(strategy), how, WHOLE):
        for name, value in wanted.items():
            assert far([params[name]], [value]) < (1e-6 if how and "captured" in how else 1e-9), name
            assert all(far([found[name][slot]], [slots[name][slot]]) < 1e-6 for slot in slots[name])


def on_odd_parameters(make, strategy, compiled=False):
    backend = compiled if isinstance(compiled, str) else "aot_eager"
    step = fa.compile(traps.squares, scope="step", backend=backend) if compiled else traps.squares
    optimizer = parts.chain(*WHOLE, lr=0.05)
    train_step = program(step, strategy=strategy, optimizer=optimizer, model=lambda: make().double())
    state = train_step.init(seed=0)
    for number in range(4):
        share = 12 // train_step.mesh.batch_size
        place = slice(share * train_step.mesh.batch_rank, share * (train_step.mesh.batch_rank + 1))
        state, _ = train_step(state, tuple(part[place].double() for part in batch_of(12, number)))
    return whole_params(state)


@pytest.mark.long_except(r"False|Scalars")
@pytest.mark.parametrize("make", [traps.Scalars, traps.Experts])
@pytest.mark.parametrize(
    ("strategy", "ranks", "compiled"), [("local", 1, True), ("ddp", 2, False), ("fsdp", 2, False)]
)
def test_parameters_of_odd_shapes(pools, make, strategy, ranks, compiled):
    """Without dimensions, without elements, and cut along another dimension than the first."""
    wanted = pools.run(1, on_odd_parameters, make, "local")[0]
    for params in pools.run(ranks, on_odd_parameters, make, strategy, compiled):
        assert all(torch.allclose(params[name], value, atol=1e-6) for name, value in wanted.items())


@pytest.mark.long
@pytest.mark.parametrize(
    "make", [traps.Scalars, Net]
)  # of Experts inductor can't compile this chain: KeyError
def test_parameters_of_odd_shapes_by_inductor(pools, make):
    wanted, found = (pools.run(1, on_odd_parameters, make, "local", how)[0] for how in (False, "inductor"))
    assert all(torch.allclose(found[name], value, atol=1e-6) for name, value in wanted.items())


class Dense(traps.Gaps):
    """The same parameter in memory of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(self.weight.detach().clone())


def test_a_parameter_with_gaps(pools):
    wanted, found = (pools.run(1, on_odd_parameters, make, "local")[0] for make in (Dense, traps.Gaps))
    assert all(torch.allclose(found[name], value) for name, value in wanted.items())


def counted(chain):
    train_step = program(strategy="fsdp(2)", optimizer=parts.chain(*chain, lr=0.1))
    state = train_step.init(seed=0)
    state, _ = train_step(state, batch_of(4, 0))
    with count_collectives() as calls:
        train_step(state, batch_of(4, 1))
    return sum(count for name, count in calls.counts.items() if "all_reduce" in name)


def test_norms_of_all_parameters_take_one_all_reduce(pools):
    none, lamb = (pools.run(2, counted, chain)[0] for chain in ((parts.scale_by_lion(),), LAMB))
    assert lamb == none + 2  # of clip_norm, and of trust_ratio


MOVES = [("local", 1, "fsdp(2)", 2), ("fsdp(2)", 2, "fsdp(3)", 3), ("hsdp(2, 2)", 4, "local", 1)]


@pytest.mark.parametrize(("one", "ranks", "other", "others"), MOVES)
def test_checkpoints_go_to_other_strategies(pools, tmp_path, one, ranks, other, others):
    params, slots = pools.run(ranks, on_ranks, one, None, WHOLE, tmp_path)[0]
    for found, found_slots in pools.run(others, on_ranks, other, None, WHOLE, None, tmp_path, 0):
        assert fa.tree.allclose(found, params, rtol=0, atol=0)
        assert fa.tree.allclose(found_slots, slots, rtol=0, atol=0)


def test_a_chain_and_its_fused_optimizer_restore_each_other(world, tmp_path):
    optimizer = fa.adamw(0.05)
    whole_run, _ = trained(optimizer, steps=4)
    chain = parts.chain(*optimizer.parts, lr=0.05)
    for number, (first, then) in enumerate([(optimizer, chain), (chain, optimizer)]):
        with unfused():
            state, _ = trained(first, steps=2)
            fa.save(tmp_path / str(number), state)
            state, _ = trained(then, steps=2, state=tmp_path / str(number))
        assert far(whole_params(state).values(), whole_params(whole_run).values()) < 1e-14


# -- mistakes ----------------------------------------------------------------------------------------------


def test_members_of_the_other_chain_are_refused_by_name():
    with pytest.raises(
        errors.ArgumentError, match=r"trust_ratio.* is a part of an optimizer[\s\S]*fa\.optim\.chain"
    ):
        fa.chain(parts.trust_ratio())
    for member in (fa.clip_norm(1.0), fa.clip_norm):
        with pytest.raises(
            errors.ArgumentError, match=r"fa.clip_norm is a transform of a step[\s\S]*fa\.optim\.clip_norm"
        ):
            parts.chain(member, lr=0.1)
    with pytest.raises(errors.ArgumentError, match=r"fa.chain is a transform"):
        parts.chain(fa.chain(fa.clip_norm(1.0)), lr=0.1)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: parts.chain(parts.trust_ratio, lr=0.1), r"call it: trust_ratio\(\.\.\.\)"),
        (lambda: parts.chain(fa.adamw(0.1), lr=0.1), "Optimizer is no part"),
        (lambda: parts.masked(fa.adamw(0.1), "*"), "Optimizer is no part"),
        (lambda: parts.masked(parts.trust_ratio(), 3), "3 selects no parameters"),
        (lambda: parts.clip_norm(0), "can't be clipped to 0"),
        (lambda: parts.trace(1.0), "decay=1.0 is not below 1"),
        (lambda: parts.add_decayed_weights(-1), "decay=-1 is no number from 0 on"),
        (lambda: parts.scale_by_lion(betas=(0.9, 1.0)), "not two numbers"),
        (lambda: parts.lookahead(every=0), "no number of updates"),
        (lambda: parts.adaptive_clip(0.0), "stops all rows"),
    ],
)
def test_mistakes_are_named(make, text):
    with pytest.raises(errors.ArgumentError, match=text):
        make()


class Odd(fa.extend.Part):
    """A part whose first slots are given."""

    def __init__(self, slots, traceable=True):
        self.slots = slots
        self.traceable = traceable

    def init(self, params):
        return self.slots if self.slots is not None else {"seen": [torch.zeros_like(p) for p in params]}

    def update(self, ops, grads, slots, params, info):
        if not self.traceable:
            float(grads[0].sum())  # a read on the host, which a graph would not take
        return grads, {"seen": ops.add_(slots["seen"], 1.0)}


@pytest.mark.parametrize("slots", [[], {"seen": []}, {"seen": [torch.ones(3)]}, {"seen": [1.0] * 8}])
def test_first_slots_that_are_no_lists_of_tensors(slots, world):
    with pytest.raises(errors.ArgumentError, match=r"odd made .*[\s\S]*Odd\.init\(params\)"):
        program(optimizer=parts.chain(Odd(slots), lr=0.1)).init()


def test_a_part_that_is_not_captured(world):
    optimizer = parts.chain(Odd(None, traceable=False), lr=0.1)
    assert not optimizer.traceable
    wanted, _ = trained(fa.sgd(0.1))
    found, _ = trained(optimizer, captured(loss_fn))
    assert far(whole_params(found).values(), whole_params(wanted).values()) < 1e-6
    assert float(found.opt["out.bias"]["seen"]) == 4


def test_a_graph_says_when_parameters_begin_to_change(world):
    """So a state lives through any failure before that, and is dead after one later."""
    train_step = program(captured(loss_fn), optimizer=parts.chain(parts.trust_ratio(), lr=0.1))
    state = train_step.init()
    before = kernels.begun()
    for number in range(2):
        state, _ = train_step(state, batch_of(4, number))
    assert kernels.begun() == before + 2


@pytest.mark.parametrize("part", [parts.trust_ratio(), parts.add_decayed_weights(0.1)], ids=["rule", "fused"])
def test_a_mask_without_a_match_raises_at_init(part, world):
    chain = parts.chain(parts.masked(part, "*wieght"), lr=0.1)
    with pytest.raises(errors.ArgumentError, match=r"'\*wieght' matches no trainable parameter[\s\S]*weight"):
        program(optimizer=chain).init()
