"""Several optimizers for one model, groups by predicates, parameters that start to train later."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fnaccel as fa
from fnaccel import errors
from fnaccel.testing import assert_close
from tests.optim.test_optimizers import Anchored
from tests.tiny_models import Net, batch_of, loss_fn, program, whole_params

RATE = fa.schedules.linear(0.05, end=0.0, total=10)


def is_matrix(name, parameter):
    return parameter.ndim == 2


def muon_and_adamw():
    return fa.optim.optimizer_groups(
        [(is_matrix, fa.optim.from_torch(torch.optim.Muon, lr=RATE)), ("*", fa.adamw(0.01, weight_decay=0.1))]
    )


@pytest.fixture
def world():
    with fa.start() as started:
        yield started


def own_rows(batch):
    return tuple(fa.split_between_processes(part) for part in batch)


def train(optimizer, strategy="local", step=loss_fn, steps=4, directory=None):
    """Parameters and metrics after some steps. With a directory: saved there in the middle, and restored."""
    train_step = program(step, strategy=strategy, optimizer=optimizer)
    state = train_step.init(seed=0)
    for number in range(steps):
        state, metrics = train_step(state, own_rows(batch_of(12, number)))
        if directory is not None and number == 1:
            fa.save(directory, state)
            train_step.close()
            train_step = program(step, strategy=strategy, optimizer=optimizer)
            state = fa.restore(directory, like=train_step.init(seed=1))
    return whole_params(state), {name: float(value) for name, value in metrics.items()}


def raw(steps=4):
    """The same by hand, with two optimizers of torch."""
    torch.manual_seed(0)
    net = Net()
    matrices = torch.optim.Muon([p for p in net.parameters() if p.ndim == 2], lr=0.05)
    others = torch.optim.AdamW([p for p in net.parameters() if p.ndim != 2], lr=0.01, weight_decay=0.1)
    for number in range(steps):
        matrices.param_groups[0]["lr"] = RATE(number)
        net.zero_grad()
        loss = loss_fn(net, batch_of(12, number))
        (loss.total / loss.weight).backward()
        matrices.step()
        others.step()
    return {name: value.detach() for name, value in net.named_parameters()}


def test_muon_for_matrices_and_adamw_for_the_rest_equal_torch(world):
    params, metrics = train(muon_and_adamw())
    assert_close(params, raw())
    assert metrics["lr/Muon"] == pytest.approx(RATE(3))
    assert metrics["lr/adamw"] == 0.01
    assert "lr" not in metrics


@pytest.mark.parametrize("ranks", [2, 3])
def test_muon_works_on_whole_matrices_under_fsdp(pools, ranks, tmp_path):
    """A shard orthogonalised by itself would be off by far more than bf16's rounding in Newton-Schulz."""
    expected = pools.run(1, train, muon_and_adamw())[0][0]
    for params, _ in pools.run(ranks, train, muon_and_adamw(), "fsdp", loss_fn, 4, tmp_path):
        for name, value in params.items():
            torch.testing.assert_close(value, expected[name], atol=2e-3, rtol=0)


@pytest.mark.long_except("ddp")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_of_the_librarys_own_are_captured_and_restored(pools, strategy, tmp_path):
    optimizer = fa.optim.optimizer_groups(
        [("out*", fa.sgd(RATE, momentum=0.9)), ("*", fa.adamw(0.01, groups=[(is_matrix, {"lr": RATE})]))]
    )
    expected = pools.run(1, train, optimizer)[0][0]
    step = fa.clip_norm(loss_fn, 1.0)
    clipped = pools.run(1, train, optimizer, "local", step)[0][0]
    captured = fa.compile(step, scope="step", backend="eager")
    for params, _ in pools.run(2, train, optimizer, strategy, loss_fn, 4, tmp_path):
        assert_close(params, expected)
    for params, _ in pools.run(2, train, optimizer, strategy, captured):
        assert_close(params, clipped)


def test_optimizers_of_one_class_are_numbered(world):
    _, metrics = train(fa.optim.optimizer_groups([("out*", fa.sgd(0.1)), ("*", fa.sgd(0.2))]))
    assert (metrics["lr/sgd.0"], metrics["lr/sgd.1"]) == (0.1, 0.2)


@pytest.mark.parametrize("strategy", ["local", "fsdp"])
def test_rates_of_groups_are_metrics(pools, strategy):
    groups = [("out*", {"lr": 0.3}), (is_matrix, {"lr": RATE}), ("*", {"weight_decay": 0.5})]
    for _, metrics in pools.run(
        1 if strategy == "local" else 2, train, fa.adamw(0.01, groups=groups), strategy
    ):
        rates = {name: value for name, value in metrics.items() if name.startswith("lr")}
        assert rates == {"lr": 0.01, "lr/out*": 0.3, "lr/is_matrix": pytest.approx(RATE(3))}


def test_several_models(world):
    def of_both(models, batch):
        first, second = loss_fn(models["a"], batch), loss_fn(models["b"], batch)
        return fa.Mean(first.total + second.total, weight=first.weight)

    named = {"a": muon_and_adamw(), "b": fa.sgd(0.1)}
    train_step = fa.train_step(of_both, model=fa.distribute({"a": Net, "b": Net}, "local"), optimizer=named)
    _, metrics = train_step(train_step.init(seed=0), batch_of(4))
    assert {name for name in metrics if name.startswith("lr")} == {"lr/a/Muon", "lr/a/adamw", "lr/b"}


def test_the_plan_shows_each(world):
    text = str(program(optimizer=muon_and_adamw()).plan)
    assert "Muon + adamw" in text
    assert "is_matrix: Muon(" in text


def test_groups_take_predicates(world):
    by_pattern, _ = train(fa.adamw(0.01, groups={"*.bias": {"weight_decay": 0.0}}, weight_decay=0.5))
    by_predicate, _ = train(
        fa.adamw(0.01, groups=[(lambda _, p: p.ndim < 2, {"weight_decay": 0.0})], weight_decay=0.5)
    )
    assert_close(by_predicate, by_pattern)


MISTAKES = {
    "matches nothing": (lambda: fa.sgd(0.1, groups={"nothing*": {"lr": 1.0}}), "'nothing\\*' matches no trainable"),
    "a predicate too": (
        lambda: fa.optim.optimizer_groups([(lambda n, p: p.ndim == 7, fa.sgd(0.1)), ("*", fa.sgd(0.1))]),
        "matches no trainable parameter",
    ),
    "shadowed": (
        lambda: fa.optim.optimizer_groups([("*", fa.sgd(0.1)), ("out*", fa.sgd(0.1))]),
        "'out\\*' matches only parameters that an earlier one takes",
    ),
    "left over": (
        lambda: fa.optim.optimizer_groups([("out*", fa.sgd(0.1))]),
        "no optimizer was given for 'inp.weight' and 5 more",
    ),
    "no bool": (
        lambda: fa.optim.optimizer_groups([(lambda n, p: p.mean(), fa.sgd(0.1)), ("*", fa.sgd(0.1))]),
        "for 'inp.weight'",
    ),
    "one argument": (
        lambda: fa.sgd(0.1, groups=[(lambda p: p.ndim == 2, {"lr": 1.0})]), "can't select parameters",
    ),
    "on vectors": (lambda: fa.optim.from_torch(torch.optim.Muon), "Muon can't update these(.|\n)*fix: .*optimizer_groups"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_raise_at_init(world, name):
    make, words = MISTAKES[name]
    with pytest.raises((errors.ArgumentError, errors.CapabilityError), match=words):
        program(optimizer=make()).init(seed=0)


def test_the_error_names_few_of_many(world):
    many = torch.nn.ModuleDict({f"layer{i}": torch.nn.Linear(1, 1) for i in range(300)})
    train_step = program(model=lambda: many, optimizer=fa.sgd(0.1, groups={"layr7.wight": {"lr": 1.0}}))
    with pytest.raises(errors.ArgumentError) as caught:
        train_step.init(seed=0)
    assert "layer7.weight" in str(caught.value)
    assert "600 in all" in str(caught.value)
    assert len(str(caught.value)) < 400


def test_optional_selections_may_match_nothing(world):
    plain, _ = train(fa.sgd(0.1))
    grouped, _ = train(fa.sgd(0.1, groups={"lora*": {"lr": 1.0, "optional": True}}))
    several, _ = train(
        fa.optim.optimizer_groups([("lora*", fa.adamw(1.0)), ("*", fa.sgd(0.1))], optional=["lora*"])
    )
    assert_close(grouped, plain)
    assert_close(several, plain)


REFUSED = {
    "none": lambda: fa.optim.optimizer_groups([]),
    "an instance": lambda: fa.optim.optimizer_groups([("*", torch.optim.SGD([torch.zeros(1)], lr=0.1))]),
    "a number": lambda: fa.optim.optimizer_groups([(3, fa.sgd(0.1))]),
    "optional, no member": lambda: fa.optim.optimizer_groups([("*", fa.sgd(0.1))], optional=["x"]),
    "optimizers without a selection": lambda: fa.optim.optimizer_groups([fa.sgd(0.1), fa.adamw(0.1)]),
    "one optimizer": lambda: fa.optim.optimizer_groups(fa.sgd(0.1)),
    "a negative start": lambda: fa.optim.starting_at(-1, fa.sgd(0.1)),
    "half a start": lambda: fa.optim.starting_at(2.5, fa.sgd(0.1)),
    "a start in the wrong order": lambda: fa.optim.starting_at(fa.sgd(0.1), 3),
    "a second start": lambda: fa.optim.starting_at(2, fa.optim.starting_at(3, fa.sgd(0.1))),
    "a start of several": lambda: fa.optim.starting_at(2, muon_and_adamw()),
    "no rate": lambda: fa.optim.from_torch(NoDefault),
}


class NoDefault(torch.optim.SGD):
    def __init__(self, params, lr):
        super().__init__(params, lr)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_as_it_is_written(name):
    with pytest.raises(errors.ArgumentError):
        REFUSED[name]()


def test_a_mapping_is_a_list_of_pairs():
    pairs = [("out*", fa.sgd(0.1)), ("*", fa.adamw(0.1))]
    assert fa.optim.optimizer_groups(dict(pairs)) == fa.optim.optimizer_groups(pairs)


def test_deepspeed_has_one_optimizer(world):
    with pytest.raises(errors.CapabilityError, match="one DeepSpeed engine has one optimizer"):
        program(strategy=fa.deepspeed(stage=1), optimizer=muon_and_adamw())


def unfrozen_by_hand(starts, steps, bound):
    """AdamW whose first layers get no gradient before update `starts`."""
    torch.manual_seed(0)
    net = Net()
    body = [p for name, p in net.named_parameters() if not name.startswith("out")]
    rule = torch.optim.AdamW([{"params": net.out.parameters(), "lr": 0.05}, {"params": body, "lr": 0.02}])
    for parameter in body:
        parameter.requires_grad_(False)
    for number in range(steps):
        if number == starts:
            for parameter in body:
                parameter.requires_grad_(True)
        rule.zero_grad()
        loss = loss_fn(net, batch_of(12, number))
        (loss.total / loss.weight).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), bound)
        rule.step()
    return {name: value.detach() for name, value in net.named_parameters()}


UNFREEZING = fa.optim.optimizer_groups(
    [("out*", fa.adamw(0.05)), ("*", fa.optim.starting_at(3, fa.adamw(0.02)))]
)


@pytest.mark.parametrize("guard", [False, True], ids=["plain", "skips"])
@pytest.mark.parametrize(("strategy", "ranks"), [("local", 1), ("fsdp", 2)])
def test_a_late_start_equals_torchs_unfreezing(pools, strategy, ranks, guard):
    step = fa.clip_norm(fa.skip_nonfinite(loss_fn) if guard else loss_fn, 0.1)
    expected = unfrozen_by_hand(3, 6, 0.1)
    for params, metrics in pools.run(ranks, train, UNFREEZING, strategy, step, 6):
        assert_close(params, expected)
        assert metrics["lr/adamw.1"] == pytest.approx(0.02)


def test_a_late_start_is_restored_before_and_after(world, tmp_path):
    """The checkpoint is made at update 2, and the start is at 3: the count of updates is the state's."""
    straight, _ = train(UNFREEZING, steps=6)
    restored, _ = train(UNFREEZING, steps=6, directory=tmp_path)
    assert_close(restored, straight)


def test_a_late_start_under_a_captured_step(world):
    straight, _ = train(UNFREEZING, steps=6)
    captured, _ = train(UNFREEZING, step=fa.compile(loss_fn, scope="step", backend="eager"), steps=6)
    assert_close(captured, straight)


@pytest.mark.parametrize("gathered", [False, True])
def test_slots_that_begin_as_a_copy(pools, gathered, tmp_path):
    optimizer = fa.optim.from_torch(Anchored, lr=0.1, whole=gathered)
    expected = pools.run(1, train, fa.optim.from_torch(Anchored, lr=0.1))[0][0]
    torch.manual_seed(0)
    net = Net()
    rule = Anchored(net.parameters(), lr=0.1)
    for number in range(4):
        net.zero_grad()
        loss = loss_fn(net, batch_of(12, number))
        (loss.total / loss.weight).backward()
        rule.step()
    assert_close(expected, {name: value.detach() for name, value in net.named_parameters()})
    for params, _ in pools.run(2, train, optimizer, "fsdp", loss_fn, 4, tmp_path):
        assert_close(params, expected)


class HostReads(TorchDispatchMode):
    """How often a tensor's value was read on the host."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def host_reads(optimizer):
    """(reads of the rates, reads of a whole step), and what the plan says of them."""
    train_step = program(fa.skip_nonfinite(loss_fn), optimizer=optimizer)
    state, _ = train_step(train_step.init(seed=0), batch_of(4))
    with HostReads() as of_rates:
        train_step._owner.instance.updater.rates(state.updates)
    with HostReads() as of_step:
        train_step(state, batch_of(4))
    return of_rates.count, of_step.count, str(train_step.plan).count("one host read")


def test_the_host_reads_no_more_than_the_plan_says(world):
    """Under skip_nonfinite updates are counted on the device, and a read waits for it."""
    two = fa.optim.optimizer_groups([("out*", fa.sgd(RATE)), ("*", fa.adamw(0.01))])
    (first, step, said), several, late = map(host_reads, (fa.adamw(RATE), two, UNFREEZING))
    assert (first, said) == (0, 0)
    assert several == (0, step, 0)
    assert late == (1, step + 1, 1)
