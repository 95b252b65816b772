"""Deliberate bugs in quantized weights: their codes, files, training and offloading."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FOLDER = "tests/big/quantize"
LAYERS, SAVING, TRAINING = (
    f"{FOLDER}/test_layers.py",
    f"{FOLDER}/test_saving.py",
    f"{FOLDER}/test_training.py",
)
CHOOSING, OFFLOADING, INTEGERS = (
    f"{FOLDER}/test_choosing.py", f"{FOLDER}/test_offloading.py", f"{FOLDER}/test_torchao.py",
)  # fmt: skip

MUTANTS = [
    Mutant(
        "scales rounded by a cast of the module", "big/quantize/layer.py",
        "if after.dtype is not value.dtype:", "if False:", (LAYERS, "-k", "survive_dtypes"),
    ),
    Mutant(
        "a Conv1D that is not transposed", "big/quantize/layer.py",
        "self.encode(full.t().contiguous() if self.transposed else full.contiguous())",
        "self.encode(full.reshape(self.out_features, self.in_features))", (LAYERS, "-k", "transposed"),
    ),
    Mutant(
        "quantized scales without their offset in files", "big/quantize/bitsandbytes_4bit.py",
        'float(buffers["offset"])', "0.0", (LAYERS, "-k", "state_dict"),
    ),
    Mutant(
        "full-width weights that are all held", "big/quantize/replacing.py",
        "for group in paths.values():\n            module = _replaced(module, group, record.make(",
        "held = list(module.modules())\n        for group in paths.values():\n            module = _replaced(module, group, record.make(",
        (CHOOSING, "-k", "freed_before"),
    ),
    Mutant(
        "tied weights are quantized", "big/quantize/choosing.py",
        "elif path in tied:", "elif False:", (CHOOSING, "-k", "tied"),
    ),
    Mutant(
        "quantized weights that seem to be trained", "program/planned.py",
        "if optimizers is not None:  # a factory", "if False:  # a factory", (TRAINING, "-k", "are_not_trained"),
    ),
    Mutant(
        "codes copied before a step", "program/instance.py",
        "if not isinstance(slot[0], ConstantBuffers)]", "]", (TRAINING, "-k", "does_not_copy"),
    ),
    Mutant(
        "codes that are not offloaded", "big/planning.py",
        "isinstance(slot.module, ConstantBuffers)", "False", (OFFLOADING, "-k", "stay_quantized"),
    ),
    Mutant(
        "layers in full width that config.json forgets", "big/quantize/saving.py",
        "skipped = [path for path, _ in linear_layers(module)]", "skipped: list[str] = []",
        (SAVING, "-k", "config_has"),
    ),
    Mutant(
        "a sign lost in 4 bits", "big/quantize/torchao.py",
        "((pairs ^ 8).view(torch.int8) - 8)", "pairs.view(torch.int8)", (INTEGERS, "-k", "packed"),
    ),
    Mutant(
        "a shard without torchao's header", "big/quantize/saving.py",
        "write_items(path, items, metadata=metadata)", "write_items(path, items)", (SAVING, "-k", "weights and round"),
    ),
]  # fmt: skip
