"""An axis whose ranks train apart (local SGD of docs/extending.md): its state, its steps, and what may be saved."""

from __future__ import annotations

import os
import signal
import warnings

import attrs
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa
from fnaccel.errors import ArgumentError, CapabilityError, CheckpointError, Preempted
from fnaccel.extend import Hooks, Strategy, construct, finisher, maker, place, whole_engine
from tests.extend import page
from tests.tiny_models import Net, batch_of, loss_fn, program, whole, whole_params

LOCAL_SGD = "extending_page:local_sgd(2, every=3)"


def rows(step, rank):
    return batch_of(4, seed=10 * step + rank)


def by_hand(steps, every, lr, momentum, ranks=2):
    """The parameters of one model a rank, averaged with their moments after each few steps."""
    models = []
    for _ in range(ranks):
        torch.manual_seed(0)
        models.append(Net())
    rules = [torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum) for model in models]
    for step in range(steps):
        for rank, (model, rule) in enumerate(zip(models, rules, strict=True)):
            rule.zero_grad()
            loss = loss_fn(model, rows(step, rank))
            (loss.total / loss.weight).backward()
            rule.step()
        if (step + 1) % every == 0:
            for params in zip(*(model.parameters() for model in models), strict=True):
                mean = sum(param.detach() for param in params) / ranks
                moments = [
                    rule.state[param]["momentum_buffer"] for rule, param in zip(rules, params, strict=True)
                ]
                moment = sum(moments) / ranks
                for param, own in zip(params, moments, strict=True):
                    param.data.copy_(mean)
                    own.copy_(moment)
    return [dict(model.named_parameters()) for model in models]


def made(strategy=LOCAL_SGD):
    return program(loss_fn, strategy=strategy, optimizer=fa.sgd(0.05, momentum=0.9))


def trained(steps, folder=None, resume=None, stop=None):
    train_step = made()
    state = train_step.init(seed=0)
    if resume is not None:
        state = fa.restore(resume, like=state)
    while state.step < steps:
        state, _ = train_step(state, rows(state.step, train_step.mesh.batch_rank))
        if state.step == stop:
            fa.save(folder, state)
    return whole_params(state), state.transforms


def test_it_trains_as_one_model_a_rank_that_are_averaged(pools):
    found = pools.run(2, trained, 7)
    for (params, own), wanted in zip(found, by_hand(7, 3, 0.05, 0.9), strict=True):
        assert own == {"local_sgd": {"averages": 2}}
        for name, value in wanted.items():
            assert torch.allclose(params[name], value, atol=1e-6), name
    assert not torch.equal(found[0][0]["out.weight"], found[1][0]["out.weight"])


def test_a_run_that_goes_on_is_the_run_that_was_never_stopped(pools, tmp_path):
    straight = pools.run(2, trained, 11, tmp_path, None, 6)
    resumed = pools.run(2, trained, 11, None, tmp_path)
    for (params, own), (again, state) in zip(straight, resumed, strict=True):
        assert own == state == {"local_sgd": {"averages": 3}}
        assert fa.tree.allclose(again, params, rtol=0, atol=0)


def refused(folder, call):
    train_step = made()
    state = train_step.init(seed=0)
    for step in range(4):
        state, _ = train_step(state, rows(step, train_step.mesh.batch_rank))
    shards = fa.shard(DataLoader(TensorDataset(*batch_of(8)), batch_size=2))
    calls = {
        "evaluate": lambda: fa.evaluate(train_step, state, loss_fn, shards),
        "save": lambda: fa.save(folder, state),
        "save_async": lambda: fa.save_async(folder, state).wait(),
        "export": lambda: fa.interchange.export_hf(folder, state, config={}),
        "gather": lambda: fa.interchange.gather_state_dict(state),
    }
    try:
        calls[call]()
    except (ArgumentError, CheckpointError) as error:
        return str(error)
    return "it was done"


@pytest.mark.parametrize("call", ["save", "save_async", "export", "gather", "evaluate"])
def test_nothing_is_saved_or_exported_between_two_averages(pools, tmp_path, call):
    for text in pools.run(2, refused, tmp_path / "out", call):
        assert "after step 4 each rank holds values of its own" in text
        assert "step 6" in text
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def scanned(folder, every, steps, at=None):
    """The steps that are saved, and how the loop ended."""
    x, y = batch_of(400)
    train_step = made()
    state, ended = train_step.init(seed=0), ""
    shards = fa.shard(DataLoader(TensorDataset(x, y), batch_size=4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for state, _ in fa.scan(
                train_step, state, shards, steps=steps, save=fa.Autosave(folder, every=every)
            ):
                if state.step == at and train_step.mesh.world.rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
        except Preempted as stop:
            ended = f"stopped {stop.step}"
        except CheckpointError as error:
            ended = error.fix
    return [one.step for one in fa.checkpoint.checkpoints(folder)], ended


def test_a_loop_that_saves_waits_for_the_next_average(pools, tmp_path):
    saved, _ = pools.run(2, scanned, tmp_path / "a", 2, 9)[0]
    assert saved == [3, 6, 9]
    saved, ended = pools.run(2, scanned, tmp_path / "b", None, 60, 4)[0]
    assert (saved, ended) == ([6], "stopped 6")
    saved, ended = pools.run(2, scanned, tmp_path / "c", 3, 8)[0]
    assert saved == [3, 6]
    assert ended.startswith("train on to step 9")


@attrs.frozen
class Forgetful(page.LocalSgd):
    """It averages parameters, and forgets the moments."""

    maker = f"{__name__}:forgetful"


@maker
def forgetful(degree=-1, every=3):
    return Strategy((Forgetful(degree, every),))


@finisher(Forgetful)
def build_forgetful(build, axis):
    built = construct(build.spec.model, build.seed)
    place(built, build)
    group = build.spec.mesh.group("loss")

    def average(updated):
        for param in updated.params.values():
            torch.distributed.all_reduce(param, group=group)
            param /= 2

    engine = whole_engine(
        "forgetful", built, build, hooks=Hooks(after_update=average), shares_buffers=False,
        next_whole=lambda step: step,
    )  # fmt: skip
    return engine, built


def forgotten(folder):
    train_step = made(f"{__name__}:forgetful(2)")
    state = train_step.init(seed=0)
    state, _ = train_step(state, rows(0, train_step.mesh.batch_rank))
    with pytest.raises(CheckpointError) as raised:
        fa.save(folder, state)
    return str(raised.value)


def test_moments_that_an_axis_forgets_to_average_are_found_by_the_save(pools, tmp_path):
    for text in pools.run(2, forgotten, tmp_path):
        assert "state.opt differs between ranks (on rank 1 of the mesh axis 'loss' from rank 0)" in text
    assert not list(tmp_path.iterdir())


def test_the_plan_says_that_gradients_stay_on_their_rank():
    with fa.simulate(ranks=2):
        text = str(made().plan)
    assert "over micro-batches of each rank" in text
    assert "average parameters and moments after each 3 steps" in text


def test_a_transform_of_the_same_name_raises():
    kept = fa.Transform(
        name="local_sgd", phase=fa.Phase.GRADS, apply=lambda g, state, info: (g, state), init=dict
    )
    with fa.start(device="cpu"):
        train_step = program(kept(loss_fn), strategy="extending_page:local_sgd(1)")
        with pytest.raises(CapabilityError, match="both keep a state named 'local_sgd'"):
            train_step.init()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_parity_check_of_the_page(ranks):
    page.check_parity("extending_page:averaged()", ranks)
    # one update and one average are linear, so they are the update of the averaged gradient
    page.check_parity("extending_page:local_sgd(every=1)", ranks)
    if ranks > 1:
        with pytest.raises(fa.errors.TreeMismatchError):
            page.check_parity("extending_page:local_sgd(every=4)", ranks)


def of_parts(every, next_whole, after=lambda updated: updated.own):
    """Register an axis of these parts."""

    @attrs.frozen
    class Parts(page.LocalSgd):
        maker = f"{__name__}:of_parts"

    @finisher(Parts)
    def build(build, axis):
        built = construct(build.spec.model, build.seed)
        place(built, build)
        hooks = Hooks(init=lambda: {"n": 0}, after_update=after)
        return whole_engine(
            "parts", built, build, hooks=hooks, shares_buffers=False, next_whole=next_whole
        ), built

    return Strategy((Parts(-1, every),))


def refused_parts(next_whole, after):
    train_step = program(loss_fn, strategy=of_parts(3, next_whole, after))
    state = train_step.init(seed=0)
    state, _ = train_step(state, rows(0, train_step.mesh.batch_rank))
    fa.save("never", state)


def said(next_whole=None, after=None):
    """The error of an axis of these parts, by names: functions of a module can't be sent to ranks."""
    steps = {
        "none": None,
        "returns None": lambda step: None,
        "back": lambda step: step - 1,
        "each": lambda step: step,
    }
    after = {
        None: lambda updated: updated.own,
        "key": lambda u: {"n": u.own["n"], "m": 1},
        "None": lambda u: None,
    }[after]
    try:
        refused_parts(steps[next_whole], after)
    except fa.errors.FnaccelError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"next_whole": "none"}, "does not say when its ranks hold the same values"),
        ({"next_whole": "returns None"}, "next_whole(1) returned None"),
        ({"next_whole": "back"}, "next_whole(1) returned 0"),
        ({"next_whole": "each", "after": "key"}, "the state of axis 'parts' changed: m was absent"),
        ({"next_whole": "each", "after": "None"}, "the state of axis 'parts' changed"),
    ],
)
def test_what_an_axis_whose_ranks_train_apart_may_not_do(pools, options, text):
    for found in pools.run(2, said, **options):
        assert text in found


def skipping(steps):
    """The number of updates after each step. Rank 1 leaves out the first one."""
    train_step = program(fa.skip_nonfinite(loss_fn), strategy=LOCAL_SGD)
    state, updates = train_step.init(seed=0), []
    for step in range(steps):
        x, y = rows(step, rank := train_step.mesh.batch_rank)
        state, _ = train_step(state, (x * float("nan") if rank and not step else x, y))
        updates.append(int(state.updates))
    return updates


def test_a_rank_leaves_out_updates_by_itself_and_counts_agree_at_an_average(pools):
    assert pools.run(2, skipping, 4) == [[1, 2, 3, 4], [0, 1, 3, 4]]


def saved_alone(folder):
    train_step = made("extending_page:local_sgd(1, every=3)")
    state, _ = train_step(train_step.init(seed=0), rows(0, 0))
    return fa.save(folder, state).name


def test_one_rank_alone_holds_the_same_at_each_step(pools, tmp_path):
    assert pools.run(1, saved_alone, tmp_path) == ["step-0000000001"]


def ragged(strategy, steps):
    """Parameters, and slots of this rank, after steps of uneven rows."""
    train_step = program(loss_fn, strategy=strategy, optimizer=fa.sgd(0.05, momentum=0.9))
    state = train_step.init(seed=0)
    for step in range(steps):
        rank = train_step.mesh.batch_rank
        state, _ = train_step(state, batch_of(2 + rank, seed=10 * step + rank))
    found = whole_params(state), {path: whole(value) for path, value in fa.tree.items(state.opt)}
    train_step.close()
    return found


def test_an_axis_around_fsdp_is_local_sgd_of_sharded_replicas(pools):
    found = pools.run(4, ragged, "extending_page:apart(2, every=3) * fsdp(2)", 6)
    wanted = pools.run(4, ragged, "local_sgd(2, every=3, weighting='rows') * fsdp(2)", 6)
    for one, other in zip(found, wanted, strict=True):
        assert all(fa.tree.allclose(a, b, rtol=0, atol=1e-7) for a, b in zip(one, other, strict=True))
