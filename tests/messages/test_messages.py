"""Error messages are API: what / where / fix, for every class, before anything has changed."""

from __future__ import annotations

import inspect
import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fnaccel as fa
from fnaccel import errors
from fnaccel.errors import FnaccelError
from tests.docs.examples import split
from tests.tiny_models import Net, batch_of, loss_fn, program


def one_step(fn, batch=None, **options):
    train_step = program(fn, **options)
    return train_step(train_step.init(), batch_of(4) if batch is None else batch)


def twice():
    train_step = program()
    state = train_step.init()
    train_step(state, batch_of(2))
    train_step(state, batch_of(2))


def by_hand():
    train_step = program()
    state = train_step.init()
    train_step(fa.snapshot(state), batch_of(2))


def shared_module():
    module = Net()
    first = program(model=module)
    first.init()
    program(model=module).init()


def another_architecture():
    train_step, other = program(), program(model=lambda: nn.Linear(3, 1))
    train_step.init()
    train_step.adopt(fa.snapshot(other.init()))


def distributed_twice():
    fa.distribute(fa.distribute(Net, "local"), "local")


def sparse(optimizer, strategy="local"):
    layers = {"emb": nn.Embedding(7, 3, sparse=True), "out": nn.Linear(3, 1)}
    return program(model=lambda: nn.ModuleDict(layers), optimizer=optimizer, strategy=strategy)


# (class, what it says, its fix, how it comes about)
TABLE = [
    (errors.AxisProductError, "the world has 1", "start one process|use degree", lambda: program(strategy="ddp(3)")),
    (errors.AxisProductError, "2 \\* 4 = 8 ranks", "nearest", lambda: program(strategy="ddp(2) * fsdp(4)")),
    (errors.AxisProductError, "stands twice", "one axis", lambda: program(strategy="ddp() * ddp()")),
    (errors.UnknownNameError, "'fsdpp'", "did you mean 'fsdp'", lambda: fa.distribute(Net, "fsdpp")),
    (errors.UnknownNameError, "'bf61'", "did you mean 'bf16'", lambda: fa.with_precision(loss_fn, "bf61")),
    (errors.UnknownNameError, "'lst'", "did you mean 'last'", lambda: fa.accumulate(loss_fn, 2, sync="lst")),
    (errors.UnknownNameError, "'blok'", "did you mean 'block'", lambda: fa.compile(loss_fn, "blok")),
    (errors.UnknownNameError, "'powersdg'", "'powersgd'", lambda: fa.ddp(hook="powersdg")),
    (errors.RepeatedTransformError, "accumulate was applied twice", "once",
     lambda: fa.accumulate(fa.accumulate(loss_fn, 2), 4)),
    (errors.CapabilityError, "remat needs forward and backward as two programs", "without a scope",
     lambda: program(fa.remat(fa.compile(loss_fn, "step")))),
    (errors.CapabilityError, "looks for parameters without a gradient", "without a scope",
     lambda: program(fa.compile(loss_fn, "step"), strategy="ddp(unused_parameters=True)")),
    (errors.CapabilityError, "the hook 'powersgd' of ddp keeps state", "without a scope",
     lambda: program(fa.compile(loss_fn, "step"), strategy=fa.ddp(hook="powersgd"))),
    (errors.ArgumentError, "compiled again -1 times", "0 or more", lambda: fa.compile(loss_fn, limit=-1)),
    (errors.ArgumentError, "says nothing of which dimensions", "dynamic=True",
     lambda: fa.compile(loss_fn, dynamic={"x": "rows"})),
    (errors.CapabilityError, "compile loss.*fsdp\\(\\) can't do", "scope='block'",
     lambda: program(fa.compile(loss_fn, "loss"), strategy="fsdp")),
    (errors.NotCompiledError, "found no blocks", "scope='loss'",
     lambda: program(fa.compile(loss_fn, "block"), model=lambda: nn.Linear(3, 1)).init()),
    (errors.CapabilityError, "emb.weight has sparse gradients", "sparse=False", lambda: sparse(fa.adamw(0.1)).init()),
    (errors.CapabilityError, "emb.weight has sparse gradients", "sparse=False",
     lambda: sparse(fa.optim.from_torch(torch.optim.SGD, lr=0.1), "fsdp").init()),
    (errors.CapabilityError, "SparseAdam takes sparse gradients only", "sparse=False.*fa.adam",
     lambda: sparse(fa.optim.from_torch(torch.optim.SparseAdam, lr=0.1)).init()),
    (errors.ArgumentError, "over 0 micro-batches", "1 or more", lambda: fa.accumulate(loss_fn, 0)),
    (errors.ArgumentError, "which can't be called", "function", lambda: fa.with_weight(loss_fn, 3)),
    (errors.ArgumentError, "not int", "loss function itself", lambda: fa.clip_norm(3, 1.0)),
    (errors.ArgumentError, "clipped to -1", "positive", lambda: fa.clip_norm(loss_fn, -1)),
    (errors.ArgumentError, "a step is a function .*not float", "the loss function itself", lambda: fa.clip_norm(1.0, loss_fn)),
    (errors.ArgumentError, "a step is a function .*not float", "the loss function itself", lambda: fa.clip_value(1.0, loss_fn)),
    (errors.ArgumentError, "nothing says how it lies", "fa.distribute",
     lambda: fa.train_step(loss_fn, model=Net, optimizer=fa.sgd(0.1))),
    (errors.LossError, "returned nothing", "scalar", lambda: one_step(lambda m, b: None)),
    (errors.LossError, "not a scalar: it has shape \\[4, 1\\]", "fa.Mean", lambda: one_step(lambda m, b: m(b[0]))),
    (errors.LossError, "detached", "detach", lambda: one_step(lambda m, b: m(b[0]).sum().detach())),
    (errors.LossError, "returned float", "scalar", lambda: one_step(lambda m, b: m(b[0]).sum().item())),
    (errors.MicroBatchError, "3 rows on this rank can't be cut in 4", "at least 4 rows",
     lambda: one_step(fa.accumulate(loss_fn, 4), batch_of(3))),
    (errors.MicroBatchError, "2 rows on this rank can't be cut in 4", "at least 4 rows",
     lambda: one_step(fa.accumulate(loss_fn, 4), fa.data.Window([batch_of(4), batch_of(2)]))),
    (errors.MicroBatchError, "window holds 0 batches", "one batch or more", lambda: one_step(loss_fn, fa.data.Window())),
    (errors.LoaderError, "empty|no", "item|batch", lambda: fa.shard(DataLoader([]))),
    (errors.StaleStateError, "donated", "state, metrics = train_step", twice),
    (errors.UnleasedStateError, "made by hand", "adopt", by_hand),
    (errors.OwnershipError, "owned by another train step", "factory", shared_module),
    (errors.OwnershipError, "distributed already", "once", distributed_twice),
    (errors.OwnershipError, "no parameters yet", "init", lambda: program().engine),
    (errors.TreeMismatchError, "params/inp.weight is missing.*params/weight is unknown", "same models",
     another_architecture),
    (errors.ConfigError, "no key 'precison'", "did you mean 'precision'", lambda: fa.config.from_yaml("precison: bf16")),
    (errors.ConfigError, "no option 'weight_decy'", "weight_decay",
     lambda: fa.adamw(0.1, groups={"*": {"weight_decy": 0.0}})),
    (errors.ConfigError, "is no strategy", "product of calls", lambda: fa.strategy("fsdp(")),
    (errors.ConfigError, "can't be called", "arguments of fa.fsdp", lambda: fa.strategy("fsdp(unit='block')")),
    (errors.NotSerializableError, "a lambda", "module:name",
     lambda: fa.config.to_yaml(fa.config.Recipe(optimizer=fa.config.OptimizerRecipe(schedule=lambda u: 0.1)))),
    (errors.WorldError, "no rank 5", "0 to 0", lambda: fa.start().on_process(5)),
    (errors.WorldError, "no local rank 5", "0 to 0", lambda: fa.start().on_local_process(5)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "what", "fix", "make"), TABLE)
def test_three_lines(kind, what, fix, make):
    with fa.start(), pytest.raises(kind) as caught:
        make()
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert lines[1].startswith("  where: ")
    assert lines[2].startswith("  fix: ")
    import re

    assert re.search(what, lines[0])
    assert re.search(fix, lines[2])
    assert all(len(part) > 3 for part in (caught.value.what, caught.value.where, caught.value.fix))


def test_no_world_is_named():
    with pytest.raises(errors.NoWorldError, match="no world was started"):
        program()


CLASSES = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, FnaccelError) and value is not FnaccelError
]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_class_shows_code_that_fails_and_code_that_works(kind):
    kinds = [section[0] for section in split(inspect.getdoc(kind))[1]]
    assert kinds == ["Fails", "Works"], "tests/docs/test_examples.py runs both"
    assert len(kind.__mro__) > 3, "it is also what a caller would expect: ValueError, RuntimeError, ..."


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_errors_cross_processes(kind):
    error = pickle.loads(pickle.dumps(kind("what", where="where", fix="fix")))
    assert type(error) is kind
    assert (error.what, error.where, error.fix) == ("what", "where", "fix")


def test_every_class_is_raised_somewhere():
    from pathlib import Path

    source = "\n".join(path.read_text() for path in Path(fa.__file__).parent.rglob("*.py"))
    for kind in CLASSES:
        assert f"raise {kind.__name__}(" in source or f"return {kind.__name__}(" in source, kind.__name__


def test_nothing_changes_before_a_mistake_is_named():
    with fa.start():
        train_step = program(fa.accumulate(loss_fn, 4))
        state = train_step.init()
        before = fa.snapshot(state)
        for bad in (batch_of(3), fa.data.Window([batch_of(2)] * 2), fa.data.Window()):
            with pytest.raises(errors.MicroBatchError):
                train_step(state, bad)
        assert fa.tree.allclose(fa.snapshot(state), before, rtol=0, atol=0)
        train_step(state, batch_of(4))


def test_law_8_a_stale_state_always_raises():
    with fa.start():
        train_step = program()
        stale = train_step.init()
        for _ in range(3):
            following, _ = train_step(stale, batch_of(2))
            for use in (train_step, train_step.look, train_step.adopt):
                with pytest.raises(errors.StaleStateError):
                    use(
                        stale,
                        *(
                            [batch_of(2)]
                            if use is train_step
                            else [lambda m: m]
                            if use == train_step.look
                            else []
                        ),
                    )
            with pytest.raises(errors.StaleStateError):
                torch.equal(stale.params["out.bias"], stale.params["out.bias"])
            stale = following
