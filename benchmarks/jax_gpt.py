"""The GPT of `models.py` in JAX and optax, and its training loop, which `jax_step.py` drives.

    python benchmarks/jax_gpt.py FILE SETTINGS

The process has jax and no torch. FILE has the weights and rows, SETTINGS is JSON. The answer to each line
of the input is a line of output, both in JSON. `first` asks for the time to the first loss, `losses` for the
losses of so many steps, `block` for the seconds of each of so many steps.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import platform
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Params = dict[str, jax.Array]


def linear(params: Params, name: str, x: jax.Array) -> jax.Array:
    """`nn.Linear`, whose weight is `[out, in]`."""
    y = x @ params[f"{name}.weight"].T
    return y + params[f"{name}.bias"] if f"{name}.bias" in params else y


def norm(params: Params, name: str, x: jax.Array) -> jax.Array:
    """`nn.LayerNorm`."""
    scaled = jax.nn.standardize(x, axis=-1, epsilon=1e-5)
    return scaled * params[f"{name}.weight"] + params[f"{name}.bias"]


def block(params: Params, name: str, x: jax.Array, heads: int) -> jax.Array:
    """One transformer block."""
    count, length, width = x.shape
    qkv = linear(params, f"{name}.qkv", norm(params, f"{name}.norm1", x))
    q, k, v = jnp.moveaxis(qkv.reshape(count, length, 3, heads, width // heads), 2, 0)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + linear(params, f"{name}.project", mixed.reshape(count, length, width))
    up = linear(params, f"{name}.up", norm(params, f"{name}.norm2", x))
    return x + linear(params, f"{name}.down", jax.nn.gelu(up, approximate=False))


def loss_fn(params: Params, x: jax.Array, y: jax.Array, heads: int) -> jax.Array:
    """The mean loss of the next tokens."""
    layers = 1 + max(int(name.split(".")[1]) for name in params if name.startswith("blocks."))
    hidden = params["embed.weight"][x] + params["position.weight"][: x.shape[1]]
    for number in range(layers):
        hidden = block(params, f"blocks.{number}", hidden, heads)
    logits = linear(params, "head", norm(params, "norm", hidden))
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def train(
    params: Params,
    x: np.ndarray,
    y: np.ndarray,
    *,
    heads: int,
    rows: int,
    peak: float,
    warmup: int,
    total: int,
) -> Iterator[jax.Array]:
    """Yield the loss of each step: rows in order, AdamW, clip 1.0, warm-up and cosine, donated buffers."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, total)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))

    def update(params: Params, state: Any, x: jax.Array, y: jax.Array) -> tuple[Params, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_fn)(params, x, y, heads)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    step = jax.jit(update, donate_argnums=(0, 1))
    params = jax.tree.map(jnp.array, params)
    state = optimizer.init(params)
    while True:
        for start in range(0, len(x), rows):
            params, state, loss = step(params, state, x[start : start + rows], y[start : start + rows])
            yield loss


def timed_block(loop: Iterator[jax.Array], calls: int) -> float:
    """Seconds for each of so many steps, after one that is not counted: as `interleave.timed_block`."""
    gc.collect()
    next(loop).block_until_ready()
    began = time.perf_counter()
    for _ in range(calls - 1):
        next(loop)
    next(loop).block_until_ready()
    return (time.perf_counter() - began) / calls


def main() -> None:
    """Answer the lines of the input."""
    warnings.simplefilter("ignore")
    with np.load(sys.argv[1]) as file:
        arrays = dict(file)
    x, y = arrays.pop("x").astype(np.int32), arrays.pop("y").astype(np.int32)
    packages = ("jax", "jaxlib", "optax", "numpy")
    versions = {name: importlib.metadata.version(name) for name in packages}
    print(json.dumps({**versions, "python of jax": platform.python_version()}), flush=True)
    gc.disable()
    gc.freeze()
    loop = train(arrays, x, y, **json.loads(sys.argv[2]))  # nothing runs yet
    for line in sys.stdin:
        asked = json.loads(line)
        if "first" in asked:
            began = time.perf_counter()
            float(next(loop))
            answer: Any = time.perf_counter() - began
        elif "losses" in asked:
            answer = [float(next(loop)) for _ in range(asked["losses"])]
        else:
            answer = timed_block(loop, asked["block"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
