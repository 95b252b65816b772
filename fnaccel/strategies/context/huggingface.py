"""Models of transformers whose sequences are cut: their masks, and checks of the arguments of a call.

transformers makes masks from functions of a row's and a key's index. Here a row's index is its position in
the whole sequence, and keys are those of all ranks, so causal, sliding and padding masks come out as on one
process. The model's attention is torch's, which `attention.py` replaces. Nothing here imports transformers
before a model of it is trained.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fnaccel.errors import CapabilityError
from fnaccel.strategies.context.attention import current
from fnaccel.strategies.context.split import Split

_NAME = "fnaccel_context"
_WHERE = "a transformers model under fa.context"
_SHIFTING = (None, "ForCausalLM", "ForConditionalGeneration")
_OF_TOKENS = (None, "ForCausalLM", "ForMaskedLM", "ForTokenClassification")
_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


def prepare_models(root: nn.Module) -> None:
    """Let the transformers models in a module use masks and attention over the tokens of all ranks.

    Raises:
        CapabilityError: a model that can't work on a part of a sequence.
    """
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        return
    outermost = list(_outermost(root, modeling.PreTrainedModel))
    for name, model in outermost:
        _check_model(name, model)
    if outermost:
        _register()
    for name, model in outermost:
        model.set_attn_implementation(_NAME)
        for inner in model.modules():
            if not isinstance(inner, modeling.PreTrainedModel):
                continue
            if inner.config._attn_implementation != _NAME:  # noqa: SLF001
                raise CapabilityError(
                    f"{type(inner).__name__} computes its attention itself, over this rank's tokens only",
                    where=name or "the model",
                    fix="use a model that follows transformers' AttentionInterface",
                )
            _patch(inner)


def _outermost(root: nn.Module, base: type) -> Iterator[tuple[str, Any]]:
    outer_names: list[str] = []
    for name, module in root.named_modules():
        inside = any(name.startswith(f"{outer}.") or not outer for outer in outer_names)
        if isinstance(module, base) and not inside:
            outer_names.append(name)
            yield name, module


def _check_model(name: str, model: Any) -> None:
    kind, problem = type(model).__name__, ""
    layers = getattr(model.config, "layer_types", None) or ()
    if "position_ids" not in inspect.signature(model.forward).parameters:
        problem = "takes no position_ids: it counts positions from the first token that it gets"
    elif getattr(model, "loss_type", None) not in _OF_TOKENS:
        problem = "reads single tokens, such as the first or the last, which some ranks don't have"
    elif not set(layers) <= _LAYERS:
        problem = f"has layers that read tokens in order: {', '.join(sorted(set(layers) - _LAYERS))}"
    if problem:
        raise CapabilityError(
            f"{kind} {problem}",
            where=name or "the model",
            fix="train it under ddp or fsdp; fa.context takes models that are given the positions of their "
            "tokens, such as GPT-2, Llama and BERT",
        )


def _register() -> None:
    transformers: Any = importlib.import_module("transformers")
    sdpa: Any = importlib.import_module("transformers.integrations.sdpa_attention")
    transformers.AttentionInterface.register(_NAME, sdpa.sdpa_attention_forward)
    transformers.AttentionMaskInterface.register(_NAME, _mask)


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: Any = "cpu",
    **options: Any,
) -> torch.Tensor | None:
    """A mask of this rank's rows by the keys of the whole sequence, or None. In the place of `sdpa_mask`."""
    split = current()
    if split is None or q_length not in split.lengths:
        masks: Any = importlib.import_module("transformers.masking_utils")
        return masks.sdpa_mask(
            batch_size, q_length, kv_length,
            mask_function=mask_function, attention_mask=attention_mask, local_size=local_size,
            allow_is_causal_skip=allow_is_causal_skip,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip,
            use_vmap=use_vmap, device=device, **options,
        )  # fmt: skip
    if use_vmap or not (allow_is_causal_skip or allow_is_bidirectional_skip):
        raise CapabilityError(
            "the model makes a mask from the tokens of its input, and this rank has some of them only",
            where=_WHERE,
            fix="give it a mask: attention_mask of shape [batch, 1, this rank's tokens, all tokens]",
        )
    keys = q_length * split.chunks.ranks
    packing = None if allow_is_bidirectional_skip else _packing
    if packing is None and (local_size is None or keys < local_size) and _shows_all(attention_mask):
        return None
    rows = torch.arange(batch_size, device=device)[:, None, None, None]
    heads = torch.zeros(1, dtype=torch.int64, device=device)[None, :, None, None]
    queries = split.chunks.positions(q_length, torch.device(device))[None, None, :, None]
    at = torch.arange(keys, device=device)[None, None, None, :]
    if packing is None:
        visible = mask_function(rows, heads, queries, at)
    else:
        positions, sequences = packing
        visible = mask_function(rows, heads, positions[rows, queries], positions[rows, at])
        visible = visible & (sequences[rows, queries] == sequences[rows, at])
    if attention_mask is not None:
        visible = visible & attention_mask[rows, at]
    return visible.expand(batch_size, -1, q_length, keys)


def _shows_all(attention_mask: torch.Tensor | None) -> bool:
    """Whether no key is padding. A graph can't ask."""
    if attention_mask is None:
        return True
    return not torch.compiler.is_compiling() and bool(attention_mask.all())


# (position, number of the packed sequence) of each token, while a model runs. None if rows are not packed
_packing: tuple[torch.Tensor, torch.Tensor] | None = None


def _patch(model: nn.Module) -> None:
    """Check the arguments of a model's forward while a loss runs."""
    plain: Any = model.forward
    names = list(inspect.signature(plain).parameters)
    if "position_ids" not in names:
        return
    shifts = getattr(model, "loss_type", None) in _SHIFTING

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        split = current()
        if split is None:
            return plain(*args, **kwargs)
        arguments = dict(zip(names, args, strict=False)) | kwargs
        _check_arguments(arguments, split, shifts)
        if arguments.get("attention_mask") is not None or "attention_mask" not in names:
            return plain(**arguments)
        return _unmasked(plain, arguments, split, _caches(model, arguments))

    model.forward = forward


def _caches(model: Any, arguments: dict[str, Any]) -> bool:
    if arguments.get("past_key_values") is not None:
        return True
    if model.training and getattr(model, "is_gradient_checkpointing", False):
        return False
    use_cache = arguments.get("use_cache")
    return bool(getattr(model.config, "use_cache", False) if use_cache is None else use_cache)


def _check_arguments(arguments: dict[str, Any], split: Split, shifts: bool) -> None:
    positions, mask = arguments.get("position_ids"), arguments.get("attention_mask")
    if positions is None or positions.shape[-1] not in split.lengths:
        shape = "no position_ids" if positions is None else f"position_ids of shape {list(positions.shape)}"
        raise CapabilityError(
            f"a model was called with {shape}, and would count the positions of each part from 0",
            where=_WHERE,
            fix="put the positions of whole rows into the batch, which is cut: "
            "position_ids=torch.arange(length).expand(rows, -1)",
        )
    if shifts and arguments.get("labels") is not None and arguments.get("shift_labels") is None:
        raise CapabilityError(
            "the model would shift the labels of each part, and lose those where two parts meet",
            where=_WHERE,
            fix="shift them before the cut: shift_labels = F.pad(labels, (0, 1), value=-100)[:, 1:] in the "
            "batch, and model(..., labels=shift_labels, shift_labels=shift_labels) in the loss",
        )
    whole = positions.shape[-1] * split.chunks.ranks
    if mask is not None and mask.dim() == 2 and mask.shape[-1] != whole:
        raise CapabilityError(
            f"attention_mask has {mask.shape[-1]} of {whole} tokens, and each rank needs to know all padding",
            where=_WHERE,
            fix='leave it whole: fa.context(2, cut={"attention_mask": None})',
        )


def _unmasked(plain: Callable[..., Any], arguments: dict[str, Any], split: Split, caches: bool) -> Any:
    """A call without a mask, whose rows may be packed: several sequences, each with positions from 0.

    transformers finds packed rows by jumps in the positions, and the parts of a balanced order jump. So the
    positions of all tokens are gathered, and the model gets a mask without padding. With a cache of keys,
    which models make unless `use_cache=False`, transformers doesn't look for packed rows.
    """
    global _packing
    source = (
        arguments.get("input_ids") if arguments.get("inputs_embeds") is None else arguments["inputs_embeds"]
    )
    assert source is not None
    rows, length = source.shape[:2]
    packing = None
    if not caches:
        positions = split.gather(arguments["position_ids"], -1).expand(rows, -1)
        sequences = (torch.diff(positions, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
        if torch.compiler.is_compiling() or bool(sequences[:, -1].any()):
            packing = positions, sequences
    before, _packing = _packing, packing
    try:
        mask = torch.ones(rows, length * split.chunks.ranks, dtype=torch.bool, device=source.device)
        return plain(**arguments | {"attention_mask": mask})
    finally:
        _packing = before
