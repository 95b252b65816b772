"""Deliberate bugs of estimates: bytes that are not counted, work that is not repeated."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

STORAGES = "tests/estimate/test_storages.py"
TRAINING = "tests/estimate/test_training.py"
WORK = "tests/estimate/test_work.py"

MUTANTS = [
    Mutant(
        "stages that keep one micro-batch", "estimate/stages.py", "waiting[number] += kept", "waiting[number] += 0",
        (TRAINING, "-k", "holds and pipeline and GPT and 4 and not GPT2 and not gpipe"),
    ),
    Mutant(
        "stages that never wait", "estimate/rates.py", " / (1 - estimate.idle)", "", (TRAINING, "-k", "stages_wait"),
    ),
    Mutant(
        "storages that were resized", "estimate/storages.py", "            storages.refresh(storage)\n", "",
        (STORAGES, "-k", "resized"),
    ),
    Mutant(
        "buffers of collectives that stay", "estimate/account.py",
        "        self.hold(size, self._kind_of.get(key, ACTIVATIONS))\n",
        "        kind = self._kind_of.get(key, ACTIVATIONS)\n        self.hold(0 if kind == BUFFERS else size, kind)\n",
        (TRAINING, "-k", "2-fsdp and bf16"),
    ),
    Mutant(
        "shards without padding", "estimate/_torch.py", "        size = -(-rows // self._count)\n",
        "        size = max(1, rows // self._count)\n", (TRAINING, "-k", "whole_engine"),
    ),
    Mutant(
        "activations of traced blocks alone", "estimate/repeated.py",
        "        added.update(account.repeat(forward.pop(), run.left_out))\n",
        "        forward.pop()\n", (TRAINING, "-k", "costs_nothing"),
    ),
    Mutant(
        "masks that transformers makes for fake tensors", "models/unknown_values.py",
        'if hasattr(module, "is_fake_tensor"):', "if False:", (TRAINING, "-k", "hsdp and Llama"),
    ),
    Mutant(
        "operations of traced blocks alone", "estimate/account.py",
        "        self.work.repeat(since.work, times)\n", "", (TRAINING, "-k", "costs_nothing"),
    ),
    Mutant(
        "blocks that are all used alike", "estimate/training_memory.py", "return few if _alike(few, more) else None", "return few",
        (TRAINING, "-k", "one_after_the_other"),
    ),
    Mutant(
        "attention that costs nothing", "models/operation_counts.py",
        '"_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,', "",
        ("tests/estimate/test_mixtures.py", "-k", "attention"),
    ),
    Mutant(
        "an all-reduce that passes its bytes once", "estimate/rates.py", '"all_reduce": 2.0', '"all_reduce": 1.0',
        (WORK, "-k", "least_time"),
    ),
    Mutant(
        "a bucket that is full before its last gradient", "strategies/footprint.py",
        "if filled[each.dtype] >= limit:", "if filled[each.dtype] >= limit / 2:",
        (WORK, "-k", "2-ddp"),
    ),
]  # fmt: skip
