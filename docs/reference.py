"""Writes docs/api.md and docs/errors.md from the docstrings: `python docs/reference.py`.

A test compares the files with what this prints, so a public name without words fails.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import fnaccel as fa
from fnaccel import errors

GROUPS = {
    "World": ["start", "World"],
    "Steps and programs": [
        "train_step", "TrainStep", "scan", "evaluate", "Step", "Transform", "Phase", "Capability", "Info", "Plan",
        "Compilation", "fit_batch_size",
    ],
    "Preemption": ["preemption", "Notice", "Preempted"],
    "Losses": ["Mean", "Sum", "Concat"],
    "Transforms": [
        "with_precision", "Precision", "Float8", "float8_layers", "cast_layers", "accumulate", "with_weight", "clip_norm", "clip_value", "skip_nonfinite",
        "with_ema", "remat", "compile",
    ],
    "Strategies": ["distribute", "Distributed", "Strategy", "strategy", "local", "ddp", "powersgd", "fsdp", "hsdp", "deepspeed", "xla", "Mesh"],
    "Optimizers and schedules": [
        "sgd", "adam", "adamw", "adamw8bit", "adafactor", "from_torch", "from_deepspeed", "deepspeed_lr", "Optimizer", "constant", "linear", "cosine",
        "warmup_constant", "warmup_linear", "warmup_cosine", "inverse_sqrt", "one_cycle", "piecewise", "joined",
        "from_torch_scheduler",
    ],
    "Data": ["shard", "Shards", "Batch", "Window"],
    "State and checkpoints": [
        "TrainState", "Position", "Seed", "snapshot", "save", "save_async", "Saving", "restore", "resume_or_init", "latest", "checkpoints",
        "adopt", "export_hf", "export_adapter", "tree",
    ],
    "Collectives": [
        "gather", "gather_objects", "reduce", "broadcast", "broadcast_objects", "pad_across_processes",
        "concatenate", "split_between_processes", "any_process",
    ],
    "Recipes": [
        "Recipe", "OptimizerRecipe", "DataRecipe", "CheckpointRecipe", "recipe", "apply", "shard_options", "scan_options",
        "from_yaml", "to_yaml",
    ],
    "Tracking": ["Tracker"],
    "Errors": ["errors", "FnaccelError"],
}  # fmt: skip

HEAD = "<!-- written by docs/reference.py from the docstrings -->\n"


def api() -> str:
    """One section a group, one entry a name: signature and docstring."""
    parts = [HEAD, "# API\n", "Everything below is `fa.NAME` after `import fnaccel as fa`.\n"]
    for group, names in GROUPS.items():
        parts.append(f"## {group}\n")
        for name in names:
            value = getattr(fa, name)
            parts.append(f"### `{name}{_signature(value)}`\n")
            parts.append(_as_text(inspect.getdoc(value) or ""))
    return "\n".join(parts)


def _signature(value: object) -> str:
    if not callable(value) or inspect.isclass(value):
        return ""
    shown = inspect.signature(value).replace(return_annotation=inspect.Signature.empty)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in shown.parameters.values()]
    return str(shown.replace(parameters=bare))


def _as_text(doc: str) -> str:
    first, _, rest = doc.partition("\n")
    return first + "\n" if not rest.strip() else f"{first}\n\n```text\n{rest.strip()}\n```\n"


def mistakes() -> str:
    """One section an error class."""
    parts = [
        HEAD,
        "# Errors\n",
        "Every message has three lines: what happened, `where:`, and the `fix:`. Each class is also the built-in\n"
        "that you would expect (`ValueError`, `RuntimeError`, …), and all are `fa.FnaccelError`.\n",
    ]
    for name, kind in vars(errors).items():
        if (
            inspect.isclass(kind)
            and issubclass(kind, errors.FnaccelError)
            and kind is not errors.FnaccelError
        ):
            bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__)
            parts.append(f"## {name}\n")
            parts.append(f"{inspect.getdoc(kind)}\n")
            parts.append(f"Also a {bases}.\n")
    return "\n".join(parts)


if __name__ == "__main__":
    here = Path(__file__).parent
    (here / "api.md").write_text(api())
    (here / "errors.md").write_text(mistakes())
