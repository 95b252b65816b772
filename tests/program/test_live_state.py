"""What an interrupted or failed call leaves, and the way back from it."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import signal

import attrs
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa
from fnaccel import errors
from fnaccel.world.undo import SigintHeld, TorchSettings
from tests.tiny_models import Net, batch_of, loss_fn, program, whole_params


@pytest.fixture(autouse=True)
def world():
    with fa.start(device="cpu") as started:
        yield started


def same(first, second):
    return fa.tree.allclose(first, second, rtol=0, atol=0)


def shards(rows=12):
    return fa.shard(DataLoader(TensorDataset(*batch_of(rows)), batch_size=4))


def losses_around_a_failure(strategy, failing):
    """Losses of four steps of two micro-batches; the backward pass of one forward fails, if asked for."""
    calls = []

    def fail(grad):
        raise MemoryError("in backward")

    def loss(model, batch):
        calls.append(1)
        x, y = batch
        out = model(x)
        if len(calls) == failing:
            out.register_hook(fail)
        return fa.Mean((out - y).square().sum(), weight=len(y))

    train_step = program(fa.accumulate(loss, 2), strategy=strategy)
    state, losses = train_step.init(seed=0), []
    while state.step < 4:
        try:
            state, metrics = train_step(state, batch_of(4, seed=state.step))
            losses.append(float(metrics["loss"]))
        except MemoryError:
            assert len(calls) == failing
    train_step.close()
    return losses


class TestAFailedStep:
    @pytest.mark.parametrize("strategy", ["local", "ddp(hook='bf16')", "fsdp"])
    def test_a_schedule_that_raises_changes_nothing(self, strategy):
        fails = []

        def schedule(updates):
            if fails and fails.pop():
                raise RuntimeError("no rate")
            return 0.1

        expected = program(strategy=strategy)
        wanted, _ = expected(expected.init(), batch_of(4))
        wanted = whole_params(wanted)
        expected.close()
        train_step = program(strategy=strategy, optimizer=fa.sgd(schedule))
        state = train_step.init()
        fails.append(True)
        with pytest.raises(RuntimeError, match="no rate"):
            train_step(state, batch_of(4))
        assert train_step.live_state is state
        state, _ = train_step(state, batch_of(4))
        assert same(whole_params(state), wanted)
        train_step.close()

    @pytest.mark.parametrize(
        ("strategy", "ranks"), [("local", 1), ("fsdp", 1), ("ddp", 2), ("fsdp", 2), ("zero2", 2)]
    )
    @pytest.mark.parametrize("forward", [2, 3])
    def test_a_backward_that_raises_changes_nothing(self, pools, strategy, ranks, forward):
        wanted = pools.run(ranks, losses_around_a_failure, strategy, None)
        assert pools.run(ranks, losses_around_a_failure, strategy, forward) == wanted

    def test_an_interrupt_leaves_autocast_as_it_was(self, monkeypatch):
        leave = torch.autocast.__exit__

        def cut_off(self, *error):
            monkeypatch.setattr(torch.autocast, "__exit__", leave)
            raise KeyboardInterrupt

        train_step = program(fa.with_precision(loss_fn, "bf16"))
        state = train_step.init()
        before = TorchSettings("cpu").autocast
        monkeypatch.setattr(torch.autocast, "__exit__", cut_off)
        with pytest.raises(KeyboardInterrupt):
            train_step(state, batch_of(4))
        assert train_step.live_state is state
        assert TorchSettings("cpu").autocast == before
        assert before[0] is False

    def test_an_update_that_raises_leads_back_by_a_snapshot(self):
        fails = [True]

        def hook(params, own, info):
            if fails and fails.pop():
                raise RuntimeError("no memory")
            return own

        step = fa.Transform("hook", fa.Phase.UPDATE, apply=hook)(loss_fn)
        expected = program()
        wanted, _ = expected(expected.init(), batch_of(4))
        train_step = program(step)
        state = train_step.init()
        before = fa.snapshot(state)
        with pytest.raises(RuntimeError, match="no memory"):
            train_step(state, batch_of(4))
        assert train_step.live_state is None
        state, _ = train_step(train_step.adopt(before), batch_of(4))
        assert same(whole_params(state), whole_params(wanted))


class TestLiveState:
    def test_scan_goes_on_from_the_state_that_it_never_handed_over(self):
        """A Ctrl-C after the update: the next state is live, and the loop never received it."""
        held = []

        def interrupt_once(call):
            def run(state, batch, **options):
                outcome = call(state, batch, **options)
                if not held:
                    held.append(True)
                    raise KeyboardInterrupt
                return outcome

            return run

        expected = program()
        for wanted, _ in fa.scan(expected, expected.init(), shards()):
            pass
        train_step = program(fa.Transform("cut", fa.Phase.CALL, apply=interrupt_once)(loss_fn))
        first = train_step.init()
        with pytest.raises(KeyboardInterrupt):
            for _ in fa.scan(train_step, first, shards()):
                pass
        with pytest.raises(errors.StaleStateError, match="live_state"):
            train_step(first, batch_of(4))
        assert train_step.live_state.step == 1
        steps = [state.step for state, _ in fa.scan(train_step, train_step.live_state, shards())]
        assert steps == [2, 3]
        assert same(whole_params(train_step.live_state), whole_params(wanted))

    def test_there_is_none_before_init_and_after_close(self):
        train_step = program()
        assert train_step.live_state is None
        state = train_step.init()
        assert train_step.live_state is state
        train_step.close()
        assert train_step.live_state is None

    def test_copies_of_a_state_are_values(self, tmp_path):
        train_step = program(fa.with_ema(loss_fn, 0.9), optimizer=fa.adamw(0.1))
        state, _ = train_step(train_step.init(), batch_of(4))
        torch.save(state, tmp_path / "state.pt")
        loaded = torch.load(tmp_path / "state.pt", weights_only=False)
        copies = [copy.deepcopy(state), pickle.loads(pickle.dumps(state)), loaded]
        kept = fa.snapshot(state)
        state, _ = train_step(state, batch_of(4))
        for each in copies:
            assert same(each, kept)
            with pytest.raises(errors.UnleasedStateError):
                train_step(each, batch_of(4))
        torch.save(state.params, tmp_path / "params.pt")
        assert same(dict(torch.load(tmp_path / "params.pt")), dict(state.params))  # without classes of ours
        assert all(type(each.params) is type(state.params) for each in copies)
        adopted = train_step.adopt(copies[0])
        assert same(whole_params(adopted), whole_params(kept))
        with pytest.raises(errors.StaleStateError):
            copy.deepcopy(state)


class TestInterruptsHeld:
    def test_one_waits_and_a_second_does_not(self):
        seen = []
        before = signal.signal(signal.SIGINT, lambda *_: seen.append("handled"))
        try:
            with SigintHeld():
                signal.raise_signal(signal.SIGINT)
                assert seen == []
                signal.raise_signal(signal.SIGINT)
                assert seen == ["handled"]
            assert seen == ["handled", "handled"]
            with SigintHeld():
                pass
            assert seen == ["handled", "handled"]
        finally:
            signal.signal(signal.SIGINT, before)

    def test_ctrl_c_in_the_update_waits_for_the_next_state(self):
        def hook(params, own, info):
            signal.raise_signal(signal.SIGINT)
            return own

        train_step = program(fa.Transform("hook", fa.Phase.UPDATE, apply=hook)(loss_fn))
        state = train_step.init()
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored under nohup
        try:
            with pytest.raises(KeyboardInterrupt):
                train_step(state, batch_of(4))
        finally:
            signal.signal(signal.SIGINT, before)
        assert train_step.live_state.step == 1


class TestAverages:
    def begun(self):
        train_step = program(fa.with_ema(loss_fn, 0.5))
        state, _ = train_step(train_step.init(), batch_of(4))
        return train_step, state

    @pytest.mark.parametrize(
        "use",
        [
            lambda train_step, state, folder: train_step(state, batch_of(4)),
            lambda train_step, state, folder: fa.snapshot(state),
            lambda train_step, state, folder: fa.save(folder, state),
            lambda train_step, state, folder: fa.save_async(folder, state),
            lambda train_step, state, folder: fa.interchange.export_hf(folder, state),
            lambda train_step, state, folder: train_step.adopt(state),
            lambda train_step, state, folder: copy.deepcopy(state),
            lambda train_step, state, folder: train_step.averaged(state).__enter__(),
        ],
    )
    def test_a_state_that_shows_averages_is_not_used_as_if_it_were_trained(self, use, tmp_path):
        train_step, state = self.begun()
        before = fa.snapshot(state)
        with train_step.averaged(state):
            with pytest.raises(errors.AveragedError, match="hold averages"):
                use(train_step, state, tmp_path / "d")
            assert same(state.params, before.ema)
        assert same(fa.snapshot(state), before)
        assert not (tmp_path / "d").exists()

    def test_what_was_exchanged_is_put_back_whatever_happens(self):
        train_step, state = self.begun()
        before = fa.snapshot(state)

        def score(model, batch):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fa.evaluate(train_step, state, score, shards(), ema=True)
        assert same(fa.snapshot(state), before)

    @pytest.mark.parametrize("at", range(49))  # 24 copies there, 24 back, and one that does not come
    def test_an_exchange_that_fails_in_the_middle_is_undone(self, at):
        train_step, state = self.begun()
        before = fa.snapshot(state)
        with FailingCopies({at}), contextlib.suppress(MemoryError), train_step.averaged(state):
            pass
        assert same(fa.snapshot(state), before)
        train_step(state, batch_of(4))

    def test_a_state_that_can_not_be_put_back_is_dead(self):
        train_step, state = self.begun()
        with pytest.raises(MemoryError), FailingCopies({1, 2, 3}), train_step.averaged(state):
            pass
        with pytest.raises(errors.StaleStateError):
            fa.snapshot(state)


class FailingCopies(TorchFunctionMode):
    """In the body some calls of `clone` and `copy_` fail, by number. A copy that fails has written already."""

    def __init__(self, numbers):
        super().__init__()
        self.numbers, self.count = numbers, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.clone, torch.Tensor.copy_):
            self.count += 1
            if self.count - 1 in self.numbers:
                if func is torch.Tensor.copy_:
                    args[0].fill_(float("nan"))
                raise MemoryError
        return func(*args, **(kwargs or {}))


class TestReadOnly:
    @pytest.mark.parametrize(
        "write",
        [
            lambda tree: tree.update({"out.bias": torch.zeros(1)}),
            lambda tree: tree.__setitem__("out.bias", torch.zeros(1)),
            lambda tree: tree.pop("out.bias"),
            lambda tree: tree.clear(),
            lambda tree: tree.__ior__({}),
        ],
    )
    @pytest.mark.parametrize("field", ["params", "opt", "ema"])
    def test_writing_to_a_tree_of_a_state_raises(self, write, field):
        train_step = program(fa.with_ema(loss_fn, 0.5), optimizer=fa.adamw(0.1))
        state = train_step.init()
        with pytest.raises(errors.ReadOnlyError, match="read-only"):
            write(getattr(state, field))
        train_step(state, batch_of(4))

    def test_a_changed_copy_is_adopted(self):
        train_step = program()
        state = train_step.init()
        params = {**state.params, "out.bias": torch.full((1,), 7.0)}
        state = train_step.adopt(attrs.evolve(state, params=params))
        assert float(state.params["out.bias"].detach()) == 7.0
        doubled = fa.tree.map(lambda a, b: a + b, state.params, dict(params))
        assert float(doubled["out.bias"].detach()) == 14.0

    @pytest.mark.parametrize(
        ("change", "what"),
        [
            (
                lambda model: setattr(model, "out", nn.Linear(6, 1)),
                "out.bias was replaced|out.weight was replaced",
            ),
            (lambda model: setattr(model.out, "bias", nn.Parameter(torch.ones(1))), "out.bias was replaced"),
            (lambda model: model.add_module("extra", nn.Linear(1, 1)), "extra.weight was added"),
            (lambda model: setattr(model.out.weight, "data", torch.ones(1, 6)), "storage of out.weight"),
        ],
    )
    @pytest.mark.parametrize("use", ["step", "save", "evaluate", "snapshot", "adopt"])
    def test_a_parameter_that_was_replaced_raises(self, change, what, use, tmp_path):
        train_step = program()
        state = train_step.init()
        before = fa.snapshot(state)
        train_step.look(state, change)
        uses = {
            "step": lambda: train_step(state, batch_of(4)),
            "save": lambda: fa.save(tmp_path, state),
            "evaluate": lambda: fa.evaluate(train_step, state, lambda m, b: m(b[0]).sum(), shards()),
            "snapshot": lambda: fa.snapshot(state),
            "adopt": lambda: train_step.adopt(before),
        }
        with pytest.raises(errors.ReplacedParameterError, match=what):
            uses[use]()

    def test_what_registers_the_same_again_is_no_change(self):
        train_step = program()
        state = train_step.init()

        def again(model):
            model.out = model.out
            model.cache = nn.Module()

        train_step.look(state, again)
        train_step(state, batch_of(4))


class TestModulesOfATrainStepThatIsGone:
    @pytest.mark.parametrize("strategy", ["local", "ddp", "ddp(hook='bf16')"])
    def test_a_notebook_cell_runs_again(self, strategy):
        module = Net()
        for _ in range(3):
            train_step = program(model=module, strategy=strategy)
            state = train_step.init()
            state, _ = train_step(state, batch_of(4))
        assert state.step == 1

    def test_the_state_of_before_is_stale_then(self):
        module = Net()
        train_step = program(model=module)
        old = train_step.init()
        del train_step
        gc.collect()
        new = program(model=module)
        new.init()
        with pytest.raises(errors.StaleStateError):
            _ = old.params

    def test_frozen_parameters_and_patched_forwards_are_given_back(self):
        module = Net()
        first = program(fa.remat(loss_fn, units=("Block",)), model=module, frozen="inp.*")
        first.init()
        assert not module.inp.weight.requires_grad
        first.close()
        assert module.inp.weight.requires_grad
        assert all("forward" not in vars(block) for block in module.blocks)

    def test_a_state_alone_can_still_be_lent_and_saved(self, tmp_path):
        teacher = program().init()
        gc.collect()
        student = program(lambda m, b, given: ((m(b[0]) - given["t"](b[0])) ** 2).mean())
        student(student.init(seed=1), batch_of(4), given={"t": teacher})
        fa.save(tmp_path, teacher)


class TestStateOfAUsersTransform:
    def test_one_that_was_changed_in_place_is_not_used_again(self):
        """The error comes after an earlier transform counted in place: 3 for two steps, in silence."""
        fails = []

        def count(grads, own, info):
            own.add_(1)
            return grads, own

        def fragile(grads, own, info):
            if fails and fails.pop():
                raise RuntimeError("no luck")
            return grads, own

        def make():
            counted = fa.Transform("count", fa.Phase.GRADS, apply=count, init=lambda _: torch.zeros(()))
            return program(fa.Transform("fragile", fa.Phase.GRADS, apply=fragile)(counted(loss_fn)))

        train_step = make()
        state, _ = train_step(train_step.init(), batch_of(4))
        before = fa.snapshot(state)
        fails.append(True)
        with pytest.raises(RuntimeError, match="no luck"):
            train_step(state, batch_of(4))
        assert train_step.live_state is None
        state, _ = train_step(train_step.adopt(before), batch_of(4))
        assert float(state.transforms["count"]) == 2.0

    def test_one_that_was_not_changed_stays_live(self):
        def count(grads, own, info):
            return grads, own + 1

        def fail(grads, own, info):
            raise RuntimeError("no luck")

        counted = fa.Transform("count", fa.Phase.GRADS, apply=count, init=lambda _: torch.zeros(()))
        train_step = program(fa.Transform("fail", fa.Phase.GRADS, apply=fail)(counted(loss_fn)))
        state = train_step.init()
        with pytest.raises(RuntimeError, match="no luck"):
            train_step(state, batch_of(4))
        assert train_step.live_state is state
        assert float(state.transforms["count"]) == 0.0


class TestTreesOfAState:
    @pytest.mark.parametrize("strategy", ["local", "ddp", "fsdp"])
    def test_they_go_together_with_plain_dicts(self, strategy):
        train_step = program(strategy=strategy)
        state = train_step.init()
        values = {name: value.detach().clone() for name, value in state.params.items()}
        assert fa.tree.allclose(state.params, values)
        assert fa.tree.allclose(values, state.params)
        empty = dict.fromkeys(values)
        for pair in [(empty, state.params), (state.params, empty), (values, state.params)]:
            assert fa.tree.allclose(fa.tree.combine(*pair), values)
        other = {**values, "out.bias": values["out.bias"] + 1}
        assert not fa.tree.allclose(state.params, other)
        state, _ = train_step(state, batch_of(4))
        assert not fa.tree.allclose(state.params, values)
        train_step.close()

    def test_functional_call_takes_them(self):
        train_step = program()
        state = train_step.init()
        x, _ = batch_of(4)
        wanted = train_step.look(state, lambda model: model(x))
        found = train_step.look(state, lambda model: torch.func.functional_call(model, state.params, (x,)))
        assert torch.equal(wanted, found)
        with pytest.raises(errors.ReadOnlyError):
            state.params.update({"out.bias": state.params["out.bias"].detach()})
        with pytest.raises(errors.ReadOnlyError):
            state.params.update(more=state.params["out.bias"])
