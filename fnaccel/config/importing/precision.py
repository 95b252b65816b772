"""`mixed_precision`, `fp8_config` and `dynamo_config` of Accelerate."""

from __future__ import annotations

from typing import Any

from fnaccel.config.importing.draft import Draft

SECTION = "fp8_config"
DYNAMO = "dynamo_config"
_FP8 = (
    "backend", "fp8_format", "margin", "interval", "amax_history_length", "amax_history_len",
    "amax_compute_algorithm", "amax_compute_algo", "override_linear_precision", "use_autocast_during_eval",
    "opt_level", "optimization_level", "enable_fsdp_float8_all_gather", "pad_inner_dim",
    "use_mxfp8_block_scaling",
)  # fmt: skip
_BACKENDS = {
    "TE": "transformer_engine",
    "AO": "torchao",
    "TORCHAO": "torchao",
    "MSAMP": "ms_amp",
    "AUTO": "torchao",
}
_PRECISIONS = {"no": "fp32", "fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}
_DYNAMO = ("backend", "mode", "use_dynamic", "use_fullgraph", "use_regional_compilation")
KEYS = [f"{SECTION}.{name}" for name in _FP8] + [f"{DYNAMO}.dynamo_{name}" for name in _DYNAMO]


def read(draft: Draft) -> None:
    """Set the precision and its options, and the compiler and its options.

    Raises:
        ConfigError: a name that does not exist, or two keys that contradict each other.
    """
    key = "mixed_precision"
    if draft.has(key) and draft.get(key) is not None:
        value = draft.choice(key, _PRECISIONS, "no")
        draft.set(key, "precision", value, "of the whole loss function. Master parameters are fp32")
    draft.skip(key, "no precision is named") if draft.has(key) else None
    _fp8(draft)
    _compile(draft)


def _spelled(draft: Draft, section: str, prefix: str, name: str) -> str:
    """The key as the document spells it: with or without the prefix."""
    long = f"{section}.{prefix}{name}"
    return long if long in draft.leaves else f"{section}.{name}"


def _fp8(draft: Draft) -> None:
    keys = {name: _spelled(draft, SECTION, "" if name.startswith("fp8_") else "fp8_", name) for name in _FP8}
    if not draft.below(SECTION):
        return
    precision = draft.fields.get("precision")
    if precision not in (None, "fp8"):
        draft.skip_all(keys.values(), f"mixed_precision is {precision}, so Accelerate does not read it")
        return
    if precision is None:
        draft.fill("precision", "fp8", SECTION)
    backend = draft.choice(keys["backend"], _BACKENDS, "AO")
    if backend == "ms_amp":
        _ms_amp(draft, keys)
        return
    draft.set(
        keys["backend"], "fp8.backend", backend, f"needs {_PACKAGES[backend]}, and a GPU that computes in fp8"
    )
    draft.fill("fp8.backend", backend, keys["backend"])
    if backend == "transformer_engine":
        _transformer_engine(draft, keys)
    else:
        for name, field in (("enable_fsdp_float8_all_gather", "all_gather"), ("pad_inner_dim", "pad")):
            if draft.has(keys[name]):
                draft.set(keys[name], f"fp8.{field}", draft.truth(keys[name]), "of torchao's layers")
        # weights are sent as fp8 under fsdp only
        draft.skip_all(keys.values(), "it is an option of another backend")


_PACKAGES = {"transformer_engine": "transformer_engine", "torchao": "torchao"}


def _transformer_engine(draft: Draft, keys: dict[str, str]) -> None:
    block = draft.truth(keys["use_mxfp8_block_scaling"])
    form = draft.choice(keys["fp8_format"], {"HYBRID": "hybrid", "E4M3": "e4m3"}, "HYBRID")
    recipe = "mxfp8" if block else form
    draft.fill("fp8.recipe", recipe, keys["fp8_format"])
    draft.row(keys["fp8_format"], f"fp8.recipe: {recipe}", "the formats of forward and backward")
    draft.row(
        keys["use_mxfp8_block_scaling"],
        f"fp8.recipe: {recipe}",
        "a scale for each block of 32 values, or delayed scaling",
    )
    pairs = (
        ("margin", "margin"),
        ("amax_history_length", "amax_history_len"), ("amax_history_len", "amax_history_len"),
        ("amax_compute_algorithm", "amax_compute_algo"), ("amax_compute_algo", "amax_compute_algo"),
    )  # fmt: skip
    for name, field in pairs:
        if draft.has(keys[name]) and not block:
            value: Any = draft.get(keys[name]) if "algo" in name else draft.whole(keys[name])
            draft.set(keys[name], f"fp8.{field}", value, "of delayed scaling")
    draft.skip_all(
        [keys[name] for name, _ in pairs], "delayed scaling is off: mxfp8 has a scale for each block"
    )
    draft.skip_all([keys["interval"]], "newer versions of TransformerEngine ignore it")
    draft.skip_all([keys["override_linear_precision"]], "newer versions of TransformerEngine ignore it")
    draft.skip_all([keys["use_autocast_during_eval"]], "evaluation is in bf16 with TransformerEngine")
    draft.skip_all(keys.values(), "it is an option of another backend")


def _ms_amp(draft: Draft, keys: dict[str, str]) -> None:
    why = "MS-AMP is no longer maintained. torchao computes the same products in fp8. Needs torchao"
    draft.set(keys["backend"], "fp8.backend", "torchao", why)
    for name in ("opt_level", "optimization_level"):
        draft.skip_all(
            [keys[name]],
            "of MS-AMP. O1 is fp8: {all_gather: true} under fsdp, O2 is fa.optim.adamw8bit(codes='fp8')",
        )
    draft.skip_all(keys.values(), "it is an option of another backend")


def _compile(draft: Draft) -> None:
    keys = {name: _spelled(draft, DYNAMO, "dynamo_", name) for name in _DYNAMO}
    if "dynamo_backend" in draft.leaves:  # before it had a section
        keys["backend"] = "dynamo_backend"
    backend = str(draft.get(keys["backend"], "no")).lower()
    if backend in ("no", "none", "false"):
        draft.skip_all(keys.values(), "nothing is compiled")
        return
    regional = draft.truth(keys["use_regional_compilation"])
    draft.fill("compile", "block" if regional else "loss", keys["use_regional_compilation"])
    draft.set(keys["backend"], "compile_options.backend", backend, "of torch.compile")
    draft.row(
        keys["use_regional_compilation"],
        f"compile: {'block' if regional else 'loss'}",
        "each repeated block, or the loss function",
    )
    mode = draft.get(keys["mode"], "default")
    if mode != "default":
        draft.set(keys["mode"], "compile_options.mode", mode, "of torch.compile")
    for name, field in (("use_dynamic", "dynamic"), ("use_fullgraph", "fullgraph")):
        if draft.truth(keys[name]):
            draft.set(keys[name], f"compile_options.{field}", True, "of torch.compile")
    draft.skip_all(keys.values(), "it is the default")
