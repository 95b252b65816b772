"""The orders that torch's own schedules have, from methods that are private there (2.13)."""

from __future__ import annotations

from types import SimpleNamespace

from torch.distributed.pipelining import schedules as theirs

_KINDS = {
    "FORWARD": "F",
    "BACKWARD": "B",
    "FULL_BACKWARD": "B",
    "BACKWARD_INPUT": "I",
    "BACKWARD_WEIGHT": "W",
}


def _plain(order):
    return [
        (_KINDS[action.computation_type.name], action.stage_index, action.microbatch_index)
        for action in order
        if action is not None and action.computation_type.name in _KINDS
    ]


def single(name, ranks, micro_batches):
    """The actions of each rank under Schedule1F1B or ScheduleGPipe."""
    kind = {"1f1b": theirs.Schedule1F1B, "gpipe": theirs.ScheduleGPipe}[name]
    schedule = SimpleNamespace(_num_stages=ranks, _n_microbatches=micro_batches)
    order = kind._get_pipeline_order(schedule)
    return [_plain(order[rank]) for rank in range(ranks)]


def interleaved(ranks, virtual, micro_batches):
    """The actions of each rank under ScheduleInterleaved1F1B."""
    rounds = max(1, micro_batches // ranks)
    schedule = SimpleNamespace(
        n_local_stages=virtual,
        pp_group_size=ranks,
        _n_microbatches=micro_batches,
        number_of_rounds=rounds,
        microbatches_per_round=micro_batches // rounds,
    )
    calculate = theirs.ScheduleInterleaved1F1B._calculate_single_rank_operations
    return [_plain(calculate(schedule, rank)) for rank in range(ranks)]


def zero_bubble(ranks, micro_batches):
    """The actions of each rank under ScheduleZBVZeroBubble."""
    schedule = SimpleNamespace(pp_group_size=ranks, num_stages=2 * ranks, _n_microbatches=micro_batches)
    calculate = theirs.ScheduleZBVZeroBubble._calculate_single_rank_operations
    return [_plain(calculate(schedule, rank)) for rank in range(ranks)]
