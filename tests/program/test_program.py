"""Programs: donation, snapshots, adoption, lending, ownership, closing."""

from __future__ import annotations

import gc
import weakref

import attrs
import pytest
import torch
from torch import nn

import fnaccel as fa
from fnaccel import errors
from tests.tiny_models import Net, batch_of, loss_fn, program


@pytest.fixture(autouse=True)
def world():
    with fa.start() as started:
        yield started


def test_initial_values_are_those_of_the_seeded_factory():
    state = program().init(seed=7)
    torch.manual_seed(7)
    for name, value in Net().named_parameters():
        assert torch.equal(state.params[name], value)


def test_init_leaves_the_global_generator_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    program().init(seed=7)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_state_is_donated_and_its_successor_is_not():
    train_step = program()
    first = train_step.init()
    second, metrics = train_step(first, batch_of(4))
    assert (second.step, second.updates) == (1, 1)
    assert set(metrics) == {"loss", "weight", "lr"}
    for use in (
        lambda: train_step(first, batch_of(4)),
        lambda: first.params,
        lambda: fa.snapshot(first),
        lambda: fa.tree.map(lambda x: x, first),
        lambda: attrs.evolve(first, step=3),
        lambda: train_step.look(first, lambda model: None),
    ):
        with pytest.raises(errors.StaleStateError):
            use()
    assert "donated" in repr(first)
    train_step(second, batch_of(4))


def test_an_error_in_the_loss_leaves_the_state_live():
    def failing(model, batch):
        loss = loss_fn(model, batch)
        if len(batch[0]) == 2:
            raise torch.OutOfMemoryError("out of memory")
        return loss

    train_step = program(failing)
    state = train_step.init()
    before = fa.snapshot(state)
    with pytest.raises(torch.OutOfMemoryError):
        train_step(state, batch_of(2))
    assert fa.tree.allclose(fa.snapshot(state), before, rtol=0, atol=0)
    assert all(p.grad is None for p in state.params.values())
    train_step(state, batch_of(3))


def test_a_snapshot_survives_and_adopt_goes_back_to_it():
    train_step = program(optimizer=fa.adamw(0.1))
    state = train_step.init()
    state, _ = train_step(state, batch_of(5))
    kept = fa.snapshot(state)
    state, first = train_step(state, batch_of(5, 1))
    with pytest.raises(errors.UnleasedStateError):
        train_step(kept, batch_of(5))
    state = train_step.adopt(kept)
    assert state.step == 1
    state, again = train_step(state, batch_of(5, 1))
    assert torch.equal(first["loss"], again["loss"])


def test_adopt_lists_every_mismatch_and_changes_nothing():
    train_step = program()
    state = train_step.init()
    before = fa.snapshot(state)
    wrong = attrs.evolve(
        before, params={**before.params, "out.bias": torch.zeros(3), "extra": torch.zeros(1)}
    )
    with pytest.raises(errors.TreeMismatchError, match=r"params/extra is unknown.*params/out\.bias is \[3\]"):
        train_step.adopt(wrong)
    assert fa.tree.allclose(fa.snapshot(state), before, rtol=0, atol=0)
    train_step(state, batch_of(2))


def test_consecutive_states_have_one_structure():
    step = fa.with_ema(fa.skip_nonfinite(fa.clip_norm(loss_fn, 1.0)))
    train_step = program(step, optimizer=fa.adamw(0.1))
    state = train_step.init(extras={"mine": [1, "a", torch.ones(2)]})
    structure, paths = fa.tree.structure(state), fa.tree.paths(state)
    for _ in range(3):
        state, _ = train_step(state, batch_of(4))
        assert fa.tree.structure(state) == structure
        assert fa.tree.paths(state) == paths


def test_a_state_of_another_train_step_is_refused():
    first, second = program(), program()
    first.init()
    state = second.init()
    with pytest.raises(errors.UnleasedStateError, match="another train step"):
        first(state, batch_of(2))


def test_a_module_has_one_owner_until_it_is_closed():
    module = Net()
    first = program(model=module)
    first.init()
    second = program(model=module)
    with pytest.raises(errors.OwnershipError, match="owned by another"):
        second.init()
    first.close()
    second.init()
    with pytest.raises(errors.OwnershipError, match="closed"):
        first.init()


def test_a_failed_init_frees_the_module():
    module = Net()
    with pytest.raises(errors.ArgumentError, match="matches no parameter"):
        program(model=module, frozen="nothing.*").init()
    program(model=module).init()


def test_close_frees_parameters_and_optimizer():
    train_step = program(optimizer=fa.adamw(0.1))
    state = train_step.init()
    state, _ = train_step(state, batch_of(2))
    parameter = weakref.ref(state.params["out.bias"])
    moment = weakref.ref(state.opt["out.bias"]["exp_avg"])
    train_step.close()
    with pytest.raises(errors.StaleStateError):
        state.params  # noqa: B018
    gc.collect()
    assert parameter() is None
    assert moment() is None


def test_an_error_in_a_gradient_transform_leaves_no_gradient_behind():
    failing = [True]

    def moody(grads, own, info):
        if failing[0]:
            raise ValueError("no luck")
        return grads, own

    train_step = program(fa.Transform("moody", fa.Phase.GRADS, apply=moody)(loss_fn))
    state = train_step.init()
    with pytest.raises(ValueError, match="no luck"):
        train_step(state, batch_of(4))
    failing[0] = False
    state, _ = train_step(state, batch_of(4))
    other = program()
    expected, _ = other(other.init(), batch_of(4))
    assert fa.tree.allclose(fa.snapshot(state).params, fa.snapshot(expected).params, rtol=0, atol=0)


def test_a_built_module_is_not_started_over():
    train_step = program(model=Net())
    train_step.init()
    with pytest.raises(errors.OwnershipError, match="init was called before"):
        train_step.init()


def test_a_negative_seed_is_a_seed():
    class Dropping(Net):
        def forward(self, x):
            return nn.functional.dropout(super().forward(x), 0.5, training=self.training)

    losses = []
    for _ in range(2):
        torch.rand(3)
        train_step = program(model=Dropping)
        _, metrics = train_step(train_step.init(seed=-1), batch_of(8))
        losses.append(float(metrics["loss"]))
    assert losses[0] == losses[1]


def test_init_again_starts_over():
    train_step = program()
    first = train_step.init(seed=1)
    value = first.params["out.bias"].detach().clone()
    train_step(first, batch_of(2))
    again = train_step.init(seed=1)
    assert torch.equal(again.params["out.bias"], value)
    assert again.step == 0


def test_frozen_parameters_stay_and_have_no_slots():
    train_step = program(optimizer=fa.adamw(0.1), frozen=("blocks.*", "inp.weight"))
    state = train_step.init()
    before = fa.snapshot(state)
    state, _ = train_step(state, batch_of(4))
    moved = {name for name in before.params if not torch.equal(before.params[name], state.params[name])}
    assert moved == {"inp.bias", "out.weight", "out.bias"}
    assert set(state.opt) == moved


def test_a_dict_of_models_has_one_optimizer_each():
    def both(models, batch):
        x, y = batch
        return fa.Mean((models["b"](models["a"](x)) - y).square().sum(), weight=len(y))

    models = {"a": lambda: nn.Linear(3, 4), "b": lambda: nn.Linear(4, 1)}
    train_step = fa.train_step(
        both,
        model=fa.distribute(models, "local"),
        optimizer={"a": fa.sgd(0.0), "b": fa.adamw(0.1)},
    )
    state = train_step.init()
    assert {key: sorted(names) for key, names in state.params.items()} == {
        "a": ["bias", "weight"],
        "b": ["bias", "weight"],
    }
    before = fa.snapshot(state)
    state, metrics = train_step(state, batch_of(4))
    assert torch.equal(before.params["a"]["weight"], state.params["a"]["weight"])
    assert not torch.equal(before.params["b"]["weight"], state.params["b"]["weight"])
    assert set(state.opt["b"]["weight"]) == {"exp_avg", "exp_avg_sq"}
    assert {"lr/a", "lr/b"} <= set(metrics)


def test_a_lent_model_is_neither_trained_nor_donated():
    teacher_step, student_step = program(), program(lambda m, b, given: fa.Mean(
        (m(b[0]) - given["teacher"](b[0])).square().sum(), weight=len(b[0])
    ))  # fmt: skip
    teacher, student = teacher_step.init(seed=1), student_step.init(seed=2)
    before = fa.snapshot(teacher)
    for _ in range(3):
        student, _ = student_step(student, batch_of(4), given={"teacher": teacher})
    assert fa.tree.allclose(fa.snapshot(teacher), before, rtol=0, atol=0)
    params = [leaf.param for leaf in teacher_step.engine.layout.leaves]
    assert all(p.grad is None and p.requires_grad for p in params)
    stale = teacher
    teacher, _ = teacher_step(teacher, batch_of(4))
    with pytest.raises(errors.StaleStateError):
        student_step(student, batch_of(4), given={"teacher": stale})
    with pytest.raises(errors.ArgumentError, match="that this train step trains"):
        student_step(student, batch_of(4), given={"teacher": student})
    student_step(student, batch_of(4), given={"teacher": teacher})


def test_without_an_optimizer_a_model_is_only_looked_at():
    looker = fa.train_step(loss_fn, model=fa.distribute(Net, "local"), optimizer=None)
    state = looker.init()
    out = looker.look(state, lambda model, x: (model.training, model(x)), torch.ones(2, 3))
    assert out[0] is False
    assert not out[1].requires_grad
    with pytest.raises(errors.CapabilityError, match="no optimizer"):
        looker(state, batch_of(2))


def test_looking_evaluates_and_training_goes_on_training():
    modes = []

    class Moody(Net):
        def forward(self, x):
            modes.append(self.training)
            return super().forward(x)

    train_step = program(model=Moody)
    state = train_step.init()
    state, _ = train_step(state, batch_of(2))
    train_step.look(state, lambda model: model(batch_of(2)[0]))
    state, _ = train_step(state, batch_of(2))
    assert modes == [True, False, True]


def test_aux_combines_as_its_type_says():
    def with_aux(model, batch):
        loss = loss_fn(model, batch)
        rows = len(batch[0])
        aux = {
            "mean": fa.Mean(torch.tensor(float(rows * rows)), weight=rows),
            "sum": fa.Sum(rows),
            "rows": fa.Concat(batch[0][:, 0]),
            "plain": torch.tensor(float(rows)),
        }
        return fa.Mean(loss.total, loss.weight, aux)

    train_step = program(fa.accumulate(with_aux, 2))
    batch = batch_of(5)
    _, metrics = train_step(train_step.init(), batch)
    assert float(metrics["mean"]) == pytest.approx((9 + 4) / 5)
    assert int(metrics["sum"]) == 5
    assert torch.equal(metrics["rows"], batch[0][:, 0])
    assert float(metrics["plain"]) == 2.5


def test_buffers_that_a_module_replaces_are_seen_in_the_state():
    class Counting(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls = self.calls + 1
            return super().forward(x)

    train_step = program(model=Counting)
    state = train_step.init()
    for _ in range(3):
        state, _ = train_step(state, batch_of(2))
    assert float(state.buffers["calls"]) == 3


def test_randomness_is_a_function_of_seed_and_step():
    class Dropping(Net):
        def forward(self, x):
            return nn.functional.dropout(super().forward(x), 0.5, training=self.training)

    losses = []
    for disturb in (False, True):
        train_step = program(model=Dropping, optimizer=fa.sgd(0.0))
        state = train_step.init(seed=5)
        for _ in range(3):
            if disturb:
                torch.rand(17)
            state, metrics = train_step(state, batch_of(8))
            losses.append(float(metrics["loss"]))
        train_step.close()
    assert losses[:3] == losses[3:]
    assert len(set(losses[:3])) == 3


def test_the_stream_keeps_pytorchs_own_randomness():
    train_step = program(rng="stream")
    state = train_step.init()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    train_step(state, batch_of(4))
    assert torch.equal(torch.get_rng_state(), before)
    assert "stream" in str(train_step.plan)


def test_the_users_random_stream_is_left_as_it_was():
    train_step = program()
    state = train_step.init()
    torch.manual_seed(9)
    expected = [torch.rand(1).item() for _ in range(3)]
    torch.manual_seed(9)
    drawn = []
    for call in range(3):
        drawn.append(torch.rand(1).item())
        state, _ = train_step(state, batch_of(2, call))
    assert drawn == expected


def test_a_failure_after_donation_does_not_brick_the_train_step():
    def failing(params, own, info):
        raise ValueError("too late")

    train_step = program(fa.Transform("late", fa.Phase.UPDATE, apply=failing)(loss_fn))
    state = train_step.init()
    kept = fa.snapshot(state)
    with pytest.raises(ValueError, match="too late"):
        train_step(state, batch_of(2))
    state = train_step.adopt(kept)
    assert state.step == 0
    train_step.close()


def test_weights_that_add_up_to_nothing_change_nothing():
    def empty(model, batch):
        return fa.Mean(model(batch[0]).sum() * 0.0, weight=0)

    train_step = program(empty)
    state = train_step.init()
    before = fa.snapshot(state)
    state, metrics = train_step(state, batch_of(2))
    assert float(metrics["loss"]) == 0.0
    assert metrics["skipped"] == 1.0
    assert state.updates == 0
    assert fa.tree.allclose(fa.snapshot(state).params, before.params, rtol=0, atol=0)


@pytest.mark.parametrize("weight", [-4, float("nan"), torch.ones(4), "3", None])
def test_a_weight_is_a_number_of_rows(weight):
    train_step = program(lambda m, b: fa.Mean(m(b[0]).sum(), weight=weight))
    with pytest.raises(errors.LossError, match="the weight of a loss is"):
        train_step(train_step.init(), batch_of(2))


def test_aux_may_not_hide_what_the_step_reports():
    train_step = program(lambda m, b: (m(b[0]).sum(), {"loss": torch.ones(())}))
    with pytest.raises(errors.LossError, match="aux holds 'loss'"):
        train_step(train_step.init(), batch_of(2))


def test_half_precision_totals_are_added_up_in_fp32():
    def ones(model, batch):
        return fa.Mean(model(batch).sum() * 0 + 1.0, weight=1)

    train_step = program(fa.accumulate(ones, 600), model=lambda: nn.Linear(1, 1).bfloat16())
    _, metrics = train_step(train_step.init(), torch.ones(600, 1, dtype=torch.bfloat16))
    assert float(metrics["loss"]) == 1.0
    state = train_step.init()
    loader = torch.utils.data.DataLoader(torch.ones(600, 1, dtype=torch.bfloat16), batch_size=1)
    found = fa.evaluate(
        train_step, state, lambda m, b: {"n": fa.Sum(torch.ones((), dtype=torch.bfloat16))}, fa.shard(loader)
    )
    assert float(found["n"]) == 600.0


def test_a_lent_model_without_optimizer_is_in_evaluation_mode():
    modes = []

    class Moody(Net):
        def forward(self, x):
            modes.append(self.training)
            return super().forward(x)

    teacher_step = fa.train_step(loss_fn, model=fa.distribute(Moody, "local"), optimizer=None)
    student_step = program(lambda m, b, given: fa.Mean(
        (m(b[0]) - given["teacher"](b[0])).square().sum(), weight=len(b[0])
    ))  # fmt: skip
    student_step(student_step.init(), batch_of(2), given={"teacher": teacher_step.init()})
    assert modes == [False]


def test_modes_that_the_user_changes_do_not_leak():
    train_step = program()
    state = train_step.init()
    train_step.look(state, lambda model: model.train())
    assert train_step.look(state, lambda model: model.training) is False


def test_rows_that_evaluate_concatenates_need_not_be_the_batchs():
    loader = torch.utils.data.DataLoader(torch.ones(5, 3), batch_size=2)
    train_step = program()
    found = fa.evaluate(train_step, train_step.init(), lambda m, b: fa.Concat(b.flatten()), fa.shard(loader))
    assert found.shape == (15,)


def test_what_models_share_is_trained_once():
    shared = nn.Linear(3, 3)
    models = {
        "a": lambda: nn.Sequential(shared, nn.Linear(3, 1)),
        "b": lambda: nn.Sequential(shared, nn.Linear(3, 1)),
    }

    def both(models, batch):
        x, y = batch
        return fa.Mean((models["a"](x) + models["b"](x) - y).square().sum(), weight=len(y))

    train_step = fa.train_step(both, model=fa.distribute(models, "local"), optimizer=fa.sgd(0.1))
    state = train_step.init()
    before = shared.weight.detach().clone()
    x, y = batch_of(4)
    loss = (models_of(train_step)["a"](x) + models_of(train_step)["b"](x) - y).square().sum() / 4
    (gradient,) = torch.autograd.grad(loss, shared.weight)
    state, _ = train_step(state, (x, y))
    assert "0.weight" in state.params["a"]
    assert "0.weight" not in state.params["b"]
    assert torch.allclose(shared.weight, before - 0.1 * gradient, atol=1e-6)


def models_of(train_step):
    return train_step.engine.layout.model
