"""Schedules of options besides the rate: torch's optimizers, whose groups are written before each step."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

import fnaccel as fa
from fnaccel import errors
from tests.tiny_models import Net, batch_of, loss_fn, program, whole_params

UPDATES = 20
BETA = fa.schedules.linear(0.8, 0.95, 15)
DECAY = fa.schedules.cosine(0.04, total=18, end=0.4)


def rising(updates):
    """A schedule of the user's, which begins at 0."""
    return 0.05 * updates


def adamw(**groups):
    # at torch's eps of 1e-8 a gradient that is almost 0 moves its parameter by what two processors round
    return fa.adamw(0.05, betas=(BETA, 0.99), eps=1e-5, weight_decay=DECAY, **groups)


def sgd(**groups):
    return fa.sgd(0.05, momentum=BETA, weight_decay=rising, **groups)


OPTIMIZERS = {
    "adamw": (
        adamw,
        torch.optim.AdamW,
        lambda step: {"betas": (BETA(step), 0.99), "eps": 1e-5, "weight_decay": DECAY(step)},
    ),
    "adam": (
        lambda **groups: fa.adam(0.05, betas=(0.9, BETA), eps=lambda step: 1e-3 * (step + 1), **groups),
        torch.optim.Adam,
        lambda step: {"betas": (0.9, BETA(step)), "eps": 1e-3 * (step + 1)},
    ),
    "sgd": (sgd, torch.optim.SGD, lambda step: {"momentum": BETA(step), "weight_decay": rising(step)}),
    "from_torch": (
        lambda **groups: fa.optim.from_torch(
            torch.optim.AdamW, lr=0.05, betas=(BETA, 0.99), weight_decay=DECAY, **groups
        ),
        torch.optim.AdamW,
        lambda step: {"betas": (BETA(step), 0.99), "weight_decay": DECAY(step)},
    ),
}


def by_hand(cls, numbers, biases=None):
    """Parameters after steps of torch's optimizer. `biases` are further numbers of the biases' group."""
    torch.manual_seed(0)
    net = Net()
    named = dict(net.named_parameters())
    groups = [[value for name, value in named.items() if name.endswith(end)] for end in ("weight", "bias")]
    rule = cls([{"params": group} for group in groups], lr=0.05)
    for step in range(UPDATES):
        for group in rule.param_groups:
            group.update(numbers(step))
        if biases is not None:
            rule.param_groups[1].update(biases(step))
        rule.zero_grad()
        loss = loss_fn(net, batch_of(8, step))
        (loss.total / loss.weight).backward()
        rule.step()
    return {name: value.detach() for name, value in named.items()}


def trained(name, wrap=None, strategy="local", resume=None, **groups):
    """Parameters and metrics after the same steps of ours, on this rank's rows. Resumed halfway if told so."""
    step = loss_fn if wrap is None else wrap(loss_fn)
    train_step = program(step, optimizer=OPTIMIZERS[name][0](**groups), strategy=strategy)
    state, metrics = train_step.init(seed=0), {}
    count, rank = train_step.mesh.batch_size, train_step.mesh.batch_rank
    for number in range(UPDATES):
        if resume is not None and number == UPDATES // 2:
            fa.save(resume, state)
            state = fa.restore(resume, like=train_step.init(seed=1))
        rows = tuple(part.chunk(count)[rank] for part in batch_of(8, number))
        state, metrics = train_step(state, rows)
    return whole_params(state), metrics


WRAPS = {
    "eager": None,
    "accumulated": lambda step: fa.accumulate(step, 2),
    "skipping": fa.skip_nonfinite,
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_torch_whose_groups_are_written(name, wrap):
    _, cls, numbers = OPTIMIZERS[name]
    with fa.start():
        params, _ = trained(name, WRAPS[wrap])
    assert_close(params, by_hand(cls, numbers), rtol=0.0, atol=1e-6)


@pytest.mark.long_except("adamw")
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_captured_without_a_new_compilation(name):
    _, cls, numbers = OPTIMIZERS[name]
    with fa.start():
        params, metrics = trained(name, lambda step: fa.compile(step, scope="step"))
    assert metrics["recompilations"] == 0
    assert_close(params, by_hand(cls, numbers), rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "sgd", "from_torch"])
def test_groups_have_schedules_of_their_own(name):
    _, cls, numbers = OPTIMIZERS[name]
    with fa.start():
        params, metrics = trained(name, groups={"*bias": {"weight_decay": rising, "lr": 0.02}})
    assert_close(
        params,
        by_hand(cls, numbers, lambda step: {"weight_decay": rising(step), "lr": 0.02}),
        rtol=0.0,
        atol=1e-6,
    )
    last = UPDATES - 1
    assert metrics["weight_decay/*bias"] == pytest.approx(rising(last))
    assert metrics["weight_decay"] == pytest.approx(numbers(last)["weight_decay"])
    assert metrics["lr/*bias"] == 0.02


def test_a_number_in_a_group_replaces_the_schedule():
    _, cls, numbers = OPTIMIZERS["adamw"]
    with fa.start():
        params, metrics = trained("adamw", groups={"*bias": {"weight_decay": 0.0}})
    assert_close(params, by_hand(cls, numbers, lambda _: {"weight_decay": 0.0}), rtol=0.0, atol=1e-6)
    assert "weight_decay/*bias" not in metrics


def on_ranks(name, strategy, folder, backend):
    with fa.start():
        wrap = (lambda step: fa.compile(step, scope="step", backend=backend)) if backend else None
        return trained(name, wrap, strategy, None if backend else folder)


@pytest.mark.long_except(r"resumed|aot_eager")
@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"], ids=["resumed", "aot_eager", "inductor"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_two_ranks(pools, tmp_path, name, strategy, backend):
    _, cls, numbers = OPTIMIZERS[name]
    for params, metrics in pools.run(2, on_ranks, name, strategy, str(tmp_path), backend):
        assert_close(params, by_hand(cls, numbers), rtol=0.0, atol=1e-6)
        assert metrics["weight_decay"] == pytest.approx(numbers(UPDATES - 1)["weight_decay"])


def test_resumed(tmp_path):
    with fa.start():
        params, _ = trained("adamw", resume=tmp_path)
    assert_close(params, by_hand(*OPTIMIZERS["adamw"][1:]), rtol=0.0, atol=1e-6)


def test_a_momentum_of_0_keeps_the_gradient_on_every_path():
    """torch leaves its buffer out at exactly 0. Ours is the limit of small momenta, in each kind of step."""
    nearly = by_hand(torch.optim.SGD, lambda step: {"momentum": max(rising(step), 1e-12)})
    OPTIMIZERS["warm"] = (lambda: fa.sgd(0.05, momentum=rising), None, None)
    with fa.start():
        for wrap in (None, fa.skip_nonfinite, lambda step: fa.compile(step, scope="step")):
            params, metrics = trained("warm", wrap)
            assert_close(params, nearly, rtol=0.0, atol=1e-6)
            assert float(metrics["momentum"]) == pytest.approx(rising(UPDATES - 1))


def test_the_pure_update_has_the_same_schedules():
    with fa.start():
        train_step = program(optimizer=adamw(groups={"*bias": {"weight_decay": DECAY}}))
        update = fa.pure(train_step)
        state = train_step.init(seed=0)
        values = update.values(state)
        for number in range(5):
            values, told = update(values, batch_of(8, number))
            state, metrics = train_step(state, batch_of(8, number))
        assert_close(values["params"], whole_params(state), rtol=0.0, atol=1e-6)
        for name in ("beta1", "weight_decay", "weight_decay/*bias"):
            assert float(told[name]) == pytest.approx(metrics[name])
        _, told = update(values, batch_of(8, 5), weight_decay=0.5)
        assert float(told["weight_decay"]) == 0.5


def test_metrics_beside_several_optimizers_and_the_text_of_the_plan():
    optimizer = fa.optim.optimizer_groups([("*bias", sgd()), ("*", fa.adamw(1e-3, weight_decay=rising))])
    with fa.start():
        train_step = program(optimizer=optimizer)
        _, metrics = train_step(train_step.init(), batch_of(8))
    assert metrics["momentum/sgd"] == 0.8
    assert metrics["weight_decay/sgd"] == metrics["weight_decay/adamw"] == 0.0
    assert "weight_decay=rising" in optimizer.describe()
    assert "momentum=linear(start=0.8, end=0.95, total=15)" in optimizer.describe()
    assert "betas=(linear(start=0.8, end=0.95, total=15), 0.99)" in adamw().describe()
    assert adamw().parts is None


def test_starts_later():
    """Its schedules count from its first update."""
    with fa.start():
        train_step = program(optimizer=fa.optim.starting_at(2, fa.sgd(0.1, momentum=rising)))
        state, told = train_step.init(), []
        for number in range(4):
            state, metrics = train_step(state, batch_of(8, number))
            told.append(metrics["momentum"])
    assert told == [0.0, 0.0, 0.0, 0.05]


def schedule_that_reads(updates):
    """Takes ints only."""
    return [0.1, 0.2, 0.3][int(updates)]


def test_a_schedule_that_takes_no_tensors_is_read_on_the_host():
    optimizer = fa.adamw(1e-3, weight_decay=schedule_that_reads)
    with fa.start():
        train_step = program(fa.skip_nonfinite(loss_fn), optimizer=optimizer)
        assert "the schedule takes no tensors" in str(train_step.plan)
        state = train_step.init()
        for number in range(2):
            state, metrics = train_step(state, batch_of(8, number))
    assert metrics["weight_decay"] == 0.2


class Own(torch.optim.SGD):
    """A class of the user's that takes a function."""

    def __init__(self, params, lr=0.1, penalty=None, flag=False):
        super().__init__(params, lr)
        assert flag or penalty is rising


REFUSED = {
    "a flag": (lambda: fa.sgd(0.1, momentum=0.9, nesterov=rising), r"nesterov takes no schedule"),
    "a flag of torch": (
        lambda: fa.optim.from_torch(torch.optim.AdamW, lr=0.1, amsgrad=rising), r"amsgrad takes no schedule",
    ),
    "a flag in a group": (
        lambda: fa.sgd(0.1, momentum=0.9, groups={"*": {"nesterov": rising}}), r"nesterov takes no schedule",
    ),
    "8 bits": (lambda: fa.optim.adamw8bit(1e-3, weight_decay=rising), r"weight_decay takes no schedule"),
    "betas of 8 bits": (lambda: fa.optim.adamw8bit(1e-3, betas=(BETA, 0.9)), r"betas takes no schedule"),
    "all betas at once": (lambda: fa.adamw(1e-3, betas=BETA), r"are not two numbers in \[0, 1\)"),
    "DeepSpeed's own": (
        lambda: fa.optim.from_deepspeed(1e-3, weight_decay=rising), r"weight_decay takes no schedule",
    ),
    "a part": (lambda: fa.optim.add_decayed_weights(rising), r"is no number from 0 on"),
    "betas of a part": (lambda: fa.optim.scale_by_adam(betas=(BETA, 0.9)), r"are not two numbers in \[0, 1\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_takes_no_schedule_says_so_at_once(case):
    make, message = REFUSED[case]
    with pytest.raises(errors.ArgumentError, match=message):
        make()


def test_a_class_that_takes_functions_gets_them():
    with fa.start():
        program(optimizer=fa.optim.from_torch(Own, penalty=rising)).init()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_decay": lambda _: "much"}, r"'much' for update 0, not a finite number[\s\S]*weight_decay="),
        ({"betas": (0.9, lambda _: 1.0)}, r"1.0 for update 0, not a number in \[0, 1\)[\s\S]*betas="),
        ({"eps": lambda _: float("nan")}, r"nan for update 0, not a finite number[\s\S]*eps="),
    ],
)
def test_a_schedule_that_gives_no_number(options, message):
    with fa.start(), pytest.raises(errors.ArgumentError, match=message):
        program(optimizer=fa.adamw(1e-3, **options)).init()


def test_deepspeed_refuses():
    with fa.start(), pytest.raises(errors.CapabilityError, match=r"weight_decay has a schedule[\s\S]*fsdp"):
        program(strategy="deepspeed", optimizer=fa.adamw(1e-3, weight_decay=rising))


def test_an_element_beside_none():
    """Adafactor gathers whole parameters, and the first of its `eps` is None."""
    optimizer = fa.optim.adafactor(0.01, eps=(None, fa.schedules.linear(1e-3, 1e-2, 10)), weight_decay=DECAY)
    with fa.start():
        train_step = program(optimizer=optimizer)
        state, told = train_step.init(seed=0), {}
        for number in range(3):
            state, told = train_step(state, batch_of(8, number))
        torch.manual_seed(0)
        net = Net()
        rule = torch.optim.Adafactor(net.parameters(), lr=0.01)
        for number in range(3):
            rule.param_groups[0].update(eps=(None, 1e-3 + 9e-4 * number), weight_decay=DECAY(number))
            rule.zero_grad()
            loss = loss_fn(net, batch_of(8, number))
            (loss.total / loss.weight).backward()
            rule.step()
    assert_close(whole_params(state), dict(net.named_parameters()), rtol=0.0, atol=1e-6)
    assert told["eps2"] == pytest.approx(2.8e-3)
