"""Writes docs/reference/ and docs/errors.md from the docstrings: `python docs/reference.py`.

There is a page for each topic, and an index of all names. The anchor of a name is the name in lower case without dots:
`reference/transforms.md#clip_norm`, `reference/transforms.md#transformsfloat8`. docs/build_site.py builds the site.

A test fails if the files are out of date, or if a public name is in no group.
"""

from __future__ import annotations

import inspect
import operator
import re
import textwrap
from pathlib import Path

import fnaccel as fa
from fnaccel import errors

GROUPS = {
    "World": ["start", "World", "simulate", "notebook_launch", "debug_launch"],
    "Steps and programs": [
        "train_step", "TrainStep", "scan", "Autosave", "Evaluation", "Tracking", "Watch", "evaluate", "Step", "Transform", "Phase", "transforms.Capability", "transforms.Info", "program.plan.Plan",
        "program.compile_meter.Compilation", "fit_batch_size", "progress",
    ],
    "Preemption": ["preemption", "loop.preemption.Notice", "errors.Preempted"],
    "Losses": ["Mean", "Sum", "Max", "Min", "Concat", "LossInfo", "losses.linear_cross_entropy", "losses.log_probabilities"],
    "Random numbers by key": ["random", "random.Key", "random.key", "random.uniform", "random.normal", "random.bernoulli", "random.dropout"],
    "Transforms": [
        "chain", "with_precision", "transforms.Precision", "transforms.Float8", "transforms.float8_layers", "transforms.cast_layers", "accumulate", "with_weight", "clip_norm", "clip_value", "skip_nonfinite", "transforms.on_spike", "transforms.momentum_teacher", "transforms.sync_batch_norm",
        "with_ema", "remat", "transforms.attention", "transforms.chunked_head", "compile",
    ],
    "Parameters and gradients as values": ["params", "call", "value_and_grad", "perturb", "with_gradient", "per_example", "row_norms", "epsilon", "pure", "program.pure.PureUpdate", "recomputed"],
    "Strategies": ["distribute", "strategies.Distributed", "strategies.Strategy", "strategies.footprint", "strategies.Footprint", "strategy", "local", "ddp", "strategies.powersgd", "strategies.comm_hook", "fsdp", "hsdp", "tensor", "context", "pipeline", "local_sgd", "diloco", "deepspeed", "xla", "world.mesh.Mesh", "layout", "program.parameter_layout.LayoutTable", "program.parameter_layout.ArrayBlocks", "program.parameter_layout.Summary"],
    "Estimates": [
        "estimate.training", "estimate.TrainingEstimate", "estimate.Peak", "estimate.choices", "estimate.Choice", "estimate.cheapest", "estimate.inference", "estimate.InferenceEstimate",
        "estimate.least_time", "estimate.Rates", "estimate.LeastTime", "estimate.find_model", "estimate.NamedModel", "estimate.Work", "estimate.LiveStorages",
    ],
    "Optimizers and schedules": [
        "sgd", "adam", "adamw", "optim.adamw8bit", "optim.adafactor", "optim.from_torch", "optim.optimizer_groups", "optim.OptimizerGroups", "optim.starting_at", "optim.layer_decay", "optim.from_deepspeed", "optim.deepspeed_lr", "optim.Optimizer", "schedules.constant", "schedules.linear", "schedules.cosine",
        "schedules.warmup_constant", "schedules.warmup_linear", "schedules.warmup_stable_decay", "warmup_cosine", "schedules.inverse_sqrt", "schedules.one_cycle", "schedules.piecewise", "schedules.joined", "schedules.ema_warmup",
        "schedules.from_torch_scheduler",
    ],
    "Optimizers from parts": [
        "optim.chain", "optim.add_decayed_weights", "optim.scale_by_adam", "optim.scale_by_rms", "optim.trace", "optim.scale_by_lion", "optim.trust_ratio", "optim.clip_norm", "optim.adaptive_clip", "optim.centralize", "optim.lookahead", "optim.masked",
    ],
    "Data": ["shard", "data.mix", "set_seed", "data.Shards", "data.Batch", "data.Window", "data.Rows", "data.Shared", "data.register_batch", "data.rows_of", "data.cut"],
    "State and checkpoints": [
        "TrainState", "state.Position", "state.Seed", "snapshot", "save", "save_async", "checkpoint.Saving", "restore", "resume_or_init", "checkpoint.latest", "checkpoint.best", "checkpoint.checkpoints", "checkpoint.hooks", "checkpoint.Hooks",
        "checkpoint.save_on_main", "interchange.adopt", "interchange.export_hf", "interchange.gather_state_dict", "interchange.export_adapter",
    ],
    "Pytrees": [
        "tree", "tree.map", "tree.map_with_path", "tree.map_tensors", "tree.leaves", "tree.paths", "tree.items", "tree.select", "tree.flatten", "tree.unflatten",
        "tree.structure", "tree.partition", "tree.combine", "tree.cast", "tree.to", "tree.allclose", "tree.whole", "tree.register",
        "tree.norm", "tree.dot", "tree.scale", "tree.axpy", "tree.lerp", "tree.laid_out",
    ],
    "Collectives": [
        "gather", "collectives.gather_objects", "reduce", "broadcast", "collectives.broadcast_objects", "pad_across_processes",
        "collectives.concatenate", "split_between_processes", "collectives.any_process",
        "print_in_order",
    ],
    "Recipes": [
        "config.Recipe", "config.OptimizerRecipe", "config.DataRecipe", "config.RunRecipe", "config.CheckpointRecipe", "config.TrackingRecipe", "config.LaunchRecipe", "config.recipe", "config.apply", "config.shard_options", "config.scan_options",
        "config.from_yaml", "config.to_yaml", "config.import_document", "config.Imported", "config.Row",
    ],
    "Big models": ["big.empty", "big.on", "big.sizes", "big.Sizes", "big.device_map", "big.DeviceMap", "big.load", "big.dispatch", "big.offload", "big.Dispatch", "big.dispatch_of", "big.fetched", "big.pipeline", "big.Mover", "big.quantize", "big.Nf4", "big.Fp4", "big.Int8", "big.Int8Weights", "big.Int4Weights", "big.chosen_layers", "big.quantized_layers", "big.dequantize", "big.save_quantized", "big.quantization_of"],
    "Logging": ["seeing.get_logger", "seeing.logging.RankLogger"],
    "Tracking": [
        "track.Tracker", "tracked", "loop.tracked.TrackedRun", "track.of", "track.register", "track.installed", "track.Media", "track.Artifacts", "track.PerRank",
        "track.JsonlTracker", "track.read_jsonl", "track.AimTracker", "track.ClearMLTracker", "track.CometTracker", "track.DVCLiveTracker", "track.MLflowTracker", "track.SwanLabTracker", "track.TensorBoardTracker", "track.TrackioTracker", "track.WandbTracker",
    ],
    "Time, memory, reports": ["seeing.write_report", "seeing.ReportTracker", "profile", "seeing.Profile", "seeing.summarize", "seeing.Summary", "seeing.Throughput"],
    "Extending": [
        "extend", "extend.Bound", "extend.Build", "extend.Built", "extend.Capture", "extend.Cut", "extend.Delegation", "extend.EVERYTHING", "extend.Engine", "extend.Forward", "extend.GradientHook", "extend.Gradients", "extend.Group", "extend.Grouped", "extend.Hooks", "extend.Indexed", "extend.Kernel", "extend.Layout", "extend.Leaf", "extend.LossPart", "extend.Member", "extend.Mesh", "extend.MeshAxis", "extend.MicroBatch", "extend.MicroBatches", "extend.Operations", "extend.Part", "extend.Question", "extend.Runtime", "extend.Settings", "extend.Spec", "extend.Stream", "extend.Traffic", "extend.UpdateHook", "extend.UpdateInfo", "extend.Updated", "extend.classify", "extend.construct", "extend.delegator", "extend.enter", "extend.finisher", "extend.function_of", "extend.group_leaves", "extend.in_turn", "extend.maker", "extend.nearest", "extend.note", "extend.place", "extend.reader", "extend.require", "extend.rows_of", "extend.takes_step", "extend.whole_engine",
    ],
    "Tests of training code": [
        "testing.RankPool", "testing.RankPools", "testing.oracle_run", "testing.assert_close", "testing.differences", "testing.tolerance", "testing.count_collectives",
    ],
    "Errors": ["errors", "errors.FnaccelError"],
}  # fmt: skip

CONSTRUCTORS = {
    "Nf4", "Fp4", "Int8", "Int8Weights", "Int4Weights",
    "DeviceMap",
    "Transform", "Mean", "Sum", "Max", "Min", "Concat", "LossInfo", "Precision", "Float8", "Window", "Recipe", "OptimizerRecipe",
    "Autosave", "Evaluation", "Tracking", "Watch",
    "Throughput", "ReportTracker", "DataRecipe", "RunRecipe", "CheckpointRecipe", "TrackingRecipe", "LaunchRecipe", "FnaccelError", "Preempted", "constant", "linear", "cosine", "inverse_sqrt",
    "piecewise", "joined",
    "JsonlTracker", "AimTracker", "ClearMLTracker", "CometTracker", "DVCLiveTracker", "MLflowTracker", "SwanLabTracker", "TensorBoardTracker",
    "TrackioTracker", "WandbTracker",
}  # fmt: skip
"""The classes that a user calls. Other classes are made by fnaccel."""

METHODS = {
    "Dispatch": ["counts", "remove", "send_home", "fetched"],
    "Mover": ["check", "device_of", "move", "fetch", "home"],
    "DeviceMap": ["devices", "main", "device_of", "check", "to_json", "from_json"],
    "Sizes": ["total", "largest"],
    "World": [
        "is_main", "is_local_main", "is_last", "print", "barrier", "main_first", "on_main", "on_local_main", "on_last",
        "on_process", "on_local_process", "close",
    ],
    "LossInfo": ["rows"],
    "TrainState": ["with_extras"],
    "Key": ["shape", "fold_in"],
    "TrainStep": ["init", "adopt", "look", "as_loss", "loss_info", "averaged", "flops", "live_state", "compilation", "engine", "close"],
    "Plan": ["deepspeed", "hash"],
    "Notice": ["asked", "stopping", "ask"],
    "Float8": ["layers"],
    "Mesh": ["batch_rank", "coordinate", "group"],
    "Shards": ["at", "on", "updates_per_epoch"],
    "Profile": ["step"],
    "Mean": ["of", "of_tokens"],
    "Hooks": ["remove"],
    "Saving": ["done", "wait", "error"],
    "Tracker": ["start", "log", "finish"],
    "TrackedRun": ["log", "log_images", "log_figure", "log_table", "log_artifact", "trackers", "failures"],
    "Media": ["log_images", "log_figure", "log_table"],
    "Artifacts": ["log_artifact"],
    "PerRank": ["use_rank"],
}  # fmt: skip
"""The methods and properties for users. Other methods are for the library itself."""

HEAD = "<!-- written by docs/reference.py from the docstrings -->\n"
EXAMPLES = """\
## Names in the examples

A test executes every example. The examples use these names:

| name | |
|---|---|
| `fa`, `torch`, `nn`, `F`, `attrs`, `math`, `Path`, `DataLoader` | modules and classes under their usual names |
| `world` | the result of `fa.start()` |
| `GPT`, `loss_fn` | a small model with blocks, an `embed` and an `lm_head`, and its loss function |
| `dataset`, `loader` | 12 samples with `"tokens"` and `"labels"`, and a `DataLoader` with batches of 4 |
| `make(step, model=GPT, strategy="local")` | a train step with `fa.sgd(0.1)` |
| `batches`, `batch` | the list of these batches, and the first of them |
| `train_step`, `state` | a train step of `loss_fn` with `fa.sgd(0.1)`, and its first state |
"""
WIDTH = 100
SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Example|Fails|Works)(, on \d+ ranks)?:")
ITEM = re.compile(r"^([\w.*]+(?:, [\w.*]+)*): ?")
"""The start of an item of `Args:`: one name or several."""
MODULE_PREFIX = re.compile(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z_])")


def pages() -> dict[str, str]:
    """The text of each generated page, by its path in docs/."""
    topics = {topic_path(topic): _topic(topic, names) for topic, names in GROUPS.items()}
    return {"reference/README.md": _index(), **topics, "errors.md": mistakes()}


def topic_path(topic: str) -> str:
    """The page of a topic, by its path in docs/."""
    return f"reference/{re.sub(r'[^a-z]+', '-', topic.lower())}.md"


def heading_of(name: str) -> str:
    """The heading of a public name. `random.Key` and `random.key` would have the same anchor."""
    lowered = [each.lower() for names in GROUPS.values() for each in names]
    same = lowered.count(name.lower()) > 1 and name.lower() != name
    return f"`{name}` (class)" if same else f"`{name}`"


def anchor_of(name: str) -> str:
    """The anchor of a public name, as GitHub and the site make it from the heading."""
    return re.sub(r"[^\w -]", "", heading_of(name).lower()).replace(" ", "-")


def _index() -> str:
    """The index: each name with its link and the first line of its docstring."""
    parts = [HEAD, "# Reference\n", "Each name is `fa.NAME` after `import fnaccel as fa`.\n"]
    for topic, names in GROUPS.items():
        page = topic_path(topic).removeprefix("reference/")
        lines = [f"- [`{name}`]({page}#{anchor_of(name)}): {_summary(name)}" for name in names]
        parts += [f"## {topic}\n", "\n".join(lines) + "\n"]
    parts += ["The [error classes](../errors.md) have a page of their own.\n", EXAMPLES]
    return "\n".join(parts)


def _summary(name: str) -> str:
    """The first sentence of a docstring."""
    paragraph = (inspect.getdoc(operator.attrgetter(name)(fa)) or "").partition("\n\n")[0]
    return re.split(r"(?<=\.)\s", paragraph.replace("\n", " "), maxsplit=1)[0]


def _topic(topic: str, names: list[str]) -> str:
    """The page of a topic: an entry for each name."""
    note = "Each name is `fa.NAME` after `import fnaccel as fa`. [All names, and those that the examples use](README.md).\n"
    parts = [HEAD, f"# Reference: {topic[0].lower()}{topic[1:]}\n", note]
    for name in names:
        parts += _entry(name, operator.attrgetter(name)(fa))
    return "\n".join(parts)


def _entry(path: str, value: object) -> list[str]:
    parts = [f"## {heading_of(path)}\n"]
    name = path.rpartition(".")[2]
    if callable(value) and (not inspect.isclass(value) or name in CONSTRUCTORS):
        parts.append(_signature(name, value))
    parts.append(_as_markdown(inspect.getdoc(value) or ""))
    if name in METHODS:
        parts += _members(name, value)
    return parts


def _members(name: str, kind: type) -> list[str]:
    parts: list[str] = []
    for member in METHODS[name] if hasattr(kind, METHODS[name][0]) else ():  # two classes are called Hooks
        function = inspect.getattr_static(kind, member)
        if isinstance(function, classmethod):
            function = getattr(kind, member)
        if isinstance(function, property):
            returns = inspect.signature(function.fget).return_annotation
            parts += [f"### `{name}.{member}`\n", f"```pyi\n{member}: {_bare(returns)}\n```\n"]
        else:
            parts += [f"### `{name}.{member}`\n", _signature(member, function)]
        parts.append(_as_markdown(inspect.getdoc(function) or ""))
    return parts


def _signature(name: str, value: object) -> str:
    """The signature with its types. A long one has one parameter in each line."""
    signature = inspect.signature(value)
    # attrs leaves out the annotation of a field that is converted
    fields = getattr(value, "__annotations__", {}) if inspect.isclass(value) else {}
    parameters = [
        p.replace(annotation=fields.get(p.name, p.annotation)) if p.annotation is p.empty else p
        for p in signature.parameters.values()
        if p.name != "self"
    ]
    shown: list[str] = []
    for number, parameter in enumerate(parameters):
        before = parameters[number - 1].kind if number else None
        if parameter.kind is parameter.KEYWORD_ONLY and before not in (
            parameter.KEYWORD_ONLY,
            parameter.VAR_POSITIONAL,
        ):
            shown.append("*")
        if before is parameter.POSITIONAL_ONLY and parameter.kind is not parameter.POSITIONAL_ONLY:
            shown.append("/")
        shown.append(_parameter(parameter))
    if parameters and parameters[-1].kind is inspect.Parameter.POSITIONAL_ONLY:
        shown.append("/")
    returns = "" if inspect.isclass(value) else f" -> {_bare(signature.return_annotation)}"
    line = f"{name}({', '.join(shown)}){returns}"
    if len(line) > WIDTH:
        line = f"{name}(\n" + "".join(f"    {each},\n" for each in shown) + f"){returns}"
    return f"```pyi\n{line}\n```\n"


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    annotated = parameter.annotation is not parameter.empty
    text = f"{stars}{parameter.name}" + (f": {_bare(parameter.annotation)}" if annotated else "")
    if parameter.default is parameter.empty:
        return text
    default = repr(parameter.default)
    if default == "NOTHING" or " at 0x" in default:  # made by a function
        default = "..."
    return f"{text} = {default}" if annotated else f"{text}={default}"


def _bare(annotation: object) -> str:
    """An annotation as it is written, without module names."""
    if annotation is inspect.Signature.empty:
        return "Any"
    written = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return MODULE_PREFIX.sub("", written)


def _as_markdown(doc: str) -> str:
    """A docstring as Markdown: prose as it is, `Args:` and the like as lists, examples as code."""
    parts: list[str] = []
    prose: list[str] = []
    lines = doc.splitlines()
    while lines:
        line = lines.pop(0)
        if not SECTION.fullmatch(line):
            prose.append(line)
            continue
        body: list[str] = []
        while lines and (not lines[0].strip() or lines[0].startswith(" ")):
            body.append(lines.pop(0))
        parts += [_joined(prose), _section(line, body)]
        prose = []
    return "\n".join(part for part in [*parts, _joined(prose)] if part)


def _joined(lines: list[str]) -> str:
    text = "\n".join(lines).strip()
    return f"{text}\n" if text else ""


def _section(heading: str, body: list[str]) -> str:
    text = textwrap.dedent("\n".join(body)).strip()
    if text.startswith((">>>", "$")):
        return f"{heading}\n\n```{'pycon' if text.startswith('>') else 'console'}\n{text}\n```\n"
    name = heading.rstrip(":")
    if not all(ITEM.match(line) for line in text.splitlines() if line[:1].strip()):
        return f"**{name}**: {text}\n"
    items = [ITEM.sub(r"- `\1`: ", line) if line[:1].strip() else line for line in text.splitlines()]
    return f"**{name}**\n\n{chr(10).join(items)}\n"


def mistakes() -> str:
    """The text of docs/errors.md: a section for each error class."""
    parts = [
        HEAD,
        "# Errors\n",
        "Every message has three lines: what happened, `where:`, and the `fix:`. Every class is an `fa.errors.FnaccelError`,\n"
        "and also the built-in class that a caller expects (`ValueError`, `RuntimeError`, ...).\n",
        "A test executes both parts of each section. `Fails` raises the error, and `Works` does not. The names in the\n"
        "examples are those of the [reference](reference/README.md#names-in-the-examples).\n",
    ]
    for name, kind in vars(errors).items():
        if (
            inspect.isclass(kind)
            and issubclass(kind, errors.FnaccelError)
            and kind is not errors.FnaccelError
        ):
            bases = ", ".join(
                f"`{base.__name__}`" for base in kind.__bases__ if base is not errors.FnaccelError
            )
            parts += [f"## {name}\n", _as_markdown(inspect.getdoc(kind) or ""), f"Built-in class: {bases}.\n"]
    return "\n".join(parts)


if __name__ == "__main__":
    here = Path(__file__).parent
    texts = pages()
    for page in (here / "reference").glob("*.md"):
        if f"reference/{page.name}" not in texts:
            page.unlink()
    for path, text in texts.items():
        (here / path).parent.mkdir(exist_ok=True)
        (here / path).write_text(text)
