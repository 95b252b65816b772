"""Text and a tokenizer for the examples, made of Python's own standard library: nothing is downloaded.

For data of the Hub use `datasets.load_dataset` and `AutoTokenizer.from_pretrained` instead.
"""

from __future__ import annotations

import ast
import os
from pathlib import Path

# before the Hub's libraries are imported: nothing is asked for over the network
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]",
           "sep_token": "[SEP]", "mask_token": "[MASK]", "eos_token": "[EOS]"}  # fmt: skip


def files(count: int | None = None) -> list[str]:
    """The text of the library's modules, in the order of their names."""
    paths = sorted(Path(os.__file__).parent.glob("*.py"))[:count]
    return [path.read_text(encoding="utf-8") for path in paths]


def labelled_lines(count: int) -> dict[str, list]:
    """Lines of docstrings (label 1) and of code (label 0), one after the other."""
    prose, code = [], []
    for text in files():
        for node in ast.walk(ast.parse(text)):
            docstring = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if docstring and len(node.body) > 1:
                prose += docstring.splitlines()
                code += [line for part in node.body[1:] for line in ast.unparse(part).splitlines()]
        if min(len(prose), len(code)) > count:
            break
    prose, code = ([line.strip() for line in lines if len(line.split()) > 2] for lines in (prose, code))
    texts = [line for pair in zip(prose, code, strict=False) for line in pair][:count]
    return {"text": texts, "label": [1 - index % 2 for index in range(len(texts))]}


def tokenizer(texts: list[str], vocabulary: int = 1000) -> PreTrainedTokenizerFast:
    """A byte-pair tokenizer, trained on these texts."""
    pieces = Tokenizer(models.BPE(unk_token="[UNK]"))
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pieces.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=pieces, **SPECIAL)
