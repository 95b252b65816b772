"""`epsilon`: how much a training by `fa.per_example` says about one row. Opacus does the arithmetic."""

from __future__ import annotations

import importlib
import math
import warnings
from typing import Any, Literal, get_args

from fnaccel.data.loaders import Indexed, classify
from fnaccel.data.order import draws
from fnaccel.data.shard import Shards
from fnaccel.errors import (
    ArgumentError,
    MissingBackendError,
    UnknownNameError,
    install_line,
    nearest,
    require,
)
from fnaccel.program.train_step import TrainStep
from fnaccel.state import TrainState, lease_of
from fnaccel.step.step import Phase, Step
from fnaccel.transforms.per_example import Noise, PerExample

Accountant = Literal["prv", "rdp"]

_WHERE = "fa.epsilon"
_PRECISION = 0.01
"""The error of epsilon by "prv"."""
_POINTS = 4_000_000
"""Points of its discretisation at most: some 400 MiB, and two seconds."""

_SAFE = frozenset({
    "accumulate", "attention", "cast_layers", "clip_norm", "clip_value", "compile", "remat", "skip_nonfinite",
    "with_ema", "with_precision", "with_weight",
})  # fmt: skip
"""Transforms that read nothing of a batch beside the loss of rows, or only the gradient with noise."""


def epsilon(
    train_step: TrainStep, state: TrainState, shards: Shards, *, delta: float, accountant: Accountant = "prv"
) -> float:
    """The epsilon of (epsilon, delta) differential privacy, of a state that was trained on these shards.

    It is the claim that the parameters could nearly as well come from data that has one row more or less. It
    does not cover metrics, which are computed without noise, a choice between runs, or readers who know the
    seeds of noise and sampling. Opacus has the accountants.

    Args:
        train_step: made of `fa.per_example(step, clip=, noise=, rows=)`.
        state: after the training. All of its steps were made on `shards`: their number is checked, not their
            batches.
        shards: made by `fa.shard(loader, sampling="poisson")`.
        delta: the probability with which the claim may fail: well below 1 over the rows of the data.
        accountant: `"prv"` (Gopi et al. 2021, https://arxiv.org/abs/2106.02848) or `"rdp"`
            (Mironov 2017, https://arxiv.org/abs/1702.07476), whose numbers are larger.

    Returns:
        Epsilon, 0.0 before the first step.

    Raises:
        ArgumentError: the claim would be false: batches are not drawn, the sum is divided by another number,
            there is no noise, a transform may read rows beside it, or steps were made on other data. Or so
            little noise that `"prv"` would take the memory of the machine.
        MissingBackendError: Opacus is not installed.
        UnknownNameError: no such accountant.

    Example:
        >>> loader = DataLoader(dataset * 100, batch_size=60)
        >>> shards = fa.shard(loader, sampling="poisson", seed=20_261_126)  # keep yours secret
        >>> train_step = make(fa.per_example(loss_fn, clip=1.0, noise=1.1, rows=60))
        >>> for state, metrics in fa.scan(train_step, train_step.init(), shards, steps=2):
        ...     pass
        >>> print(f"{fa.epsilon(train_step, state, shards, delta=1e-5):.2f}")
        0.92
    """
    if accountant not in get_args(Accountant):
        raise UnknownNameError(
            f"there is no accountant {accountant!r}",
            where=_WHERE,
            fix=nearest(str(accountant), get_args(Accountant)),
        )
    require(0 < delta < 1, f"delta={delta}", _WHERE, "a probability, such as 1e-5")
    noise = _noise_of(train_step)
    samples, expected = _drawn_of(shards, train_step.mesh.batch_size)
    if shards.seed == 0:
        warnings.warn(
            "these batches are drawn by the seed 0, the default: who knows it knows which rows a batch had. "
            "fa.shard(loader, sampling='poisson', seed=secrets.randbits(63))",
            UserWarning,
            stacklevel=2,
        )
    if noise.rows != expected:
        raise ArgumentError(
            f"{expected} rows are expected in a batch, and the divisor is {noise.rows or 'the weight'}",
            where=_WHERE,
            fix=f"fa.per_example(step, clip=, noise=, rows={expected})",
        )
    steps = (
        state.data.epoch * len(draws(samples, expected, shards.remainder)) + state.data.samples // expected
    )
    if steps != state.step:
        raise ArgumentError(
            f"the state has made {state.step} steps, and stands after {steps} batches of these shards",
            where=_WHERE,
            fix="train on these shards only: fa.scan(train_step, state, shards) from train_step.init() on",
        )
    if not noise.made_all(state.transforms["per_example.noise"], int(state.updates)):
        raise ArgumentError(
            "not all updates of the state were made with the noise of this step",
            where=_WHERE,
            fix="train from train_step.init() on, and restore checkpoints of such runs only",
        )
    read = (lease_of(state, _WHERE).owner.instance.learned.source or {}).get("samples", samples)
    if read != samples:
        raise ArgumentError(
            f"the last batch was one of {read} rows, and these shards have {samples}",
            where=_WHERE,
            fix="the shards that the state was trained on",
        )
    if delta > 1 / samples:
        warnings.warn(
            f"delta={delta:g} is more than 1 over the {samples:,} rows: to publish one whole row would do",
            UserWarning,
            stacklevel=2,
        )
    if steps == 0:
        return 0.0
    rate = expected / samples
    _check_never_empty(steps, samples, rate, delta)
    history = [(noise.multiplier, rate, steps)]
    if accountant == "prv":
        # the domain of Opacus (compute_safe_domain_size), whose points it holds in several arrays
        reach = _spent("rdp", history, delta / 1000 / 4)
        points = 2 * reach * math.sqrt(steps * math.log(12_000 / delta) / 2) / _PRECISION
        if points > _POINTS:
            raise ArgumentError(
                f'so little noise has an epsilon of {_spent("rdp", history, delta):.3g} by "rdp", and "prv" '
                f"would need {points:.1e} points for two digits after the comma",
                where=_WHERE,
                fix='accountant="rdp"; or more noise: no epsilon above 10 hides much',
            )
    return _spent(accountant, history, delta)


def _spent(accountant: Accountant, history: list[tuple[float, float, int]], delta: float) -> float:
    counted = _accountants().create_accountant(accountant)
    counted.history = history
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of numpy, where a bound at some order overflows
        return max(0.0, float(counted.get_epsilon(delta=delta)))


def _noise_of(train_step: TrainStep) -> Noise:
    """The noise of a step that reads batches through clipped rows only."""
    spec, found = train_step.spec, None
    assert isinstance(spec.step, Step)
    for transform in spec.step.transforms:
        if isinstance(transform.apply, Noise):
            found = transform.apply
        elif isinstance(transform.apply, PerExample):
            continue
        elif transform.name not in _SAFE or (transform.phase is Phase.GRADS and found is None):
            raise ArgumentError(
                f"{transform.name} stands beside the noise, and may read rows without it",
                where=_WHERE,
                fix="write it around fa.per_example(...), if it is fa.clip_norm or the like, or leave it out",
            )
    if found is None or not found.multiplier:
        raise ArgumentError(
            "the step has no noise, so it hides nothing",
            where=_WHERE,
            fix="fa.per_example(step, clip=1.0, noise=1.1, rows=256)",
        )
    if spec.step.settings.precision.scaled:
        raise ArgumentError(
            "fp16 leaves an update out if gradients without noise overflow",
            where=_WHERE,
            fix='fa.with_precision(step, "bf16")',
        )
    if train_step.engine.layout.whole_from(1) != 1:
        raise ArgumentError(
            f"{spec.strategy} makes updates of each rank's rows, and the noise is that of one update of all",
            where=_WHERE,
            fix="fa.ddp() or fa.fsdp()",
        )
    return found


def _drawn_of(shards: Shards, ranks: int) -> tuple[int, int]:
    """(rows of the data, expected rows of a global batch)."""
    source = classify(shards.loader)
    if shards.sampling is None or not isinstance(source, Indexed):
        raise ArgumentError(
            "batches of a loader that reads each row once an epoch are no independent draws",
            where=_WHERE,
            fix='fa.shard(loader, sampling="poisson")',
        )
    return len(source.loader.dataset), source.batch_size * (ranks if shards.per_rank else 1)


def _check_never_empty(steps: int, samples: int, rate: float, delta: float) -> None:
    """Raise unless batches have rows: one without makes no update, which tells that nobody was in it."""
    empty = math.exp(samples * math.log1p(-rate)) if rate < 1 else 0.0
    if steps * empty > delta / 1000:
        raise ArgumentError(
            f"a batch has no row with the probability {empty:.1e}, and then no update, which can be seen",
            where=_WHERE,
            fix="a larger batch: 32 rows expected, or more",
        )


def _accountants() -> Any:
    try:
        return importlib.import_module("opacus.accountants")
    except ImportError as error:
        raise MissingBackendError(
            "the accountants are those of Opacus, which is not installed",
            where=_WHERE,
            fix=install_line("privacy"),
        ) from error
