"""fp8 layers of NVIDIA's TransformerEngine. Its calls are tested with a recorder, not on hardware.

https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/pytorch.html
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from typing import Any

import attrs
from torch import nn

from fnaccel.errors import CapabilityError, MissingBackendError
from fnaccel.tree import Tree

RECIPES = ("hybrid", "e4m3", "mxfp8")
ALGORITHMS = ("max", "most_recent")


def backend(where: str) -> Any:
    """`transformer_engine.pytorch`.

    Raises:
        MissingBackendError: TransformerEngine is not installed, or was built for another torch.
    """
    return _module("transformer_engine.pytorch", where)


def _module(name: str, where: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:  # its libraries are loaded as it is imported
        raise MissingBackendError(
            f"TransformerEngine can't be imported: {error}",
            where=where,
            fix="pip install --no-build-isolation 'transformer_engine[pytorch]' on a machine with CUDA, "
            'or fa.transforms.Float8(backend="torchao")',
        ) from error


def convert(module: nn.Module, chosen: Collection[str], where: str) -> None:
    """Put TransformerEngine's layers in the place of these linears, and of all layer norms.

    The parameters stay the same ones: new layers are made on the meta device and take them over.

    Args:
        module: the model, changed in place.
        chosen: paths of linear layers.
        where: the location in error messages.
    """
    engine = backend(where)
    for path, layer in list(module.named_modules(remove_duplicate=False)):
        replacement: Any = None
        if isinstance(layer, nn.Linear) and path in chosen:
            replacement = engine.Linear(
                layer.in_features,
                layer.out_features,
                bias=_has_bias(layer),
                params_dtype=layer.weight.dtype,
                device="meta",
            )
        elif type(layer) is nn.LayerNorm and path and replaceable(layer):
            replacement = engine.LayerNorm(
                layer.normalized_shape[0], eps=layer.eps, params_dtype=layer.weight.dtype, device="meta"
            )
        if replacement is None:
            continue
        for name, param in layer.named_parameters(recurse=False):
            setattr(replacement, name, param)
        replacement.train(layer.training)
        parent, _, name = path.rpartition(".")
        setattr(module.get_submodule(parent), name, replacement)


def replaceable(layer: nn.LayerNorm) -> bool:
    """Whether TransformerEngine has this layer norm: over one dimension, with weight and bias."""
    return len(layer.normalized_shape) == 1 and layer.elementwise_affine and _has_bias(layer)


def _has_bias(layer: Any) -> bool:
    return layer.bias is not None


@attrs.frozen(kw_only=True)
class Autocast:
    """The context in which TransformerEngine's layers compute in fp8 (a FORWARD transform).

    Attributes:
        recipe: `"hybrid"` (e4m3 forward, e5m2 backward), `"e4m3"`, or `"mxfp8"` (scales of 32 elements).
        amax_history_len, amax_compute_algo, margin: of delayed scaling, as in TransformerEngine.
    """

    recipe: str = "hybrid"
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    margin: int = 0

    def describe(self) -> str:
        """The text in the plan."""
        if self.recipe == "mxfp8":
            return "mxfp8, scales of 32 elements"
        return (
            f"{self.recipe}, delayed scaling: {self.amax_compute_algo} of {self.amax_history_len}, "
            f"margin {self.margin}"
        )

    def __call__(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """`loss_fn` in TransformerEngine's context."""
        recipes: list[Any] = []

        def loss(model: object, batch: Tree, *lent_models: Any) -> Any:
            where = 'fa.transforms.Float8(backend="transformer_engine")'
            engine = backend(where)
            if not recipes:
                recipes.append(self.build(where))
            # newer versions call it autocast
            if hasattr(engine, "autocast"):
                context = engine.autocast(enabled=True, recipe=recipes[0])
            else:
                context = engine.fp8_autocast(enabled=True, fp8_recipe=recipes[0])
            with context:
                return loss_fn(model, batch, *lent_models)

        return loss

    def build(self, where: str) -> Any:
        """TransformerEngine's own recipe.

        Raises:
            CapabilityError: this version has no such recipe.
        """
        recipes = _module("transformer_engine.common.recipe", where)
        if self.recipe == "mxfp8":
            if not hasattr(recipes, "MXFP8BlockScaling"):
                raise CapabilityError(
                    "this TransformerEngine has no MXFP8BlockScaling",
                    where=where,
                    fix='version 2 or newer has; or recipe="hybrid"',
                )
            return recipes.MXFP8BlockScaling(fp8_format=recipes.Format.E4M3)
        return recipes.DelayedScaling(
            margin=self.margin,
            fp8_format=getattr(recipes.Format, self.recipe.upper()),
            amax_history_len=self.amax_history_len,
            amax_compute_algo=self.amax_compute_algo,
        )
