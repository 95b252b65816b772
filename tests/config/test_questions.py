"""The questions of `fnaccel config`: which are asked, and the recipes of all answers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fnaccel.cli.config.checking import mistakes_of
from fnaccel.config import from_yaml, to_yaml
from fnaccel.config.questions import Machine, Question, next_question, recipe_of
from fnaccel.errors import ConfigError

GPUS = Machine(accelerators=4, bf16=True, installed=("deepspeed", "torchao"))
TEXTS = {"hosts": "a, b", "checkpoints": "runs", "trackers": "jsonl", "time": "1:00:00"}


def answered(machine, given=()):
    """All answers: the given ones, and defaults."""
    given, answers = dict(given), {}
    while (question := next_question(machine, answers)) is not None:
        raw = given.pop(question.name, None)
        answers[question.name] = question.parse("x" if raw is None and question.required else raw)
    assert not given, f"not asked: {given}"
    return answers


@pytest.mark.parametrize(
    ("machine", "given", "text"),
    [
        (Machine(), {}, "launch:\n  ranks: 1\n  cpu: true"),
        (GPUS, {}, "strategy: ddp\nprecision: bf16\nlaunch:\n  ranks: 4"),
        (GPUS, {"strategy": "fsdp", "offload": "yes", "remat": "y"}, "strategy: fsdp(offload=True)\nprecision: bf16\nremat: true\nlaunch:\n  ranks: 4"),
        (GPUS, {"strategy": "deepspeed", "stage": "3", "ranks": 2}, "strategy: deepspeed(stage=3)\nprecision: bf16\nlaunch:\n  ranks: 2"),
        (GPUS, {"strategy": "fsdp with tensor"}, "strategy: fsdp * tensor(4)\nprecision: bf16\nlaunch:\n  ranks: 4"),
        (GPUS, {"where": "same command", "address": "10.0.0.1", "strategy": "hsdp", "clip_norm": "1"}, "strategy: hsdp(2, 4)\nprecision: bf16\nclip_norm: 1\nlaunch:\n  ranks: 4\n  machines: 2\n  address: 10.0.0.1"),
        (GPUS, {"where": "ssh", "hosts": "a, b"}, "strategy: ddp\nprecision: bf16\nlaunch:\n  ranks: 4\n  carrier: ssh\n  hosts:\n    names:\n    - a\n    - b"),
        (GPUS, {"where": "ssh", "hosts": "./hosts"}, "strategy: ddp\nprecision: bf16\nlaunch:\n  ranks: 4\n  carrier: ssh\n  hosts:\n    file: ./hosts"),
        (GPUS, {"checkpoints": "runs", "save_every": "50", "trackers": "jsonl, wandb", "seed": 3}, "strategy: ddp\nprecision: bf16\nrun:\n  seed: 3\ncheckpoint:\n  directory: runs\n  every: 50\ntracking:\n  trackers:\n  - jsonl\n  - wandb\nlaunch:\n  ranks: 4"),
    ],
)  # fmt: skip
def test_recipes(machine, given, text):
    assert to_yaml(recipe_of(machine, answered(machine, given))) == text + "\n"


@given(data=st.data())
@settings(max_examples=120, deadline=None)
def test_any_answers_give_a_recipe_that_can_run(data):
    machine = data.draw(
        st.sampled_from([Machine(), GPUS, Machine(accelerators=2, fp8=True), Machine(tpu=True)])
    )
    answers = {}
    while (question := next_question(machine, answers)) is not None:
        if question.kind == "choice":
            raw = data.draw(st.sampled_from([name for name, _ in question.choices]))
        elif question.kind == "yes or no":
            raw = data.draw(st.booleans())
        elif question.kind == "number":
            raw = data.draw(st.integers(max(1, int(question.least)), 4))
        else:
            raw = TEXTS.get(question.name, "x" if question.required else "")
        answers[question.name] = question.parse(raw)
    recipe = recipe_of(machine, answers)
    assert mistakes_of(recipe) == []
    assert from_yaml(to_yaml(recipe)) == recipe


@pytest.mark.parametrize(
    ("machine", "given", "never"),
    [
        (Machine(), {}, {"machines", "device", "offload", "stage", "save_every", "restarts", "hosts", "strategy"}),
        (GPUS, {"device": "cpu"}, {"offload"}),
        (GPUS, {"where": "tpu"}, {"ranks", "compile", "device"}),
    ],
)  # fmt: skip
def test_only_what_matters_is_asked(machine, given, never):
    assert not never & answered(machine, given).keys()


@pytest.mark.parametrize(
    ("kind", "raw", "what"),
    [
        ("number", "many", "'many' is no answer to"),
        ("number", "0", "0 is no answer to"),
        ("yes or no", "perhaps", "'perhaps' is no answer to"),
        ("choice", "c", "'c' is no answer to"),
        ("choice", "3", "'3' is no answer to"),
        ("text", " ", "an empty answer is no answer to"),
    ],
)
def test_wrong_answers(kind, raw, what):
    choices = (("a", "the first"), ("b", "the second"))
    default = "" if kind == "text" else 1
    question = Question(name="q", text="Which?", kind=kind, default=default, choices=choices, required=True)
    with pytest.raises(ConfigError, match=what):
        question.parse(raw)


def test_a_choice_by_number():
    question = Question(name="q", text="?", kind="choice", default="a", choices=(("a", ""), ("b", "")))
    assert question.parse("2") == "b"
