"""`fnaccel estimate`: the memory of a model by name, of training it on any ranks, and of inference."""

from __future__ import annotations

import argparse
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast

import attrs

from fnaccel.big.sizes import Dtype, Sizes, sizes
from fnaccel.cli.options.estimate import parser
from fnaccel.cli.subject import fields_of, recipe_of, step_fields
from fnaccel.cli.terminal import columns, print_json, split_list
from fnaccel.config import Recipe
from fnaccel.config.applying import make_optimizer, under_own
from fnaccel.config.references import load
from fnaccel.errors import ArgumentError, require
from fnaccel.estimate import (
    Choice,
    LeastTime,
    NamedModel,
    Rates,
    TrainingEstimate,
    cheapest,
    choices,
    find_model,
    inference,
    least_time,
    training,
)
from fnaccel.program.launcher_flags import filled
from fnaccel.step.step import StepLike, as_step
from fnaccel.strategies import distribute
from fnaccel.texts import bytes_in, rate_in, size_of
from fnaccel.tree import Tree
from fnaccel.world.simulation import check_machines

Fields = Mapping[str, Any]
_PROG = "fnaccel estimate"


def run(arguments: Sequence[str]) -> int:
    """Print the estimates.

    Returns:
        0, or 1 if `--fits` was given and no strategy fits.

    Raises:
        FnaccelError: an option is wrong, there is no such model, or it could not be trained so.
    """
    options = parser().parse_args(arguments)
    _check(options)
    named = find_model(options.model, trust_remote_code=options.trust_remote_code)
    fields = fields_of(options, _PROG)
    recipe, chosen = recipe_of(fields, _PROG), step_fields(fields)
    measured = _sizes(named, cast(list[Dtype], split_list(options.dtypes)))  # `sizes` refuses other names
    report: dict[str, Any] = {"model": options.model, "sizes": [_plain_sizes(each) for each in measured]}
    texts = [_table_of_sizes(measured)]
    code = 0
    if options.inference:
        result = inference(
            named, rows=options.batch or 1, length=options.length, dtype=_dtype(recipe, options)
        )
        report["inference"] = {**attrs.asdict(result), "total": result.total}
        texts.append(str(result))
    elif options.fits is not None:
        budget = bytes_in(options.fits, f"{_PROG} --fits")
        compared = _compared(named, recipe, chosen, options, budget)
        best = cheapest(compared)
        report |= {"budget": budget, "choices": [_plain_choice(choice) for choice in compared]}
        report["cheapest"] = None if best is None else _plain_choice(best)
        texts.append(_table_of_choices(compared, best, options))
        code = int(best is None)
    elif _trains(named, options) or options.loss or options.inputs:
        estimate, least = _training(named, recipe, chosen, options)
        report |= {"training": _plain(estimate), "least_time": None if least is None else _plain_time(least)}
        texts += [str(estimate)] if least is None else [str(estimate), str(least)]
    else:
        texts.append("to estimate training, give --loss and --inputs")
    if options.json:
        print_json(report)
    else:
        print("\n\n".join(texts))
    return code


def _check(options: argparse.Namespace) -> None:
    for name in ("ranks", "batch", "length", "per_machine"):
        value, flag = getattr(options, name), f"--{name.replace('_', '-')}"
        require(value is None or value >= 1, f"{flag} {value} is too few", f"{_PROG} {flag}", "1, or more")
    local = options.per_machine or options.ranks
    check_machines(options.ranks, local, f"{_PROG} --per-machine")
    alone = options.ranks == 1 and not (options.strategy or options.remat or options.accumulate)
    require(
        alone or not options.inference,
        "--inference counts one device and one forward pass",
        f"{_PROG} --inference",
        "leave out --ranks, --strategy, --remat and --accumulate",
    )
    require(
        not (options.inference and options.fits),
        "--fits compares strategies of training",
        f"{_PROG} --inference --fits",
        "leave one of them out",
    )
    require(
        options.flops is not None or options.link is None,
        "a bound of the time needs the rate of compute too",
        f"{_PROG} --link",
        "--flops 400T --link 450GB",
    )


def _sizes(named: NamedModel, dtypes: Sequence[Dtype]) -> list[Sizes]:
    module = named.factory()
    return [sizes(module, dtype) for dtype in dtypes]


def _table_of_sizes(rows: Sequence[Sizes]) -> str:
    lines = [("dtype", "largest layer", "total", "")]
    for row in rows:
        path, size = row.largest
        lines.append((str(row.dtype), size_of(size), size_of(row.total), path))
    return columns(lines, "<>>")


def _trains(named: NamedModel, options: argparse.Namespace) -> bool:
    loss = options.loss is not None or named.loss_fn is not None
    return loss and (options.inputs is not None or named.batch is not None)


def _subject(
    named: NamedModel, recipe: Recipe, chosen: Fields, options: argparse.Namespace
) -> tuple[StepLike, Tree]:
    """The step and the batch of one rank. `chosen` are the fields of the recipe that a train step uses.

    Raises:
        ArgumentError: one of them is unknown.
    """
    loss_fn = named.loss_fn if options.loss is None else load(options.loss, f"{_PROG} --loss")
    if options.inputs is not None:
        batch = load(options.inputs, f"{_PROG} --inputs")
        counted = callable(batch) and bool(inspect.signature(batch).parameters)
        require(
            counted or options.batch is None,
            f"--batch {options.batch}, and {options.inputs} takes no number of rows",
            f"{_PROG} --inputs",
            "leave --batch out, or name a function of the number of rows",
        )
        if callable(batch):
            batch = batch(options.batch or 1) if counted else batch()
    else:
        batch = None if named.batch is None else named.batch(options.batch or 1, options.length)
    if loss_fn is None or batch is None:
        raise ArgumentError(
            f"nothing is known of the loss or of the batches of {named.name}",
            where=_PROG,
            fix="--loss module:loss_fn --inputs module:make_batch",
        )
    step, _ = filled(as_step(loss_fn, f"{_PROG} --loss"), chosen)
    return under_own(recipe, step), batch


def _training(
    named: NamedModel, recipe: Recipe, chosen: Fields, options: argparse.Namespace
) -> tuple[TrainingEstimate, LeastTime | None]:
    step, batch = _subject(named, recipe, chosen, options)
    estimate = training(
        step,
        model=distribute(named.factory, chosen.get("strategy")),
        optimizer=make_optimizer(recipe.optimizer),
        batch=batch,
        ranks=options.ranks,
        per_machine=options.per_machine,
    )
    if options.flops is None:
        return estimate, None
    rate = functools.partial(_rate, options)
    link = rate("link") or float("inf")
    rates = Rates(
        flops=rate("flops"),
        link=link,
        network=rate("network") or link,
        per_machine=options.per_machine or options.ranks,
    )
    return estimate, least_time(estimate, rates)


def _rate(options: argparse.Namespace, name: str) -> float:
    """A rate of the options. 0 if it was not given."""
    text = getattr(options, name)
    return 0.0 if text is None else rate_in(text, f"{_PROG} --{name}")


def _compared(
    named: NamedModel, recipe: Recipe, chosen: Fields, options: argparse.Namespace, budget: int
) -> list[Choice]:
    # with and without remat is compared
    fixed = {name: value for name, value in chosen.items() if name != "remat"}
    step, batch = _subject(named, recipe, fixed, options)
    return choices(
        step,
        named.factory,
        optimizer=make_optimizer(recipe.optimizer),
        batch=batch,
        budget=budget,
        ranks=options.ranks,
        per_machine=options.per_machine,
        only=() if options.strategy is None else (options.strategy,),
    )


def _table_of_choices(compared: Sequence[Choice], best: Choice | None, options: argparse.Namespace) -> str:
    lines = [("strategy", "remat", "peak", "sent", f"fits {options.fits}")]
    for choice in compared:
        remat = "yes" if choice.remat else "no"
        if choice.estimate is None:
            lines.append((choice.strategy, remat, "", "", choice.obstacle))
            continue
        sent = sum(choice.estimate.work.sizes.values())
        verdict = ("yes, the cheapest" if choice is best else "yes") if choice.fits else "no"
        lines.append((choice.strategy, remat, size_of(choice.estimate.total), size_of(sent), verdict))
    table = columns(lines, "<<>>")
    if best is None:
        return f"{table}\n\nnone fits: try fewer or shorter rows, more ranks, or --precision bf16"
    return f'{table}\n\nsuggested: --strategy "{best.strategy}"' + (" --remat" if best.remat else "")


def _dtype(recipe: Recipe, options: argparse.Namespace) -> Dtype:
    """The dtype of inference: bf16, unless another one was named."""
    default = options.precision is None and recipe.precision in ("fp8", "fp32")
    return "bf16" if default else cast(Dtype, recipe.precision)  # `inference` refuses other names


def _plain_sizes(measured: Sizes) -> dict[str, Any]:
    path, size = measured.largest
    return {"dtype": measured.dtype, "total": measured.total, "largest_layer": path, "largest": size}


def _plain(estimate: TrainingEstimate) -> dict[str, Any]:
    return {
        "layout": estimate.footprint.layout,
        "total": estimate.total,
        "on_device": estimate.on_device,
        "phase": estimate.peak.phase,
        "kinds": dict(estimate.peak.kinds),
        "phases": dict(estimate.phases),
        "flops": estimate.work.flops,
        "collectives": [
            {"axis": axis, "kind": kind, "count": estimate.work.counts[axis, kind], "bytes": size}
            for (axis, kind), size in estimate.work.sizes.items()
        ],
    }


def _plain_choice(choice: Choice) -> dict[str, Any]:
    return {
        "strategy": choice.strategy,
        "remat": choice.remat,
        "fits": choice.fits,
        "obstacle": choice.obstacle,
        "total": None if choice.estimate is None else choice.estimate.total,
    }


def _plain_time(least: LeastTime) -> dict[str, Any]:
    links: Mapping[str, float] = least.links
    return {"total": least.total, "compute": least.compute, "links": dict(links)}
