"""Deliberate bugs of what a run shows: shares of time, rates, peaks, reports, spikes."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PROFILE = "tests/seeing/test_profile.py"
MEASURES = "tests/seeing/test_measures.py"
REPORT = "tests/seeing/test_report.py"
SPIKES = "tests/transforms/test_spikes.py"

MUTANTS = [
    Mutant(
        "hidden communication counted as communication", "seeing/timeline.py",
        '("compute", "communication", _DATA)', '("communication", "compute", _DATA)', (PROFILE, "-k", "hides_communication"),
    ),
    Mutant(
        "waiting for data counted as compute", "seeing/timeline.py",
        '(_DATA, "compute", "communication")', '("compute", _DATA, "communication")',
        (PROFILE, "-k", "on_the_cpu"),
    ),
    Mutant(
        "phases that never end", "world/progress_marks.py", "        enter(*self._before)\n", "        pass\n",
        ("tests/seeing/test_progress_marks.py",),
    ),
    Mutant(
        "a first step that counts in the rate", "seeing/throughput.py", "            self._ends.clear()\n", "",
        (MEASURES, "-k", "window"),
    ),
    Mutant(
        "tokens of one rank", "loop/measured.py", "tokens * self._ranks", "tokens", (MEASURES, "-k", "all_ranks"),
    ),
    Mutant(
        "flops of a forward alone", "program/model_access.py", "return 3 * flops_of", "return flops_of",
        (MEASURES, "-k", "three_forwards"),
    ),
    Mutant(
        "a Ctrl-C at the end of a swap leaves its handler", "world/undo.py",
        "        try:\n            self._undo()\n", "        try:\n            self._undo()\n            self._ended = True\n",
        ("tests/laws/test_interrupts.py", "-k", "no_handler and evaluate and 1"),
    ),
    Mutant(
        "gradients cleared before memory is explained", "program/update_guard.py",
        "        explain_out_of_memory(error, instance.named_tensors)", "        instance.engine.drop_pass()\n        explain_out_of_memory(error, instance.named_tensors)", (MEASURES, "-k", "earlier_micro"),
    ),
    Mutant(
        "a report with the steps that a restart took back", "seeing/runs.py", "points[-1][0] >= step", "points[-1][0] > step",
        (REPORT, "-k", "went_back"),
    ),
    Mutant(
        "a long log without its smallest values", "seeing/runs.py", "chosen |= {min(finite, key=", "chosen |= {max(finite, key=",
        ("tests/seeing/test_long_logs.py", "-k", "keeps_its_smallest"),
    ),
    Mutant(
        "names in a report as HTML", "seeing/report_page.py", 'f"<td>{escape(value)}</td>"', 'f"<td>{value}</td>"',
        (REPORT, "-k", "ends_with"),
    ),
    Mutant(
        "a spike that moves the mean", "transforms/spikes.py", "torch.where(spike, limit, loss)", "loss",
        (SPIKES, "-k", "second_spike"),
    ),
    Mutant(
        "a spike that is updated", "transforms/spikes.py", "            grads.skip_where(spike)\n",
        "            pass\n", (SPIKES, "-k", "named"),
    ),
]  # fmt: skip
