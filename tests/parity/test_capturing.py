"""What goes wrong while a step is captured: whose error it is, and that the state lives."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import fx

import fnaccel as fa
from fnaccel import errors
from fnaccel.strategies.captured_buckets import MIB, begin_when_ready, bucket_bytes, lay_out
from tests.tiny_models import Net, batch_of, loss_fn, program, whole_params


@pytest.fixture(autouse=True)
def world():
    with fa.start() as started:
        yield started


def failing(model, batch):
    raise KeyError("labels")


def detached(model, batch):
    return fa.Mean(loss_fn(model, batch).total.detach(), weight=1)


def reading(model, batch):
    loss = loss_fn(model, batch)
    return loss if loss.total.item() < 100.0 else fa.Mean(loss.total * 2, loss.weight)


@pytest.mark.parametrize(
    ("loss", "error", "text"),
    [
        (failing, KeyError, "labels"),
        (detached, errors.LossError, "detached"),
        (reading, errors.NotCompiledError, "in reading"),
    ],
)
def test_an_error_before_the_update_leaves_the_state_alive(loss, error, text):
    train_step = program(fa.compile(loss, "step", backend="aot_eager"))
    state = train_step.init()
    before = whole_params(state)
    for _ in range(2):
        with pytest.raises(error, match=text):
            train_step(state, batch_of(4))
    assert all(torch.equal(value, before[name]) for name, value in whole_params(state).items())


@pytest.mark.long
def test_shapes_that_keep_changing_are_named():
    step = fa.compile(loss_fn, "step", backend="aot_eager", dynamic=False, limit=2)
    train_step = program(step)
    state = train_step.init()
    for rows in (4, 5, 6, 7):
        state, metrics = train_step(state, batch_of(rows))
    assert metrics["recompilations"] == 3
    assert train_step.compilation.graphs == 4
    with pytest.raises(errors.RecompileLimitError, match=r"3 times more.*2 are allowed.*\[6, 3\].*\[7, 3\]"):
        train_step(state, batch_of(8))
    assert "donated" not in repr(state)


def test_a_marked_dimension_is_compiled_once():
    step = fa.compile(loss_fn, "step", backend="aot_eager", dynamic={"*": 0}, limit=0)
    train_step = program(step)
    state = train_step.init()
    for rows in range(4, 12):
        state, metrics = train_step(state, batch_of(rows))
    assert metrics["recompilations"] == 0
    assert train_step.compilation.graphs == 1


def test_equal_blocks_share_one_compilation():
    for step in (loss_fn, fa.remat(loss_fn)):
        train_step = program(fa.compile(step, "block", backend="aot_eager"))
        train_step(train_step.init(), batch_of(4))
        assert train_step.compilation.graphs == 1


@pytest.mark.long
def test_train_steps_do_not_use_up_each_other_s_limit():
    for width in range(12):
        train_step = program(fa.compile(loss_fn, "step", backend="aot_eager", dynamic=False))
        train_step(train_step.init(), batch_of(width + 1))
        assert train_step.compilation.graphs == 1
        train_step.close()


def test_the_plan_says_what_is_compiled_and_why():
    chosen = {
        "scope step (chosen: no hooks in the way": fa.compile(loss_fn),
        "scope loss (chosen: remat needs": fa.remat(fa.compile(loss_fn)),
        "scope block": fa.compile(loss_fn, "block"),
    }
    for text, step in chosen.items():
        assert text in str(program(step).plan)


def test_the_plan_says_what_is_not_captured():
    own = fa.Transform("half", fa.Phase.GRADS, apply=lambda named, own, info: (named, own))
    foreign = fa.optim.from_torch(torch.optim.RMSprop, lr=0.01)
    plan = str(program(own(fa.clip_norm(fa.compile(loss_fn), 1.0)), optimizer=foreign).plan)
    assert "note: half, RMSprop can't be captured: clipping and updates run after the graph" in plan
    assert "captured" not in str(program(fa.clip_norm(fa.compile(loss_fn), 1.0)).plan)
    assert "stay gathered (ZeRO-2)" in str(
        program(fa.compile(loss_fn, backend="aot_eager"), strategy="fsdp").plan
    )


@pytest.mark.parametrize("option", ["reshard_after_forward=2", "forward_prefetch=1"])
def test_an_option_of_fsdp_that_hooks_carry_out_is_not_captured(option):
    assert "scope step" in str(program(fa.compile(loss_fn), strategy="fsdp").plan)
    assert "scope block" in str(program(fa.compile(loss_fn), strategy=f"fsdp({option})").plan)
    with pytest.raises(errors.CapabilityError, match=f"{option[:-2]}=...\\) is carried out by hooks"):
        program(fa.compile(loss_fn, "step"), strategy=f"fsdp({option})")


def test_a_lent_model_and_its_borrower_are_captured():
    def distilled(model, batch, given):
        target = given["teacher"](batch[0])
        return fa.Mean((model(batch[0]) - target).square().sum(), weight=len(batch[0]))

    teacher = fa.train_step(loss_fn, model=fa.distribute(Net, "local"), optimizer=None)
    lent = teacher.init(seed=1)
    results = []
    for step in (distilled, fa.compile(distilled, "step", backend="aot_eager")):
        student = program(step)
        state = student.init()
        for call in range(3):
            state, _ = student(state, batch_of(4, call), given={"teacher": lent})
        results.append(whole_params(state))
    for name, value in results[0].items():
        assert torch.allclose(value, results[1][name], atol=1e-6)


@pytest.mark.long
def test_compiled_code_goes_where_it_is_told(tmp_path, monkeypatch):
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "elsewhere")
    with fa.start(compile_cache=tmp_path / "compiled"):
        train_step = program(fa.compile(loss_fn, "step"))
        train_step(train_step.init(), batch_of(4))
    assert any((tmp_path / "compiled").rglob("*"))


class TestBuckets:
    def test_a_bucket_is_an_eighth_of_the_gradients_within_bounds(self):
        assert [bucket_bytes(size * MIB) // MIB for size in (1, 8, 80, 800)] == [1, 1, 10, 25]

    def test_the_last_parameter_travels_first_and_dtypes_apart(self):
        tensors = [
            torch.zeros(MIB // 4),
            torch.zeros(MIB // 4),
            torch.zeros(3, dtype=torch.bfloat16),
            torch.zeros(5),
        ]
        assert lay_out(tensors, 1.0) == ((3,), (2,), (1,), (0,))
        assert lay_out(tensors, 2.5) == ((3, 1, 0), (2,))


LOGGER = logging.getLogger("a.library")


def noisy(model, batch):
    LOGGER.warning("rows: %s", len(batch[0]))
    return loss_fn(model, batch)


def test_what_a_library_logs_is_no_obstacle():
    train_step = program(fa.compile(noisy, "step", backend="aot_eager"))
    train_step(train_step.init(), batch_of(4))
    assert train_step.compilation.graphs == 1


def test_dimensions_that_do_not_exist_are_an_error():
    for dynamic in ({"tokens": 0}, {"0": 7}):
        train_step = program(fa.compile(loss_fn, "step", backend="aot_eager", dynamic=dynamic))
        with pytest.raises(errors.ArgumentError, match="names no dimension of the batch"):
            train_step(train_step.init(), batch_of(4))


def test_settings_that_torch_refuses_are_an_error():
    for settings in ({"mode": "fastest"}, {"backend": "nothing"}):
        with pytest.raises(errors.ArgumentError, match="does not take"):
            program(fa.compile(loss_fn, "step", **settings)).init()


@pytest.mark.parametrize("aux", [{"loss": torch.zeros(())}, {"rows": torch.zeros(3)}])
def test_aux_that_can_t_be_reported_changes_nothing(aux):
    def telling(model, batch):
        return fa.Mean(loss_fn(model, batch).total, weight=1, aux=aux)

    train_step = program(fa.compile(telling, "step", backend="aot_eager"))
    state = train_step.init()
    with pytest.raises(errors.LossError):
        train_step(state, batch_of(4))
    assert "donated" not in repr(state)


@pytest.mark.parametrize(
    ("in_order", "order"), [(True, "a b c last early zeros"), (False, "zeros a early b c last")]
)
def test_a_reduction_begins_where_its_gradients_are_there(in_order, order):
    """In the order of all ranks: zeros of a parameter that a rank does not use need nothing."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(torch.ops.aten.neg.default, (x,), name="a")
    b = graph.call_function(torch.ops.aten.neg.default, (a,), name="b")
    c = graph.call_function(torch.ops.aten.neg.default, (b,), name="c")

    def reduced(value, name, group="0"):
        flat = graph.call_function(torch.ops.aten.cat.default, ([value],))
        return graph.call_function(
            torch.ops._c10d_functional.all_reduce.default, (flat, "sum", group), name=name
        )

    zeros = graph.call_function(torch.ops.aten.full.default, ([4], 0.0))
    graph.output([reduced(c, "last"), reduced(a, "early"), reduced(zeros, "zeros"), reduced(a, "other", "1")])
    reduces = begin_when_ready(graph, "all_reduce", {"0"}, in_order=in_order)
    graph.lint()
    assert [node.name for node in graph.nodes if node.name in order.split()] == order.split()
    assert [node.name for node in reduces] == ["last", "early", "zeros"]
