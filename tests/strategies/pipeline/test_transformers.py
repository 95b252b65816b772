"""Models of transformers on stages: as they come from their configuration, with padding and dropout."""

from __future__ import annotations

import peft
import pytest
import torch
import transformers

import fnaccel as fa
from fnaccel.strategies.pipeline.split import split_model
from fnaccel.testing import assert_close
from tests.tiny_models import whole_params

STEPS, RATE, LENGTH, VOCABULARY, LAYERS = 2, 0.1, 8, 31, 4
SMALL = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
}  # fmt: skip
CAUSAL = SMALL | {
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 16, "pad_token_id": 0, "use_cache": False,
}  # fmt: skip


def gpt2():
    """Its embedding is tied to its head, and it has dropout in three places."""
    config = transformers.GPT2Config(
        n_embd=16, n_layer=LAYERS, n_head=4, vocab_size=VOCABULARY, n_positions=16, use_cache=False,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CAUSAL))


def mistral():
    return transformers.MistralForCausalLM(transformers.MistralConfig(**CAUSAL, sliding_window=4))


def qwen3():
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**CAUSAL, head_dim=4, tie_word_embeddings=True)
    )


def bert():
    config = transformers.BertConfig(
        **SMALL, vocab_size=VOCABULARY, max_position_embeddings=16, pad_token_id=0
    )
    return transformers.BertForMaskedLM(config)


def vit():
    return transformers.ViTForImageClassification(transformers.ViTConfig(**SMALL, image_size=8, patch_size=4))


def mixtral():
    """Its loss has a term of the routers of all layers."""
    config = transformers.MixtralConfig(
        **CAUSAL, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5
    )
    return transformers.MixtralForCausalLM(config)


def hidden_states():
    model = llama()
    model.config.output_hidden_states = True
    return model


def t5():
    config = transformers.T5Config(
        d_model=16, d_ff=24, d_kv=4, num_layers=2, num_heads=4, vocab_size=VOCABULARY, pad_token_id=0,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def bart():
    """Nothing draws random numbers after the last block of the encoder."""
    config = transformers.BartConfig(
        d_model=16, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=24, decoder_ffn_dim=24,
        encoder_attention_heads=4, decoder_attention_heads=4, vocab_size=VOCABULARY, max_position_embeddings=16,
        pad_token_id=0, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2, use_cache=False,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config)


def lora():
    """Low-rank weights of the last layer alone: the other stages train nothing."""
    options = peft.LoraConfig(target_modules=["q_proj"], r=2, layers_to_transform=[LAYERS - 1])
    return peft.get_peft_model(llama(), options)


def loss_fn(model, batch):
    output = model(**batch)
    weight = batch["labels"].numel()
    total = output.loss
    if model.config.output_hidden_states:
        total = total + 0.1 * sum(each.square().mean() for each in output.hidden_states)
    return fa.Mean(total * weight, weight=weight)


def rows_of(step, part, images):
    generator = torch.Generator().manual_seed(10 * step + part)
    if images:
        pixels = torch.randn(6, 3, 8, 8, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(0, 2, (6,), generator=generator)}
    ids = torch.randint(1, VOCABULARY, (6, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[::2, 6:] = 0
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids}


def trained(model, strategy, change=lambda step: step):
    step = change(fa.clip_norm(fa.accumulate(loss_fn, 2), 0.5))
    train_step = fa.train_step(step, model=fa.distribute(model, strategy), optimizer=fa.sgd(RATE))
    state, losses, norms = train_step.init(seed=0), [], []
    for number in range(STEPS):
        state, metrics = train_step(state, rows_of(number, train_step.mesh.batch_rank, model is vit))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    return losses, norms, whole_params(state)


@pytest.mark.parametrize("model", [llama, qwen3, mistral, mixtral])
def test_blocks_are_the_layers_of_the_plan_that_transformers_brings(model):
    """The embedding before them is on the first stage, and the norm after them on the last one."""
    built = model()
    prefix, plan = built.base_model_prefix, list(built.config.base_model_pp_plan)
    split = split_model(built, "even", {}, (0, 1))
    assert plan == ["embed_tokens", "layers", "norm"]
    assert [element.path for element in split.elements] == [f"{prefix}.layers.{i}" for i in range(LAYERS)]
    assert [split.names[f"{prefix}.{name}.weight"] for name in ("embed_tokens", "norm")] == [0, 1]


INTERLEAVED = "pipeline(2, schedule='interleaved', virtual=2)"
ZERO_BUBBLE = "pipeline(2, schedule='zero_bubble', virtual=2)"
ROWS = [
    *((model, 2, "pipeline(2)") for model in (gpt2, llama, mistral, qwen3, bert, vit, mixtral, hidden_states, lora)),
    *((mixtral, ranks, text) for ranks, text in ((4, "pipeline(4)"), (2, "pipeline(2, schedule='gpipe')"), (2, INTERLEAVED))),
    *((model, 2, ZERO_BUBBLE) for model in (gpt2, bert, mixtral, lora)),
    *((model, 4, "pipeline(4)") for model in (gpt2, bert, hidden_states, lora)),
    (hidden_states, 2, INTERLEAVED),
    (t5, 2, "pipeline(2, split=('decoder.block.0',))"),
    (t5, 2, "pipeline(2, split=('encoder.block.1',))"),
    (bart, 2, "pipeline(2, split=('model.decoder.layers.0',))"),
    (t5, 4, "pipeline(4, split=('encoder.block.1', 'decoder.block.0', 'decoder.block.1'))"),
    (qwen3, 4, "pipeline(2) * tensor(2)"),
]  # fmt: skip


@pytest.mark.long_except("^(gpt2|mixtral|bert|t5|bart)-2-pipeline.2|^mixtral-2")
@pytest.mark.parametrize(
    ("model", "ranks", "strategy"),
    ROWS,
    ids=[f"{model.__name__}-{ranks}-{text}" for model, ranks, text in ROWS],
)
def test_stages_compute_what_one_process_does(pools, model, ranks, strategy):
    (expected,) = pools.run(1, trained, model, "local")
    for found in pools.run(ranks, trained, model, strategy):
        for values, wanted in zip(found, expected, strict=True):
            assert_close(values, wanted)


@pytest.mark.long_except("mixtral")
@pytest.mark.parametrize("model", [mixtral, qwen3, bert])
def test_halves_of_a_backward_are_those_of_blocks_that_are_recomputed(pools, model):
    (expected,) = pools.run(1, trained, model, "local")
    for found in pools.run(2, trained, model, ZERO_BUBBLE, fa.remat):
        for values, wanted in zip(found, expected, strict=True):
            assert_close(values, wanted)


def test_t5_is_no_chain_and_the_error_says_how_to_split_it(pools):
    with pytest.raises(fa.errors.CapabilityError, match=r"split=\('decoder.block.0',\)"):
        pools.run(2, trained, t5, "pipeline(2)")
