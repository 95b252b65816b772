"""k updates of AdamW by `jax.lax.scan`, as `pure.py` runs it: `python benchmarks/jax_scan.py SETTINGS`.

The process has jax and no torch. Prints the seconds of one update in each block, as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import jax
import jax.numpy as jnp
import numpy as np
import optax

SIZES = ((64, 64), (64, 64), (64, 10))


def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """The MLP of `pure.py`."""
    for weight, bias in params[:-1]:
        x = jnp.tanh(x @ weight + bias)
    weight, bias = params[-1]
    return optax.softmax_cross_entropy_with_integer_labels(x @ weight + bias, y).mean()


def main() -> None:
    """Time as many blocks as the settings say."""
    settings = json.loads(sys.argv[1])
    count, rows = settings["count"], settings["rows"]
    optimizer = optax.adamw(settings["rate"], weight_decay=0.01)
    keys = jax.random.split(jax.random.key(0), len(SIZES))
    params = [
        (jax.random.normal(key, size) * size[0] ** -0.5, jnp.zeros(size[1]))
        for key, size in zip(keys, SIZES, strict=True)
    ]
    generator = np.random.default_rng(0)
    xs = generator.standard_normal((count, rows, 64), dtype=np.float32)
    ys = xs[:, :, :10].argmax(-1)

    def step(carry: Any, batch: Any) -> Any:
        params, state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    run = jax.jit(lambda carry, xs, ys: jax.lax.scan(step, carry, (xs, ys))[0])
    carry = jax.block_until_ready(run((params, optimizer.init(params)), xs, ys))
    gc.disable()
    taken = []
    for _ in range(settings["blocks"]):
        carry = jax.block_until_ready(run(carry, xs, ys))
        began = time.perf_counter()
        for _ in range(settings["calls"]):
            carry = run(carry, xs, ys)
        jax.block_until_ready(carry)
        taken.append((time.perf_counter() - began) / settings["calls"] / count)
    print(json.dumps(taken))


if __name__ == "__main__":
    main()
