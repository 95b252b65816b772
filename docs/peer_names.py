"""The names that Accelerate's documents use, for `docs/accelerate-names.md`.

    python docs/peer_names.py FOLDER > tests/docs/peer_names.json

FOLDER holds the documents as text. They are not part of this repository. Only names are written: classes, functions,
members, arguments, flags, keys, variables and values. The reference pages of the documents list their classes without
arguments, so these are read from the installed package accelerate (the extra `bench`).
`tests/docs/test_peer_names.py` compares the page with the file.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FENCE = re.compile(r"^[ \t>]*```\{?(\w*)[^\n]*\n(.*?)^[ \t>]*```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
NAME = r"[A-Za-z_]\w*"
SUBJECTS = r"(?:first_|second_|student_|teacher_)?[Aa]ccelerator(?:_\d)?"
MODULES = ("", ".utils", ".hooks", ".big_modeling", ".data_loader", ".tracking", ".state", ".inference", ".logging",
           ".local_sgd", ".optimizer", ".scheduler", ".utils.deepspeed", ".utils.environment")  # fmt: skip
WITH_MEMBERS = (
    "Accelerator",
    "PartialState",
    "AcceleratorState",
    "GradientState",
    "GeneralTracker",
    "ModelHook",
)

# Functions of Python or torch, unless they are called on an Accelerator.
AMBIGUOUS = {"print", "log", "save", "load", "reduce"}

# Names in backticks that belong to torch, transformers, trackers or the examples themselves.
NOT_THE_PEER = frozenset(
    """
    all_reduce attention_head_type batch_sampler comm_state completed_steps data_path ddp_model dp_size ds_config
    elastic_launch from_pretrained get_dataloaders group_by_input_shape hidden_size hidden_sizes hook huggingface_hub
    load_dataset log_artifact max_train_steps merge_weights most_recent my_model my_script node_rank num_workers
    optimizer_grouped_parameters pin_memory position_embedding_type pp_size prefetch_factor requires_grad run_name
    save_checkpoint save_pretrained seq_length simple_nlp_example state state_dict teacher_model test torch_dtype torch_xla
    tp_size train_micro_batch_size_per_gpu utils
    """.split()  # noqa: SIM905 - a list of words is easier to read
)


def documents(folder: Path) -> str:
    """The text of all documents in a folder."""
    files = sorted(
        file for file in folder.iterdir() if file.suffix in {".txt", ".md"} and file.name != "README.md"
    )
    if not files:
        raise SystemExit(f"no documents in {folder}")
    return "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)


def objects(text: str) -> set[str]:
    """Classes, functions and constants: those of the reference pages, and those that examples import."""
    classes = {path.rsplit(".", 1)[-1] for path in re.findall(r"\[\[autodoc\]\]\s+([\w.]+)", text)}
    for line in re.findall(r"from accelerate[\w.]* import \(?([^\n#;\"]+)", text):
        classes |= set(re.findall(NAME, line))
    classes |= set(
        re.findall(rf"`(?:accelerate\.)?(?:utils|inference)\.(?:{NAME}\.)*({NAME})(?:\(\))?`", text)
    )
    classes |= set(re.findall(r"accelerate\.(?:\w+\.)+([A-Z][a-z]\w+)", text))
    return classes | set(re.findall(r"`with ([A-Z]\w+)`", text))


def members(text: str) -> set[str]:
    """Attributes and methods of `Accelerator` in examples and prose."""
    attributes = set(re.findall(rf"\b{SUBJECTS}\.({NAME})\b(?!\.py)", text))
    return {name for name in attributes if name.islower()} - NOT_THE_PEER


def code(text: str) -> Iterator[tuple[str, str]]:
    """(language, code) of each fenced block, without the signs of a diff."""
    for language, body in FENCE.findall(text):
        yield language, re.sub(r"^[+-](?=[ \t])", " ", body, flags=re.MULTILINE)


def call_arguments(text: str, callables: set[str]) -> dict[str, set[str]]:
    """Keyword arguments in the examples' calls of known classes, functions and methods."""
    arguments: dict[str, set[str]] = defaultdict(set)
    for _, body in code(text):
        for call in re.finditer(rf"({SUBJECTS}\.)?\b({NAME})\(", body):
            name = call[2]
            foreign = body[: call.start()].endswith(("def ", "class ", "."))
            if name in callables and not foreign and (call[1] or name not in AMBIGUOUS):
                arguments[name] |= set(re.findall(rf"[(,]\s*({NAME})\s*=(?!=)", _arguments(body, call.end())))
    return arguments


def _arguments(body: str, start: int) -> str:
    """The text of a call's arguments from `start` on, without that of calls inside of it."""
    depth, kept = 1, ["("]
    for character in body[start:]:
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            break
        if depth == 1:
            kept.append(character)
    return "".join(kept)


def installed(names: set[str]) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """(arguments, members) of the package's classes and functions.

    Of classes that hold options all arguments, of the others those with a default.
    """
    modules = [importlib.import_module("accelerate" + name) for name in MODULES]
    arguments: dict[str, set[str]] = {}
    attributes: dict[str, set[str]] = {}
    for name in names | set(WITH_MEMBERS):
        value: Any = next((getattr(module, name) for module in modules if hasattr(module, name)), None)
        if name in WITH_MEMBERS:
            attributes[name] = {member for member in dir(value) if member[0] != "_"}
            if name == "Accelerator":
                for member in attributes[name]:
                    defaults = _parameters(getattr(value, member), options=False)
                    arguments[member] = arguments.get(member, set()) | defaults
        if callable(value) and not hasattr(value, "__members__"):
            options = name.endswith(("Kwargs", "Plugin", "Config", "Configuration"))
            arguments[name] = arguments.get(name, set()) | _parameters(value, options=options)
    return arguments, attributes


def _parameters(value: Any, *, options: bool) -> set[str]:
    if not callable(value):
        return set()
    parameters = inspect.signature(value).parameters.values()
    many = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    chosen = (p for p in parameters if (p.kind not in many if options else p.default is not p.empty))
    return {p.name for p in chosen if p.name[0] != "_"}


def flags(text: str) -> set[str]:
    """Options of the commands: their lists, and the command lines of examples up to the script."""
    listed = re.findall(r"^\* ((?:`-[^`]*`,? ?)+)", text, re.MULTILINE)
    options = {flag for line in listed for flag in re.findall(r"--[a-z]\w*", line)}
    options |= set(re.findall(r"`(--(?:fsdp|deepspeed|megatron_lm|fp8|tpu)_\w+)", text))
    for line in re.findall(
        r"accelerate (?:launch|test|config|estimate-memory|tpu-config)(.*)", re.sub(r"\\\n", " ", text)
    ):
        before = re.split(r"\s(?:\S*\.py\b|\{|-m\s)", line)[0]
        options |= set(re.findall(r"(?:^|\s)(--[a-z]\w+)", before))
    return options - {"--args_to_my_script", "--args_for_the_script", "--arg1"}


def commands(text: str) -> set[str]:
    """Sub-commands of `accelerate`."""
    verbs = set(re.findall(r"`accelerate ((?:config (?:default|update))|[a-z]+(?:-[a-z]+)*)[` ]", text))
    verbs |= set(re.findall(r"^\$? ?accelerate ([a-z]+(?:-[a-z]+)*)", text, re.MULTILINE))
    return verbs - {"configuration"}


def config_keys(text: str) -> set[str]:
    """Keys of configuration files in YAML."""
    keys: set[str] = set()
    for language, body in code(text):
        if language == "yaml" or re.search(
            r"^\s*-?\s*(?:distributed_type|compute_environment):", body, re.MULTILINE
        ):
            keys |= set(re.findall(rf"^\s*-?\s*({NAME}):(?=\s|$)", body, re.MULTILINE))
    return keys - {"Platform"}


def variables(text: str) -> set[str]:
    """Environment variables."""
    return set(re.findall(r"\b(?:ACCELERATE|XLA|XDG|HF|MIXED|AWS|CCL)_[A-Z0-9_]+\b", text))


def values(text: str) -> set[str]:
    """Names of choices, in capitals: of enumerations, and of the options of FSDP."""
    choices = set(
        re.findall(
            r"\b(?:DDPCommunicationHookType|DistributedType|LoggerType|StateDictType)\.([A-Z0-9_]+)\b", text
        )
    )
    choices |= set(
        re.findall(r"^\s*(?:distributed_type|compute_environment): (?:'|\")?([A-Z_]+)", text, re.MULTILINE)
    )
    return choices | set(
        re.findall(
            r"\b(\w+_SHARD(?:_ZERO2)?|SHARD_GRAD_OP|\w+_WRAP|\w+_STATE_DICT|(?:NO|BACKWARD)_P[RO]\w+)\b", text
        )
    )


def words(text: str, elsewhere: set[str]) -> set[str]:
    """Further names in the prose, such as arguments: in backticks, with an underscore."""
    prose: set[str] = set()
    for span in SPAN.findall(FENCE.sub("\n", text)):
        match = re.fullmatch(rf"({NAME})(?:\(\)|=[^`]*)?", span)
        if match and "_" in match[1].strip("_") and match[1].islower():
            prose.add(match[1])
    return prose - elsewhere - NOT_THE_PEER


def names(folder: Path) -> dict[str, Any]:
    """All names, by kind."""
    text = documents(folder)
    classes, options, keys = objects(text), flags(text), config_keys(text)
    arguments, attributes = installed(classes)
    attributes["Accelerator"] |= members(text)
    for owner, collected in call_arguments(text, classes | attributes["Accelerator"]).items():
        arguments[owner] = arguments.get(owner, set()) | collected
    elsewhere = classes | keys | {flag[2:] for flag in options}
    kinds = {
        "objects": classes,
        "flags": options,
        "commands": commands(text),
        "keys of configuration files": keys,
        "environment variables": variables(text),
        "values": {value for value in values(text) if value.isupper()},
        "words": words(text, elsewhere.union(*arguments.values(), *attributes.values())),
    }
    by_owner = {"arguments": arguments, "members": attributes}
    return {
        "accelerate": importlib.import_module("accelerate").__version__,
        **{kind: sorted(collected) for kind, collected in kinds.items()},
        **{
            kind: {owner: sorted(collected) for owner, collected in sorted(table.items()) if collected}
            for kind, table in by_owner.items()
        },
    }


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    print(json.dumps(names(Path(sys.argv[1])), indent=1))
