"""The examples with models of transformers: as a user starts them, and beside the same loop in PyTorch alone."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
import transformers

import fnaccel as fa
from tests.examples.running import ROOT, result

pytestmark = pytest.mark.launcher
LAYOUTS = [(None, "local"), (2, "fsdp")]
# each start imports transformers, which takes seconds: `make test` has one start of these, `make test-all` both
STARTS = pytest.mark.parametrize(
    "layouts", [LAYOUTS[1:], pytest.param(LAYOUTS, marks=pytest.mark.long)], ids=["two ranks", "one curve"]
)


@pytest.fixture
def example(monkeypatch):
    """Import an example as a module, as if it stood beside the test."""

    def load(name):
        monkeypatch.syspath_prepend(str(ROOT / "examples"))
        return importlib.import_module(name)

    return load


def raw_losses(build_model, loader, rate, updates):
    """The losses of a loop in PyTorch alone, with the mean loss that the model computes."""
    torch.manual_seed(0)
    model = build_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    with fa.start(device="cpu"):  # for the order of the samples
        batches = list(fa.shard(loader))[:updates]
    losses = []
    for batch in batches:
        loss = model(**batch.data).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def losses_of(loss_fn, build_model, loader, rate, updates):
    with fa.start(device="cpu"):
        model = fa.distribute(build_model, "local")
        train_step = fa.train_step(loss_fn, model=model, optimizer=fa.adamw(rate))
        scan = fa.scan(train_step, train_step.init(seed=0), fa.shard(loader), steps=updates)
        return [float(metrics["loss"]) for _, metrics in scan]


@pytest.mark.long
def test_nlp_classification_learns_and_its_curve_is_one(tmp_path):
    flags = ("--rows", "640", "--epochs", "2")
    runs = [
        result(tmp_path / "run.json", "nlp_classification", *flags, ranks=ranks, strategy=strategy)
        for ranks, strategy in LAYOUTS
    ]
    for found in runs:
        assert len(found["losses"]) == 32
        assert found["losses"][-1] < 0.6 * found["losses"][0]
        assert found["accuracy"] > 0.85
        assert found["losses"] == pytest.approx(runs[0]["losses"], abs=1e-4)


def test_nlp_classification_is_the_loop_in_pytorch(example):
    nlp = example("nlp_classification")
    loader, _ = nlp.data(rows=320, batch=32)
    found = losses_of(nlp.loss_fn, nlp.build_model, loader, 1e-3, 8)
    assert found == pytest.approx(raw_losses(nlp.build_model, loader, 1e-3, 8), abs=1e-5)


@pytest.mark.long
def test_causal_lm_has_one_curve_exports_and_resumes_on_other_ranks(tmp_path, example):
    common = ("--global-batch", "8")
    directory, exported = tmp_path / "run", tmp_path / "hf"
    expected = result(tmp_path / "a.json", "causal_lm", *common, "--steps", "12")
    found = result(
        tmp_path / "b.json", "causal_lm", *common, "--steps", "12", "--dir", str(directory), "--export", str(exported),
        "--sample", "5", ranks=2, strategy="fsdp", launch=("--accumulate", "2"),
    )  # fmt: skip
    assert len(found["losses"]) == 12
    assert found["losses"][-1] < found["losses"][0] - 0.2
    assert found["losses"] == pytest.approx(expected["losses"], abs=1e-4)
    assert found["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-4)
    resumed = result(tmp_path / "c.json", "causal_lm", *common, "--steps", "14", "--dir", str(directory))
    assert (resumed["first"], len(resumed["losses"])) == (13, 2)

    clm = example("causal_lm")
    model = clm.GPT2LMHeadModel.from_pretrained(exported).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    _, loader = clm.data(tokenizer, 8)
    nats, tokens = 0.0, 0
    with torch.no_grad():
        for batch in loader:
            count = (batch["labels"][:, 1:] != -100).sum()
            nats, tokens = nats + model(**batch).loss * count, tokens + count
    assert math.exp(nats / tokens) == pytest.approx(found["perplexity"], rel=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_causal_lm_is_the_loop_in_pytorch(example, family):
    clm = example("causal_lm")
    loader, _ = clm.data(clm.build_tokenizer(), 8, files=4)
    build = clm.MODELS[family]
    found = losses_of(clm.loss_fn, build, loader, 3e-3, 6)
    assert found == pytest.approx(raw_losses(build, loader, 3e-3, 6), abs=1e-5)


@pytest.mark.long
@STARTS
def test_lora_has_one_curve_and_peft_computes_the_same(tmp_path, layouts):
    flags = ("--base-steps", "10", "--steps", "30")
    runs = [
        result(tmp_path / "run.json", "lora", *flags, ranks=ranks, strategy=strategy)
        for ranks, strategy in layouts
    ]
    for found in runs:
        assert found["difference"] < 1e-5
        assert found["losses"][-1] < found["losses"][0] - 0.1
        assert found["losses"] == pytest.approx(runs[0]["losses"], abs=1e-4)


@pytest.mark.long
@STARTS
def test_vision_learns_and_its_curve_is_one(tmp_path, layouts):
    runs = [
        result(tmp_path / "run.json", "vision", "--epochs", "4", ranks=ranks, strategy=strategy)
        for ranks, strategy in layouts
    ]
    for found in runs:
        assert found["accuracy"] > 0.7
        # 88 updates at a high rate: rounding differs, and grows
        assert found["losses"][:20] == pytest.approx(runs[0]["losses"][:20], abs=1e-4)


@pytest.mark.long
@STARTS
def test_masked_lm_learns_on_one_and_two_ranks(tmp_path, layouts):
    flags = ("--steps", "30", "--global-batch", "8")
    runs = [
        result(tmp_path / "run.json", "masked_lm", *flags, ranks=ranks, strategy=strategy)["held_out"]
        for ranks, strategy in layouts
    ]
    # the same model and masks, before training
    assert [before for before, _ in runs] == pytest.approx([runs[0][0]] * len(runs), abs=1e-5)
    for before, after in runs:
        assert after < before - 0.5
