"""Models without an optimizer: frozen ones, copies, and teachers that are averages of a student."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

import fnaccel as fa
from fnaccel.errors import ArgumentError
from tests.tiny_models import batch_of, whole


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.drop, self.down = (
            nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2),
        )  # fmt: skip

    def forward(self, x):
        return self.down(self.drop(self.norm(self.up(x))))


class Plain(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))


def distilled(model, batch):
    x, _ = batch
    with torch.no_grad():
        wanted = model["teacher"](x)
    error = (model["student"](x) - wanted - 0.1) ** 2
    aux = {"teaches": fa.Max(float(model["teacher"].training))}
    return fa.Mean(error.sum(), weight=len(x), aux=aux)


def made(strategy, step, build=Net, **options):
    model = fa.distribute({"student": build, "teacher": "student"}, strategy)
    return fa.train_step(step, model=model, optimizer={"student": fa.adamw(0.05)}, **options)


def part_of(train_step, number):
    count, rank = train_step.mesh.batch_size, train_step.mesh.batch_rank
    return tuple(part.chunk(count)[rank] for part in batch_of(8, number))


def values_of(state, name, what="params"):
    return {
        path.removeprefix(f"{name}/"): whole(value).clone()
        for path, value in fa.tree.items(getattr(state, what))
        if path.startswith(name)
    }


def trained(strategy, steps, step=distilled, build=Net, folder=None, resumed=False):
    train_step = made(strategy, step, build)
    state = train_step.init(seed=3)
    if resumed:
        state = fa.restore(folder, like=state)
    found = [(values_of(state, "student"), values_of(state, "teacher"))]
    for number in steps:
        state, metrics = train_step(state, part_of(train_step, number))
        found.append((values_of(state, "student"), values_of(state, "teacher")))
    if folder is not None and not resumed:
        fa.save(folder, state)
    rates = sorted(name for name in metrics if name.startswith("lr"))
    buffers = values_of(state, "student", "buffers"), values_of(state, "teacher", "buffers")
    return found, rates, float(metrics["teaches"]), buffers, sorted(values_of(state, "", "opt"))


def close(first, second):
    return fa.tree.allclose(first, second, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("strategy", "ranks"), [("local", 1), ("ddp", 2), ("fsdp", 2)])
def test_a_model_without_an_optimizer_is_frozen_in_evaluation_mode(pools, strategy, ranks):
    for found, rates, training, (_, buffers), slots in pools.run(ranks, trained, strategy, range(3)):
        begin, *_, end = found
        assert close(begin[0], begin[1])  # a copy
        assert fa.tree.allclose(begin[1], end[1], rtol=0, atol=0)
        assert not close(begin[0], end[0])
        assert rates == ["lr/student"]
        assert training == 0.0
        assert buffers["norm.num_batches_tracked"] == 0
        assert not [path for path in slots if "teacher" in path]


def raw(steps):
    """Plain torch: AdamW on the student, the average by hand."""
    torch.manual_seed(3)
    student = Plain()
    teacher = copy.deepcopy(student)
    optimizer = torch.optim.AdamW(student.parameters(), 0.05)
    for number, kept in zip(steps, (0.9, 0.7, 0.5), strict=True):
        x, _ = batch_of(8, number)
        error = (student(x) - teacher(x).detach() - 0.1) ** 2
        optimizer.zero_grad()
        (error.sum() / len(x)).backward()
        optimizer.step()
        with torch.no_grad():
            for own, new in zip(teacher.parameters(), student.parameters(), strict=True):
                own.mul_(kept).add_(new, alpha=1 - kept)
    return student.state_dict(), teacher.state_dict()


def averaged(loss_fn):
    return fa.transforms.momentum_teacher(loss_fn, decay=fa.schedules.linear(0.9, 0.5, total=2))


def captured(loss_fn):
    return fa.compile(averaged(loss_fn), scope="step", backend="eager")


def accumulated(loss_fn):
    return fa.accumulate(averaged(loss_fn), 2)


@pytest.mark.parametrize("step", [averaged, captured, accumulated])
@pytest.mark.parametrize(("strategy", "ranks"), [("local", 1), ("ddp", 2), ("fsdp", 2)])
def test_a_teacher_is_the_average_of_its_student(pools, tmp_path, strategy, ranks, step):
    student, teacher = raw(range(3))
    first = pools.run(ranks, trained, strategy, range(2), step(distilled), Plain, tmp_path)
    again = pools.run(ranks, trained, strategy, range(2, 3), step(distilled), Plain, tmp_path, True)
    for (before, *_), (after, *_) in zip(first, again, strict=True):
        assert fa.tree.allclose(before[-1], after[0], rtol=0, atol=0)
        assert fa.tree.allclose(after[-1][0], dict(student), rtol=1e-5, atol=1e-5)
        assert fa.tree.allclose(after[-1][1], dict(teacher), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("strategy", "ranks"), [("local", 1), ("ddp", 2)])
def test_buffers_of_a_teacher_are_those_of_its_student(pools, strategy, ranks):
    for *_, (student, teacher), _ in pools.run(ranks, trained, strategy, range(2), averaged(distilled)):
        assert fa.tree.allclose(student, teacher, rtol=0, atol=0)
        assert teacher["norm.num_batches_tracked"] == 2


def test_a_skipped_update_moves_no_teacher():
    with fa.start():
        train_step = made("local", fa.skip_nonfinite(averaged(distilled)), Plain)
        state = train_step.init()
        x, y = batch_of(8, 0)
        before = values_of(state, "")
        state, metrics = train_step(state, (x / 0, y))
        assert metrics["skipped"] == 1
        assert fa.tree.allclose(values_of(state, ""), before, rtol=0, atol=0)


def models(**sources):
    return fa.distribute(sources, "local")


def test_what_a_copy_and_a_teacher_can_not_be():
    for sources in ({"a": Plain, "b": "c"}, {"a": Plain, "b": "b"}, {"a": Plain, "b": "a", "c": "b"}):
        with pytest.raises(ArgumentError, match="is to be a copy of"):
            models(**sources)
    with fa.start():
        both = models(student=Plain, teacher="student")
        one = fa.adamw(0.1)
        for optimizer in ({"student": one, "tutor": None}, {"student": None}, {}):
            with pytest.raises(ArgumentError, match="one optimizer for each model that is trained"):
                fa.train_step(distilled, model=both, optimizer=optimizer)
        with pytest.raises(ArgumentError, match="no model has an optimizer"):
            fa.train_step(distilled, model=both, optimizer={"student": None, "teacher": None})
        with pytest.raises(ArgumentError, match="the teacher 'teacher' has an optimizer"):
            fa.train_step(averaged(distilled), model=both, optimizer=one)
        three = models(student=Plain, teacher="student", other=Plain)
        with pytest.raises(ArgumentError, match="the student 'student' has no optimizer"):
            fa.train_step(averaged(distilled), model=three, optimizer={"other": one})
        with pytest.raises(ArgumentError, match="teacher='teacher', and the models are one, without a name"):
            fa.train_step(averaged(distilled), model=fa.distribute(Plain), optimizer=one)
        with pytest.raises(ArgumentError, match=r"can't decay by 1\.5"):
            fa.transforms.momentum_teacher(distilled, decay=1.5)
        other = models(student=Plain, teacher=lambda: nn.Sequential(nn.Linear(3, 2)))
        train_step = fa.train_step(averaged(distilled), model=other, optimizer={"student": one})
        with pytest.raises(ArgumentError, match="'student' has not the tensors of 'teacher'"):
            train_step(train_step.init(), batch_of(8, 0))


def test_the_plan_shows_a_frozen_model_as_frozen():
    with fa.start():
        text = str(made("local", distilled).plan)
    assert "student: adamw" in text
    assert "teacher: " not in text
    assert "teacher/*" in text


def test_a_record_of_a_teacher_is_unpickled_before_its_function_is_asked_for():
    """A module with the name of the function would take its place in the package."""
    code = "import sys, pickle, fnaccel as fa; pickle.loads(sys.stdin.buffer.read()); fa.transforms.momentum_teacher()"
    record = pickle.dumps(fa.transforms.momentum_teacher().apply)
    subprocess.run([sys.executable, "-c", code], input=record, check=True, timeout=60)
