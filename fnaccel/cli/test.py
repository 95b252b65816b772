"""`fnaccel test`: a table of what works on this machine, or on several together."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import attrs
import torch

from fnaccel.cli.options.test import parser
from fnaccel.cli.selftest import communication, machine, training
from fnaccel.cli.selftest.meeting import Meeting
from fnaccel.cli.selftest.results import CheckFailedError, Result, judged
from fnaccel.cli.selftest.running import Ranks
from fnaccel.cli.terminal import columns, print_json, printable, split_list
from fnaccel.errors import require
from fnaccel.launch.accelerators import count_accelerators
from fnaccel.strategies import strategy

_PROG = "fnaccel test"


def run(arguments: Sequence[str]) -> int:
    """Run the checks one by one, and print a line for each.

    Returns:
        0, or 1 if a check failed.

    Raises:
        FnaccelError: an option is wrong.
    """
    options = parser().parse_args(arguments)
    ranks = _ranks(options)
    torch.set_num_threads(1)  # before the first fork: OpenMP's threads do not survive it
    results: list[Result] = []
    for result in _results(options, ranks):
        results.append(result)
        if not options.json:
            _show(result, verbose=options.verbose)
    if ranks.meeting is not None:
        ranks.meeting.leave()
    failed = sum(result.status == "fail" for result in results)
    if options.json:
        print_json([attrs.asdict(result) for result in results])
    else:
        passed = sum(result.status == "pass" for result in results)
        print(f"\n{passed} passed, {failed} failed, {len(results) - passed - failed} not available")
    return int(failed > 0)


def _ranks(options: argparse.Namespace) -> Ranks:
    accelerators = 0 if options.cpu else count_accelerators()
    processes = accelerators or 2 if options.nproc is None else options.nproc
    require(processes >= 1, f"{processes} ranks can't be checked", f"{_PROG} -n", "-n 1, or more")
    nodes, folder = options.nnodes, options.folder
    require(nodes >= 1, f"{nodes} machines can't be checked", f"{_PROG} --nnodes", "--nnodes 1, or more")
    require(
        nodes == 1 or options.master_addr is not None,
        f"{nodes} machines need an address",
        f"{_PROG} --nnodes",
        "--master-addr with the address of the first machine, on all machines",
    )
    require(
        folder is None or folder.is_dir(),
        f"there is no folder {folder}",
        f"{_PROG} --folder",
        "name a folder that exists on all machines",
    )
    for text in split_list(options.strategies):
        strategy(text)
    return Ranks(
        processes=processes,
        nodes=options.nnodes,
        node_rank=options.node_rank,
        address=options.master_addr,
        meeting=_meet(options) if nodes > 1 else None,
        cpu=options.cpu or not accelerators,
    )


def _meet(options: argparse.Namespace) -> Meeting:
    address, port = options.master_addr, options.master_port
    print(f"waiting for {options.nnodes} machines at {address}", file=sys.stderr, flush=True)
    return Meeting(options.nnodes, options.node_rank, address, port)


def _results(options: argparse.Namespace, ranks: Ranks) -> Iterator[Result]:
    yield judged("kernel", machine.check_kernel)
    yield judged("cards: peer-to-peer", partial(machine.check_cards, ranks))
    yield _together(ranks, "ports", partial(machine.check_ports, ranks))
    yield _together(ranks, "collectives", partial(communication.check_collectives, ranks))
    try:
        expected = training.reference(ranks.cpu)
    except CheckFailedError as fault:
        yield Result("one process", "fail", str(fault), fault.output)
        return
    for text in split_list(options.strategies):
        check = partial(training.check_strategy, text, ranks, expected)
        yield _together(ranks, f"strategy {text}", check)
    check = partial(training.check_checkpoint, ranks, expected, options.folder)
    yield _together(ranks, "checkpoint", check)


def _together(ranks: Ranks, check: str, run: Callable[[], str]) -> Result:
    """The result of a check that all machines begin together."""

    def begin_and_run() -> str:
        if ranks.meeting is not None:
            ranks.meeting.begin()
        return run()

    return judged(check, begin_and_run)


def _show(result: Result, *, verbose: bool) -> None:
    print(columns([(f"{result.check:32}", f"{result.status:13}", result.detail)], "<<"), flush=True)
    if verbose and result.status == "fail" and result.output:
        print(printable(result.output, keep="\n"), file=sys.stderr, flush=True)
