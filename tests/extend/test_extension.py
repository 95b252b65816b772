"""Each extension point, used as docs/extending.md says: a parity row and a checkpoint row each."""

from __future__ import annotations

import textwrap

import attrs
import pytest
import torch

import fnaccel as fa
from fnaccel.errors import (
    ArgumentError,
    AxisProductError,
    CapabilityError,
    ConfigError,
    LoaderError,
    UnknownNameError,
)
from fnaccel.testing import oracle_run
from fnaccel.world.world import current
from tests.extend import TEXT, page
from tests.tiny_models import Net, batch_of, loss_fn, program, whole_params

STEPS = 3
ROWS = [(strategy, ranks) for strategy, ranks in [
    ("extending_page:averaged()", 1), ("extending_page:averaged()", 2), ("extending_page:copies(2)", 2),
    ("ddp(2) * extending_page:copies(2)", 4), ("fsdp(2) * extending_page:copies(2)", 4), ("extending_page:clipper()", 1),
    ("hsdp(2, 2) * extending_page:copies(2)", 8),
]]  # fmt: skip
ids = [f"{strategy.replace('extending_page:', '')}-{ranks}" for strategy, ranks in ROWS]


def batches(rank, steps=STEPS):
    """Ragged batches, one for each place along the batch axis."""
    return [batch_of(3 + 2 * rank, seed=10 * step + rank) for step in range(steps)]


def made(strategy, optimizer=None, **options):
    return program(fa.clip_norm(loss_fn, 0.5), strategy=strategy, optimizer=optimizer, **options)


def trained(strategy, optimizer=None, folder=None, like=None):
    """The losses and parameters of a few steps; saved, or begun from what was saved."""
    train_step = made(strategy, optimizer)
    state = train_step.init(seed=0)
    if like is not None:
        state = fa.restore(like, like=state)
        return [], whole_params(state), {name: fa.tree.map(full, slots) for name, slots in state.opt.items()}
    losses = []
    for batch in batches(train_step.mesh.batch_rank):
        state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"]))
    if folder is not None:
        fa.save(folder, state)
    return losses, whole_params(state), {name: fa.tree.map(full, slots) for name, slots in state.opt.items()}


def full(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def expected(parts, **options):
    return oracle_run(Net, loss_fn, list(zip(*map(batches, range(parts)), strict=True)), clip=0.5, **options)


def agrees(found, wanted):
    losses, params, _ = found
    assert losses == pytest.approx(wanted.losses, abs=1e-5)
    for name, value in wanted.params.items():
        assert torch.allclose(params[name], value, atol=1e-5), name


@pytest.mark.long_except(r"^(?!hsdp)")
@pytest.mark.parametrize(("strategy", "ranks"), ROWS, ids=ids)
def test_an_axis_or_a_runtime_trains_as_the_oracle(pools, strategy, ranks):
    parts = ranks // 2 if "copies" in strategy else ranks
    for found in pools.run(ranks, trained, strategy):
        agrees(found, expected(parts, lr=0.1))


@pytest.mark.long_except(r"^(?!hsdp)")
@pytest.mark.parametrize(("strategy", "ranks"), ROWS, ids=ids)
def test_checkpoints_go_both_ways(pools, tmp_path, strategy, ranks):
    _, params, _ = pools.run(ranks, trained, strategy, None, tmp_path / "theirs")[0]
    _, restored, _ = pools.run(1, trained, "local", None, None, tmp_path / "theirs")[0]
    assert fa.tree.allclose(restored, params)
    _, params, _ = pools.run(1, trained, "local", None, tmp_path / "ours")[0]
    for _, restored, _ in pools.run(ranks, trained, strategy, None, None, tmp_path / "ours"):
        assert fa.tree.allclose(restored, params)


@pytest.mark.long_except("ddp.*adamw")
@pytest.mark.parametrize("make", [
    lambda: fa.adamw(0.05), lambda: fa.optim.from_torch(torch.optim.NAdam, lr=0.05), lambda: fa.optim.adafactor(0.05),
], ids=["adamw", "nadam", "adafactor"])  # fmt: skip
@pytest.mark.parametrize("other", ["fsdp(3)", "ddp(2) * extending_page:copies(2)"])
def test_slots_beside_copies_go_to_any_layout(pools, tmp_path, make, other):
    """Moments are sharded over two ranks, and each shard lies on two more. One of each is written."""
    optimizer = make()
    _, params, slots = pools.run(4, trained, "fsdp(2) * extending_page:copies(2)", optimizer, tmp_path / "a")[
        0
    ]
    ranks = 3 if other == "fsdp(3)" else 4
    for _, restored, found in pools.run(ranks, trained, other, optimizer, None, tmp_path / "a"):
        assert fa.tree.allclose(restored, params, rtol=0, atol=0)
        assert fa.tree.allclose(found, slots, rtol=0, atol=0)
    _, params, slots = pools.run(ranks, trained, other, optimizer, tmp_path / "b")[0]
    beside = "fsdp(2) * extending_page:copies(2)"
    for _, restored, found in pools.run(4, trained, beside, optimizer, None, tmp_path / "b"):
        assert fa.tree.allclose(restored, params, rtol=0, atol=0)
        assert fa.tree.allclose(found, slots, rtol=0, atol=0)


@pytest.mark.long
@pytest.mark.parametrize("scope", ["block", "step"])
def test_compiled_beside_copies(pools, scope, tmp_path):
    for found in pools.run(4, compiled, "fsdp(2) * extending_page:copies(2)", scope, tmp_path):
        agrees(found, expected(2, lr=0.1))
    _, restored, _ = pools.run(1, trained, "local", None, None, tmp_path)[0]
    assert fa.tree.allclose(restored, found[1])


def compiled(strategy, scope, folder):
    step = fa.compile(fa.clip_norm(loss_fn, 0.5), scope, backend="aot_eager")
    train_step = program(step, strategy=strategy)
    state, losses = train_step.init(seed=0), []
    for batch in batches(train_step.mesh.batch_rank):
        state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"]))
    fa.save(folder, state)
    return losses, whole_params(state), None


def by_hand(bound):
    """The rows of each batch that this rank reads in a loop of its own, or what that loop raises."""
    train_step = made("ddp(2) * extending_page:copies(2)")
    state = train_step.init(seed=0)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch_of(8)), batch_size=4)
    shards = fa.shard(loader)
    if bound:
        shards = shards.on(train_step.mesh)
        assert len(shards) == 2
    try:
        rows = [batch.data[0].tolist() for batch in shards]
    except ArgumentError as error:
        train_step.close()
        assert len(list(shards)) == 2  # a train step that is closed reads nothing
        return str(error)
    for batch in shards:
        state, _ = train_step(state, batch)
    return rows


def test_a_loop_by_hand_gives_copies_the_same_rows_or_raises(pools):
    found = pools.run(4, by_hand, True)
    x = batch_of(8)[0]
    assert found[0] == found[1] == [x[:2].tolist(), x[4:6].tolist()]
    assert found[2] == found[3] == [x[2:4].tolist(), x[6:].tolist()]
    for text in pools.run(4, by_hand, False):
        assert "shares the rows in 2 parts" in text
        assert "shards.on(train_step.mesh)" in text


@pytest.mark.parametrize(("strategy", "ranks"), [("local", 1), ("ddp", 2), ("fsdp", 2)])
def test_a_kernel_trains_as_the_oracle_and_is_restored_anywhere(pools, tmp_path, strategy, ranks):
    kernel = page.heavy_ball(0.1, momentum=0.5)
    found = pools.run(ranks, trained, strategy, kernel, tmp_path)
    for each in found:
        agrees(each, expected(ranks, lr=0.1, momentum=0.5))
    _, params, slots = pools.run(1, trained, "local", kernel, None, tmp_path)[0]
    assert fa.tree.allclose(params, found[0][1])
    assert fa.tree.allclose(slots, found[0][2])
    assert any(value.abs().sum() > 0 for value in fa.tree.leaves(slots))


def test_a_kernel_leaves_a_skipped_update_out():
    with fa.start(device="cpu"):
        bad = fa.skip_nonfinite(lambda m, b: fa.Mean(m(b[0]).sum() * float("nan"), 4))
        train_step = program(bad, optimizer=page.heavy_ball(0.1))
        state = train_step.init()
        before = fa.snapshot(state)
        state, _ = train_step(state, batch_of(4))
        assert fa.tree.allclose(fa.snapshot(state).params, before.params, rtol=0, atol=0)
        assert fa.tree.allclose(fa.snapshot(state).opt, before.opt, rtol=0, atol=0)


def optimistic_by_hand(ranks):
    """Parameters after a loop in plain PyTorch over the rows of all ranks."""
    torch.manual_seed(0)
    net = Net()
    last = [torch.zeros_like(param) for param in net.parameters()]
    for parts in zip(*map(batches, range(ranks)), strict=True):
        x, y = (torch.cat(columns) for columns in zip(*parts, strict=True))
        loss = loss_fn(net, (x, y))
        grads = torch.autograd.grad(loss.total / loss.weight, tuple(net.parameters()))
        ahead = [2 * grad - old for grad, old in zip(grads, last, strict=True)]
        norm = torch.cat([each.flatten() for each in ahead]).norm()
        with torch.no_grad():
            for param, each in zip(net.parameters(), ahead, strict=True):
                param -= 0.1 * each * min(1.0, float(1.0 / norm))
        last = grads
    return {name: param.detach() for name, param in net.named_parameters()}


def trained_by_a_part(strategy, step=loss_fn):
    train_step = program(step, strategy=strategy, optimizer=page.optimistic(0.1))
    state = train_step.init(seed=0)
    for batch in batches(train_step.mesh.batch_rank):
        state, _ = train_step(state, batch)
    return whole_params(state), sorted(state.opt["out.bias"])


@pytest.mark.parametrize(("strategy", "ranks"), [("local", 1), ("ddp", 2), ("fsdp", 2)])
def test_a_part_of_an_optimizer_is_the_loop_by_hand(pools, strategy, ranks):
    wanted = optimistic_by_hand(ranks)
    for params, slots in pools.run(ranks, trained_by_a_part, strategy):
        assert slots == ["last"]
        for name, value in wanted.items():
            assert torch.allclose(params[name], value, atol=1e-6), name


@pytest.mark.long
def test_a_part_of_an_optimizer_in_a_captured_step():
    with fa.start(device="cpu"):
        params, _ = trained_by_a_part("local", fa.compile(loss_fn, scope="step", backend="aot_eager"))
    assert fa.tree.allclose(params, optimistic_by_hand(1))


def test_the_plan_shows_what_a_runtime_and_an_axis_say():
    with fa.start(device="cpu"):
        plan = str(made("extending_page:clipper()").plan)
        assert "clip_norm  max_norm=0.5  [by clipper]" in plan.replace("       ", "  ").replace("   ", "  ")
        assert "1 ranks hold each parameter" in str(made("extending_page:copies()").plan)
        with pytest.raises(CapabilityError, match="copies would draw different"):
            made("extending_page:copies()", rng="stream")


def places():
    mesh = made("ddp(2) * extending_page:copies(2)").mesh
    return current().rank, mesh.batch_rank, mesh.coordinate("copies"), list(mesh.degrees)


def test_an_axis_has_its_place_in_the_mesh(pools):
    assert pools.run(4, places) == [
        (rank, rank // 2, rank % 2, ["dp_replicate", "copies"]) for rank in range(4)
    ]


def test_the_text_of_a_strategy_names_a_module():
    strategy = fa.strategy("ddp(2) * extending_page:copies(2)")
    assert strategy == fa.ddp(2) * page.copies(2)
    assert str(strategy) == "ddp(2) * extending_page:copies(2)"
    assert fa.strategy(str(strategy)) == strategy
    with pytest.raises(ConfigError, match="'no_such_module' can't be imported"):
        fa.strategy("no_such_module:copies(2)")
    with pytest.raises(UnknownNameError, match=r"no strategy 'copy'[\s\S]*did you mean 'copies'"):
        fa.strategy("extending_page:copy(2)")


def test_axes_that_nothing_places_or_carries_out_raise():
    class Lost(page.Copies):
        mesh_axis = "lost"
        follows = "nowhere"

    @attrs.frozen
    class Idle(page.Axis):
        maker = "idle"
        degree: int = 1

    with fa.start(device="cpu"):
        with pytest.raises(AxisProductError, match="follows 'nowhere'"):
            made(fa.strategies.Strategy((Lost(1),)))
        with pytest.raises(CapabilityError, match="idle neither changes modules nor makes an engine"):
            made(fa.strategies.Strategy((Idle(),)))


def test_extensions_that_return_something_else_are_named(monkeypatch):
    page.maker(page_function("nothing", lambda: None))
    with pytest.raises(ConfigError, match="extending_page:nothing returned NoneType"):
        fa.strategy("extending_page:nothing()")

    class Pile:
        pass

    page.reader(Pile)(lambda pile: [1])
    with pytest.raises(LoaderError, match="the reader of Pile returned list"):
        fa.shard(Pile())

    @attrs.frozen
    class Half(page.Axis):
        maker = "half"
        degree: int = 1

    page.finisher(Half)(lambda build, axis: page.build_clipper(build, axis)[0])
    page.delegator(Half)(page.clips)
    with fa.start(device="cpu"), pytest.raises(CapabilityError, match="returned Engine"):
        made(fa.strategies.Strategy((Half(),))).init()


def test_a_finisher_that_places_no_model_is_named(monkeypatch):
    @attrs.frozen
    class Bare(page.Axis):
        maker = "bare"
        degree: int = 1

    monkeypatch.setattr(page, "place", lambda built, build: None)
    page.finisher(Bare)(page.build_clipper)
    page.delegator(Bare)(page.clips)
    with fa.start(device="cpu"), pytest.raises(CapabilityError, match=r"build_clipper left out[\s\S]*place"):
        made(fa.strategies.Strategy((Bare(),))).init()


def test_an_axis_that_renames_parameters_is_named():
    @attrs.frozen
    class Wrapping(page.Axis):
        maker = "wrapping"
        degree: int = 1

        def apply(self, built, mesh):
            for module in built.modules.values():
                for name, child in list(module.named_children()):
                    setattr(module, name, torch.nn.Sequential(child))

    with fa.start(device="cpu"), pytest.raises(CapabilityError, match="wrapping names a parameter"):
        made(fa.strategies.Strategy((Wrapping(),))).init()


@pytest.mark.parametrize("axes", [(5,), [page.Copies(2)], (fa.ddp(),), (page.Copies,)])
def test_a_strategy_holds_axes(axes):
    with pytest.raises(ArgumentError, match="no tuple of axes"):
        fa.strategies.Strategy(axes)


def test_a_kernel_that_keeps_slots_for_no_parameter_is_named(monkeypatch):
    def bind(self, groups):
        made = page.HeavyBallUpdate(groups)
        made.slots = {name.upper(): slots for name, slots in made.slots.items()}
        return made

    monkeypatch.setattr(page.HeavyBallKernel, "bind", bind)
    with (
        fa.start(device="cpu"),
        pytest.raises(ArgumentError, match=r"slots for 'BLOCKS\.0\.MIX\.BIAS', which is no parameter"),
    ):
        made(fa.local(), optimizer=page.heavy_ball(0.1)).init()


def page_function(name, fn):
    fn.__module__, fn.__name__ = page.__name__, name
    return fn


def test_a_tracker_and_a_reader():
    x, y = batch_of(12)
    tracker = page.ListTracker()
    with fa.start(device="cpu"):
        train_step = program(loss_fn)
        seen = [
            metrics["loss"]
            for _, metrics in fa.scan(
                train_step, train_step.init(), fa.shard(page.Shelf(x, y, rows=4)), epochs=1, track=tracker
            )
        ]
    assert len(seen) == 3
    assert [step for step, _ in tracker.rows] == [1, 2, 3]
    assert tracker.finished
    assert [row["loss"] for _, row in tracker.rows] == pytest.approx([float(loss) for loss in seen])


@pytest.mark.long
@pytest.mark.launcher
def test_the_launcher_takes_the_text(launcher):
    blocks = TEXT.split("```python\n")[1:]
    launcher.write("\n".join(block.split("```")[0] for block in blocks), "axes.py")
    script = launcher.write(
        textwrap.dedent("""
        import torch, fnaccel as fa
        recipe = fa.config.recipe()
        with fa.start(device="cpu"):
            train_step = fa.train_step(
                lambda m, b: fa.Mean(m(b).square().sum(), len(b)),
                model=fa.distribute(lambda: torch.nn.Linear(2, 1), recipe.strategy), optimizer=fa.sgd(0.1),
            )
            state, metrics = train_step(train_step.init(), torch.ones(4, 2))
            print(train_step.plan.layout)
        """)
    )
    ended = launcher("-n", 2, "--strategy", "axes:averaged()", script)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith("axes:averaged(): 2 ranks")
