"""transformers' models under context parallelism train as they do on one process, with padding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)  # fmt: skip

import fnaccel as fa
from tests.interchange.hf_models import gpt2
from tests.tiny_models import whole_params

LENGTH, STEPS = 8, 3


def llama(**options):
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, hidden_size=8, intermediate_size=12,
            vocab_size=17, max_position_embeddings=12, **options,
        )
    )  # fmt: skip


def mistral():
    return MistralForCausalLM(
        MistralConfig(
            num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, hidden_size=8, intermediate_size=12,
            vocab_size=17, max_position_embeddings=12, sliding_window=3,
        )
    )  # fmt: skip


def bert():
    return BertForMaskedLM(
        BertConfig(
            num_hidden_layers=2, num_attention_heads=2, hidden_size=8, intermediate_size=12, vocab_size=17,
            max_position_embeddings=12, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def plain_gpt2():
    model = gpt2()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attn_dropout"):
            module.attn_dropout.p = 0.0
    return model


MODELS = {"gpt2": plain_gpt2, "llama": llama, "bert": bert, "mistral": mistral}


def batch_of(step, padding="right", causal=True):
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 17, (3, LENGTH), generator=generator)
    labels = ids.clone()
    positions = torch.arange(LENGTH).expand(3, -1).contiguous()
    batch = {"input_ids": ids, "position_ids": positions}
    if padding == "packed":  # two sequences in each row: transformers looks for them without a cache
        batch["use_cache"] = False
        batch["position_ids"] = torch.cat([torch.arange(5), torch.arange(3)]).expand(3, -1).contiguous()
    elif padding:
        mask = torch.ones(3, LENGTH, dtype=torch.int64)
        mask[1, -2 - step :] = 0
        mask[2, -1:] = 0
        batch["attention_mask"] = mask.flip(1) if padding == "left" else mask
        labels[batch["attention_mask"] == 0] = -100
    if not causal:
        return batch | {"labels": labels}
    return batch | {"shift_labels": F.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()}


def loss_fn(model, batch):
    batch = dict(batch)
    labels = batch.pop("labels", None)
    labels = batch.pop("shift_labels", labels)
    logits = model(**batch).logits.flatten(0, 1)
    return fa.Mean(
        F.cross_entropy(logits, labels.flatten(), reduction="sum", ignore_index=-100),
        weight=(labels != -100).sum(),
    )


def own_loss(model, batch):
    """The loss of the model itself."""
    labels = batch.get("shift_labels", batch.get("labels"))
    options = {name: value for name, value in batch.items() if name not in ("labels", "shift_labels")}
    shifted = {"shift_labels": labels} if "shift_labels" in batch else {}
    mean = model(**options, labels=labels, **shifted).loss
    return fa.Mean.of_tokens(mean, labels, shift=False)


def trained(strategy, name, padding="right", loss=loss_fn, compiled=False):
    step = fa.compile(loss, "step", backend="aot_eager") if compiled else loss
    train_step = fa.train_step(step, model=fa.distribute(MODELS[name], strategy), optimizer=fa.sgd(0.3))
    state = train_step.init(seed=0)
    losses = []
    for step in range(STEPS):
        state, metrics = train_step(state, batch_of(step, padding, causal=name != "bert"))
        losses.append(float(metrics["loss"]))
    ids = batch_of(0)["input_ids"]
    looked = train_step.look(state, lambda model: model(input_ids=ids).logits)  # the whole rows
    return losses, whole_params(state), looked


ROWS = [
    ("gpt2", "right", loss_fn), ("gpt2", "left", loss_fn), ("gpt2", None, own_loss),
    ("llama", "right", loss_fn), ("llama", "packed", loss_fn), ("llama", "left", own_loss),
    ("bert", "right", loss_fn), ("bert", None, own_loss),
    ("mistral", "left", loss_fn), ("mistral", "packed", loss_fn),
]  # fmt: skip


def compare(results, expected):
    for losses, params, looked in results:
        assert losses == pytest.approx(expected[0], abs=1e-5)
        for name, value in expected[1].items():
            torch.testing.assert_close(params[name], value, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(looked, expected[2], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("name", "padding", "loss"), ROWS)
def test_a_model_of_transformers(pools, name, padding, loss):
    expected = pools.run(1, trained, "local", name, padding, loss)[0]
    compare(pools.run(2, trained, "context(2)", name, padding, loss), expected)


def test_contiguous_parts(pools):
    """Labels of a part of each row are no view: transformers' losses flatten them."""
    expected = pools.run(1, trained, "local", "llama", "right")[0]
    compare(pools.run(2, trained, "context(2, balance=False)", "llama", "right"), expected)


@pytest.mark.long
def test_a_captured_model(pools):
    expected = pools.run(1, trained, "local", "llama")[0]
    compare(pools.run(2, trained, "context(2)", "llama", compiled=True), expected)


def t5():
    return T5ForConditionalGeneration(
        T5Config(d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2, vocab_size=17)
    )


def classifier():
    return BertForSequenceClassification(
        BertConfig(
            num_hidden_layers=1, num_attention_heads=2, hidden_size=8, intermediate_size=12, vocab_size=17
        )
    )


def refused(build, change):
    """The message of the error, and whether the state is live afterwards."""
    train_step = fa.train_step(loss_fn, model=fa.distribute(build, "context(2)"), optimizer=fa.sgd(0.3))
    live = False
    try:
        state = train_step.init(seed=0)
        live = True
        train_step(state, change(batch_of(0)))
    except fa.errors.CapabilityError as error:
        return str(error), live and state.step == 0
    raise AssertionError("nothing was raised")


def without_positions(batch):
    return {name: value for name, value in batch.items() if name != "position_ids"}


REFUSED = [
    (t5, dict, "T5ForConditionalGeneration takes no position_ids", False),
    (classifier, dict, "BertForSequenceClassification reads single tokens", False),
    (llama, without_positions, "called with no position_ids", True),
]


@pytest.mark.parametrize(("build", "change", "message", "live"), REFUSED)
def test_what_a_part_of_a_sequence_can_not_be(pools, build, change, message, live):
    for text, alive in pools.run(2, refused, build, change):
        assert message in text
        assert alive is live


def calls_refused():
    """Messages of calls that are wrong for a part of a sequence."""
    losses = {
        "labels": lambda model, batch: (
            model(
                input_ids=batch["input_ids"], position_ids=batch["position_ids"], labels=batch["shift_labels"]
            ).loss
        ),
        "mask": lambda model, batch: model(
            input_ids=batch["input_ids"],
            position_ids=batch["position_ids"],
            attention_mask=batch["input_ids"] > 0,
        ).logits.sum(),
    }
    messages = {}
    for name, loss in losses.items():
        train_step = fa.train_step(loss, model=fa.distribute(llama, "context(2)"), optimizer=fa.sgd(0.3))
        state = train_step.init(seed=0)
        with pytest.raises(fa.errors.CapabilityError) as raised:
            train_step(state, batch_of(0))
        messages[name] = str(raised.value)
    return messages


def test_calls_that_are_wrong_for_a_part(pools):
    for messages in pools.run(2, calls_refused):
        assert "would shift the labels of each part" in messages["labels"]
        assert "attention_mask has 4 of 8 tokens" in messages["mask"]
