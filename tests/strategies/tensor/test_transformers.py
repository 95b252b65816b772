"""Models of transformers under tensor parallelism: as they come from their configuration, with padding."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
import transformers

import fnaccel as fa
from fnaccel import errors
from fnaccel.testing import oracle_run
from tests.tiny_models import whole_params

STEPS, RATE, LENGTH, VOCABULARY = 3, 0.1, 8, 31


def gpt2():
    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=16,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama():
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=16, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def qwen3():
    """Its norms of query and key act on each head, so ranks have parts of their gradients."""
    config = transformers.Qwen3Config(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, head_dim=4,
        num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=16, pad_token_id=0,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config)


def bert():
    config = transformers.BertConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=VOCABULARY, max_position_embeddings=16, pad_token_id=0,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def t5():
    config = transformers.T5Config(
        d_model=16, d_ff=24, d_kv=4, num_layers=2, num_heads=4, vocab_size=VOCABULARY,
        dropout_rate=0.0, pad_token_id=0, decoder_start_token_id=0, feed_forward_proj="gated-gelu",
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def rows_of(step, rank):
    """Tokens of which the last ones are padding, of another number in each row."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    rows = (4, 3)[rank]
    tokens = torch.randint(1, VOCABULARY, (rows, LENGTH), generator=generator)
    lengths = torch.randint(3, LENGTH + 1, (rows, 1), generator=generator)
    mask = (torch.arange(LENGTH) < lengths).long()
    return {"input_ids": tokens * mask, "attention_mask": mask}


def loss_fn(model, batch):
    tokens, mask = batch["input_ids"], batch["attention_mask"]
    more = {"decoder_input_ids": tokens} if model.config.model_type == "t5" else {}
    logits = model(input_ids=tokens, attention_mask=mask, use_cache=False, **more).logits
    labels = tokens[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
    total = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="sum")
    return fa.Mean(total, weight=(labels != -100).sum())


def trained(make, strategy):
    # torch 2.13 warns of T5's blocks under fsdp, since they return the position bias, a view
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    train_step = fa.train_step(
        fa.clip_norm(loss_fn, 1.0), model=fa.distribute(make, strategy), optimizer=fa.sgd(RATE)
    )
    state, losses = train_step.init(seed=0), []
    for number in range(STEPS):
        state, metrics = train_step(state, rows_of(number, train_step.mesh.batch_rank))
        losses.append(float(metrics["loss"]))
    cut = [name for name, value in state.params.items() if hasattr(value, "placements")]
    return losses, whole_params(state), cut


@pytest.mark.long_except("gpt2|bert")
@pytest.mark.parametrize(
    ("make", "strategy"),
    [
        (gpt2, "tensor(2)"), (gpt2, "tensor(2, sequence=True)"), (gpt2, "fsdp(2) * tensor(2)"),
        (llama, "tensor(2)"), (llama, "tensor(2, sequence=True)"), (llama, "fsdp(2) * tensor(2, 'llama')"),
        (qwen3, "tensor(2)"), (qwen3, "fsdp(2) * tensor(2)"),
        (bert, "tensor(2)"), (bert, "ddp(2) * tensor(2, sequence=True)"),
        (t5, "tensor(2)"), (t5, "fsdp(2) * tensor(2)"),
    ],
)  # fmt: skip
def test_training_is_that_of_one_process(pools, make, strategy):
    ranks = 4 if "*" in strategy else 2
    parts = ranks // 2
    expected = oracle_run(
        make, loss_fn, [[rows_of(number, part) for part in range(parts)] for number in range(STEPS)],
        lr=RATE, clip=1.0,
    )  # fmt: skip
    for losses, params, cut in pools.run(ranks, trained, make, strategy):
        assert losses == pytest.approx(expected.losses, abs=1e-5)
        assert cut
        for name, value in expected.params.items():
            torch.testing.assert_close(params[name], value, atol=1e-5, rtol=1e-5)


def generated(make, strategy):
    train_step = fa.train_step(loss_fn, model=fa.distribute(make, strategy), optimizer=fa.sgd(RATE))
    state = train_step.init(seed=0)
    prompt = torch.tensor([[5, 7, 9]])

    def sample(model):
        return model.generate(prompt, max_new_tokens=5, do_sample=False).tolist()

    return train_step.look(state, sample)


@pytest.mark.parametrize("make", [gpt2, llama, t5])
def test_generation_gives_the_same_tokens(pools, make):
    expected = pools.run(1, generated, make, "local")[0]
    assert pools.run(2, generated, make, "tensor(2)") == [expected] * 2


def test_a_mixture_of_experts_says_what_it_is():
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    with pytest.raises(
        errors.CapabilityError, match=r"mixture of experts.*'moe_tp_experts'(.|\n)*fa\.fsdp\(\)"
    ):
        fa.strategies.footprint(lambda: transformers.MixtralForCausalLM(config), "fsdp(2) * tensor(2)", 4)
