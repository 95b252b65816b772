"""`mixed_precision`, `fp8_config` and `dynamo_config` of Accelerate."""

from __future__ import annotations

from fnaccel.config.importing.draft import DEFAULT, Draft, Table

FP8 = "fp8_config"
DYNAMO = "dynamo_config"
_BACKENDS = {
    "TE": "transformer_engine",
    "AO": "torchao",
    "TORCHAO": "torchao",
    "MSAMP": "ms_amp",
    "AUTO": "torchao",
}
_PRECISIONS = {"no": "fp32", "fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}
_SCALING = "of delayed scaling"
_DELAYED: Table = {
    "margin": ("fp8.margin", Draft.whole, _SCALING),
    "amax_history_length": ("fp8.amax_history_len", Draft.whole, _SCALING),
    "amax_history_len": ("fp8.amax_history_len", Draft.whole, _SCALING),
    "amax_compute_algorithm": ("fp8.amax_compute_algo", Draft.get, _SCALING),
    "amax_compute_algo": ("fp8.amax_compute_algo", Draft.get, _SCALING),
}
_IGNORED = "newer versions of TransformerEngine ignore it"
_TRANSFORMER_ENGINE = {
    **dict.fromkeys(_DELAYED, "delayed scaling is off: mxfp8 has a scale for each block"),
    "interval": _IGNORED,
    "override_linear_precision": _IGNORED,
    "use_autocast_during_eval": "evaluation is in bf16 with TransformerEngine",
}
# weights are sent as fp8 under fsdp only
_TORCHAO: Table = {
    "enable_fsdp_float8_all_gather": ("fp8.all_gather", Draft.truth, "of torchao's layers"),
    "pad_inner_dim": ("fp8.pad", Draft.truth, "of torchao's layers"),
}
_LEVELS = "of MS-AMP. O1 is fp8: {all_gather: true} under fsdp, O2 is fa.optim.adamw8bit(codes='fp8')"
_MS_AMP = {"opt_level": _LEVELS, "optimization_level": _LEVELS}
FP8_KEYS = (
    *("backend", "fp8_format", "use_mxfp8_block_scaling"),
    *(*_TRANSFORMER_ENGINE, *_TORCHAO, *_MS_AMP),
)
_COMPILER: Table = {
    "use_dynamic": ("compile_options.dynamic", Draft.flag, "of torch.compile"),
    "use_fullgraph": ("compile_options.fullgraph", Draft.flag, "of torch.compile"),
}
DYNAMO_KEYS = ("backend", "mode", "use_regional_compilation", *_COMPILER)


def read(draft: Draft) -> None:
    """Set the precision and its options, and the compiler and its options.

    Raises:
        ConfigError: a name that does not exist, or two keys that contradict each other.
    """
    key = "mixed_precision"
    if draft.get(key) is not None:
        value = draft.choice(key, _PRECISIONS, "no")
        draft.set(key, "precision", value, "of the whole loss function. Master parameters are fp32")
    draft.skip("no precision is named", key)
    if draft.below(FP8):
        unused = _read_fp8(draft)
        draft.reasons(dict.fromkeys(FP8_KEYS, unused), FP8, "fp8_")
    unused = _read_compiler(draft)
    draft.reasons(dict.fromkeys(DYNAMO_KEYS, unused), DYNAMO, "dynamo_")


def _read_fp8(draft: Draft) -> str:
    """Set the options of fp8, and return why the other keys have no effect."""
    precision = draft.fields.get("precision", "fp8")
    if precision != "fp8":
        return f"mixed_precision is {precision}, so Accelerate does not read it"
    draft.fill("precision", "fp8", FP8)
    key = draft.key(FP8, "backend", "fp8_")
    backend = draft.choice(key, _BACKENDS, "AO")
    why = f"needs {backend}, and a GPU that computes in fp8"
    if backend == "ms_amp":
        why = "MS-AMP is no longer maintained. torchao computes the same products in fp8. Needs torchao"
        draft.set(key, "fp8.backend", "torchao", why)
        draft.reasons(_MS_AMP, FP8, "fp8_")
        return "it is an option of another backend"
    draft.set(key, "fp8.backend", backend, why)
    if backend == "torchao":
        draft.read(_TORCHAO, FP8, "fp8_")
    else:
        form, block = f"{FP8}.fp8_format", draft.key(FP8, "use_mxfp8_block_scaling", "fp8_")
        recipe = draft.choice(form, {"HYBRID": "hybrid", "E4M3": "e4m3"}, "HYBRID")
        recipe = "mxfp8" if draft.truth(block) else recipe
        draft.set(form, "fp8.recipe", recipe, "the formats of forward and backward")
        draft.set(block, "fp8.recipe", recipe, "a scale for each block of 32 values, or delayed scaling")
        if recipe != "mxfp8":
            draft.read(_DELAYED, FP8, "fp8_")
        draft.reasons(_TRANSFORMER_ENGINE, FP8, "fp8_")
    return "it is an option of another backend"


def _read_compiler(draft: Draft) -> str:
    """Set the options of the compiler, and return why the other keys have no effect."""
    key = draft.key(DYNAMO, "backend", "dynamo_")
    if "dynamo_backend" in draft.leaves:  # before it had a section
        key = "dynamo_backend"
    backend = str(draft.get(key, "no")).lower()
    if backend in ("no", "none", "false"):
        draft.skip("nothing is compiled", key)
        return "nothing is compiled"
    draft.set(key, "compile_options.backend", backend, "of torch.compile")
    regional, mode = (draft.key(DYNAMO, name, "dynamo_") for name in ("use_regional_compilation", "mode"))
    scope = "block" if draft.truth(regional) else "loss"
    draft.set(regional, "compile", scope, "each repeated block, or the loss function")
    if draft.get(mode, "default") != "default":
        draft.set(mode, "compile_options.mode", draft.get(mode), "of torch.compile")
    draft.read(_COMPILER, DYNAMO, "dynamo_")
    return DEFAULT
