"""Deliberate bugs of context parallelism: attention that sees other tokens, or gradients that miss some."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PARITY = "tests/strategies/context/test_parity.py"
FOLDER = "strategies/context"

MUTANTS = [
    Mutant(
        "gathered chunks that stay in the order of the ranks", f"{FOLDER}/order.py",
        "torch.cat([chunks[:, 0], chunks[:, 1].flip(0)])", "torch.cat([chunks[:, 0], chunks[:, 1]])",
        (PARITY, "-k", "share and causal-nothing-nothing or four and gather"),
    ),
    Mutant(
        "gradients of chunks in the order of the sequence", f"{FOLDER}/split.py",
        "by_rank = ctx.chunks.by_rank(grads[0]).contiguous()", "by_rank = grads[0].contiguous()",
        (PARITY, "-k", "share and causal-nothing-nothing"),
    ),
    Mutant(
        "rows of a late chunk that see the tokens after them", f"{FOLDER}/gather.py",
        "visible = at[first:, None] >= at[None, :]", "visible = at[first:, None] >= at[None, :] - 1",
        (PARITY, "-k", "share and causal-nothing-nothing"),
    ),
    Mutant(
        "a ring without the keys before a chunk", f"{FOLDER}/ring.py", "if key_first <= first:", "if key_first == first:",
        (PARITY, "-k", "share and causal and ring and clip"),
    ),
    Mutant(
        "a ring whose gradients do not come home", f"{FOLDER}/ring.py", "        of_both = arriving.wait()", "        arriving.wait()",
        (PARITY, "-k", "share and causal and ring and clip"),
    ),
    Mutant(
        "softmaxes merged without their weights", f"{FOLDER}/blocks.py",
        "return first[0] * weights[0] + second[0] * weights[1], total", "return (first[0] + second[0]) / 2, total",
        (PARITY, "-k", "share and none and ring"),
    ),
    Mutant(
        "masks of other heads", f"{FOLDER}/heads.py", "mask = split.gather(numbers, -2).to(mask.dtype)", "mask = mask.repeat(1, 1, 2, 1)",
        (PARITY, "-k", "share and rows and heads"),
    ),
    Mutant(
        "a mask over keys in the order of the ranks", f"{FOLDER}/ring.py", "mask = chunks.cut(mask, -1, source)",
        "mask = chunks.cut(mask, -1)", (PARITY, "-k", "share and keys and ring"),
    ),
    Mutant(
        "attention of recomputed blocks that sees one rank", "program/update.py",
        "with micro_batches.around, UpdateGuard(instance, state, micro_batches) as guard:", "with UpdateGuard(instance, state, micro_batches) as guard:",
        (PARITY, "-k", "share and causal-nothing-nothing"),
    ),
    Mutant(
        "weights of whole rows", f"{FOLDER}/weights.py", "weight and weight == rows_of(batch)", "False",
        ("tests/strategies/context/test_mistakes.py", "-k", "in_a_step"),
    ),
    Mutant(
        "evaluation of whole rows on every rank", "loop/evaluating.py", "= train_step.as_loss(metric_fn)", "= metric_fn",
        ("tests/strategies/context/test_mistakes.py", "-k", "metric"),
    ),
    Mutant(
        "packed rows whose sequences see each other", f"{FOLDER}/huggingface.py",
        "visible = visible & (sequences[rows, queries] == sequences[rows, at])", "pass",
        ("tests/strategies/context/test_transformers.py", "-k", "packed"),
    ),
    Mutant(
        "padding that tokens see", f"{FOLDER}/huggingface.py", "visible = visible & attention_mask[rows, at]", "pass",
        ("tests/strategies/context/test_transformers.py", "-k", "right"),
    ),
]  # fmt: skip
