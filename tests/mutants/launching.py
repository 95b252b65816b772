"""Deliberate bugs of the launcher: two jobs that become one, and a store that is trusted."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

TWO_JOBS = "tests/launch/test_two_jobs.py"

MUTANTS = [
    Mutant(
        "the port of the ranks is anybody's until rank 0 listens", "launch/network.py",
        '            holder.close()', '            pass\n        holder.close()', ("tests/launch/test_job.py", "-k", "reserved_port"),
    ),
    Mutant(
        "activations whose offload is left out", "config/importing/strategies.py", "if draft.truth(_OFFLOAD):", "if False:",
        ("tests/config/importing/test_accelerate_files.py", "-k", "wait_on_the_host"),
    ),
    Mutant(
        "mistakes of one section that hide those of the next", "config/yaml.py",
        "found.append(_mistake_in(error) or _wrong_kind(error, where))",
        "raise (_mistake_in(error) or _wrong_kind(error, where)) from error",
        ("tests/cli/test_config.py", "-k", "lists_all"),
    ),
    Mutant(
        "a Ctrl-C that says nothing of what was saved", "loop/scanning.py", "saved = train_step.live_state, saver and saver.path",
        "saved = train_step.live_state, None", ("tests/loop/test_left_loops.py", "-k", "ctrl_c"),
    ),
    Mutant(
        "launchers of two jobs meet", "launch/elastic.py", "        if not difference:\n", "        if True:\n",
        (TWO_JOBS, "-k", "launchers_of_two_jobs and contents"),
    ),
    Mutant(
        "one script with other contents is one job", "launch/same_job.py", "if self.contents != other.contents:",
        "if False:", (TWO_JOBS, "-k", "launchers_of_two_jobs and contents"),
    ),
    Mutant(
        "ranks of two jobs meet", "world/joining.py", "    return json.dumps([f\"{ranks.size} ranks\"",
        "    return ''\n    return json.dumps([f\"{ranks.size} ranks\"", (TWO_JOBS, "-k", "ranks_of_two_jobs and run"),
    ),
    Mutant(
        "a pickle of the store is not checked", "launch/rendezvous.py",
        "if isinstance(answer, tuple) and not is_state(answer[0]):", "if False:",
        ("tests/launch/test_foreign_values.py", "-k", "stranger and state"),
    ),
    Mutant(
        "a newline in a section is a line of the job script", "launch/sections.py",
        'any(category(character) == "Cc" for character in value)', "False",
        ("tests/config/test_carriers.py", "-k", "adds_no_line and slurm"),
    ),
]  # fmt: skip
