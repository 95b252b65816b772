"""Deliberate bugs of replicas that train apart: values of one replica, or of none, in the place of all."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FOLDER = "tests/strategies/replicas"
TRAINING, CHECKPOINTS, STOPS, ANCHOR, QUIET = (
    f"{FOLDER}/test_{name}.py" for name in ("training", "checkpoints", "stops", "anchor", "boundary")
)
BOUNDARY = "strategies/replicas/boundary.py"

MUTANTS = (
    Mutant(
        "replicas: the anchor of a checkpoint is not taken",
        "checkpoint/restoring.py",
        "fresh=bool(like.transforms) and not has_axis_state(like, stored)",
        "fresh=True",
        (STOPS, "-k", "asked_to_stop and diloco"),
    ),
    Mutant(
        "replicas: the anchor of a state is left alone",
        "strategies/replicas/outer.py",
        '            leaf.shard.copy_(_torch.local_of(own["anchor"][name]))\n',
        "",
        (CHECKPOINTS, "-k", "adopted and diloco"),
    ),
    Mutant(
        "replicas: the outer slots of a state are left alone",
        "strategies/replicas/outer.py",
        '                _torch.local_of(value).copy_(_torch.local_of(own["slots"][name][slot]))\n',
        "                pass\n",
        (CHECKPOINTS, "-k", "adopted and diloco"),
    ),
    Mutant(
        "replicas: the slots of the first replica are saved for all",
        "checkpoint/stored_states.py",
        'return f"{ROOT}/{self.number}/{path}" if self.number and id(value) in self._own else path',
        "return path",
        (CHECKPOINTS, "-k", "to_the_bit"),
    ),
    Mutant(
        "replicas: the slots of the first replica are restored for all",
        "checkpoint/stored_states.py",
        "return found[replica.number]",
        "return found[0]",
        (CHECKPOINTS, "-k", "to_the_bit"),
    ),
    Mutant(
        "replicas: another number of them takes the slots of the first",
        "checkpoint/stored_states.py",
        "others=tuple(found[1:]))",
        "others=())",
        (CHECKPOINTS, "-k", "mean_of_slots"),
    ),
    Mutant(
        "replicas: between two averages parameters of the first are saved for all",
        "checkpoint/stored_states.py",
        'ALL = ("params", "buffers", ',
        'ALL = ("buffers", ',
        (STOPS, "-k", "asked_to_stop"),
    ),
    Mutant(
        "replicas: buffers of whole numbers are averaged",
        BOUNDARY,
        "dist.all_reduce(whole, dist.ReduceOp.MAX, group=self._group)",
        "dist.all_reduce(whole, group=self._group)",
        (TRAINING, "-k", "buffers"),
    ),
    Mutant(
        "replicas: buffers stay each replica's own",
        BOUNDARY,
        "        self._mean.of_buffers([x for path, x in tree.items(updated.buffers) if path not in self._made_anew])\n",
        "",
        (TRAINING, "-k", "buffers"),
    ),
    Mutant(
        "replicas: averages of with_ema stay each replica's own",
        BOUNDARY,
        "self._mean.of(_tensors(updated.ema))",
        "pass",
        (TRAINING, "-k", "buffers"),
    ),
    Mutant(
        "replicas: the outer update takes each replica's own change",
        BOUNDARY,
        '            self._mean.of(changes, torch.bfloat16 if self._axis.send == "bfloat16" else None)\n',
        "",
        (TRAINING, "-k", "diloco"),
    ),
    Mutant(
        "replicas: the first steps do not average",
        "strategies/replicas/record.py",
        "if step <= self.warmup:",
        "if step < 0:",
        (TRAINING, "-k", "first_steps"),
    ),
    Mutant(
        "replicas: each weighs its gradients by the rows of all",
        "engine/totals.py",
        "self.averaged_weight = self._added(own, self._apart.group(axis))",
        "self.averaged_weight = self.weight",
        (TRAINING, "-k", "one_loop"),
    ),
    Mutant(
        "replicas: metrics are those of one",
        "engine/totals.py",
        "self._group = group",
        'self._group = group if apart is None else apart.group("gradient")',
        (TRAINING, "-k", "one_loop and ragged"),
    ),
    Mutant(
        "replicas: an update that one left out counts for all",
        "engine/left_out.py",
        "return count.to(updates.dtype) if isinstance(updates, torch.Tensor) else int(count)",
        "return updates",
        (TRAINING, "-k", "leaves_out"),
    ),
    Mutant(
        "replicas: a loss scale stays each one's own",
        "engine/left_out.py",
        "scale[name].copy_(found * sign)",
        "pass",
        (TRAINING, "-k", "loss_scale"),
    ),
    Mutant(
        "replicas: an anchor stays where parameters were before a restore",
        "program/state_owner.py",
        "if fresh and instance.engine.hooks.init is not None:",
        "if False:",
        (CHECKPOINTS, "-k", "restored_alone"),
    ),
    Mutant(
        "replicas: values of each go to any run with as many",
        "checkpoint/stored_states.py",
        "own = goes_on or (slot and own_slots)",
        "own = True",
        (STOPS, "-k", "that_they_are_of"),
    ),
    Mutant(
        "replicas: the name of a checkpoint says whether it is between two averages",
        "checkpoint/stored_states.py",
        'described.tree["TrainState"]["step"]',
        "described.step",
        (CHECKPOINTS, "-k", "number_of_a_checkpoint"),
    ),
    Mutant(
        "replicas: a snapshot of one is saved for all",
        "checkpoint/saving.py",
        "            _refuse_axis_state(state, where)\n",
        "",
        (STOPS, "-k", "snapshot"),
    ),
    Mutant(
        "replicas: one without rows falls behind",
        "program/instance.py",
        "updates = updates + 1  # a replica",
        "pass  # a replica",
        (TRAINING, "-k", "one_loop and without"),
    ),
    Mutant(
        "replicas: FSDP2 averages over them",
        "strategies/fsdp_engine.py",
        'mesh.shown[shards if mesh.gradient_size == mesh["shard"].size else ("dp_replicate", shards)]',
        'mesh.shown[("dp_replicate", shards) if mesh.degrees.get("dp_replicate", 1) > 1 else shards]',
        (TRAINING, "-k", "one_loop and fsdp and even"),
    ),
    Mutant(
        "replicas: evaluation between two averages reads those of each",
        "program/state_owner.py",
        "if layout.read_between is not None and layout.whole_from(live.step) != live.step:",
        "if False:",
        (ANCHOR, "-k", "evaluate_and_look"),
    ),
    Mutant(
        "replicas: an anchor for host memory is on the device",
        "strategies/replicas/boundary.py",
        'on_host=self._axis.anchor == "host"',
        "on_host=False",
        (ANCHOR, "-k", "asked_for"),
    ),
    Mutant(
        "replicas: an anchor in host memory is counted on the device",
        "strategies/replicas/record.py",
        """        if self.anchor == "host":
            return 0
""",
        "",
        (FOLDER + "/test_options.py", "-k", "estimate"),
    ),
    Mutant(
        "replicas: totals are sent between averages, too",
        "program/instance.py",
        "self.alone = self.engine.layout.whole_from(state.step + 1) != state.step + 1",
        "self.alone = False",
        (QUIET, "-k", "send_nothing and plain and even"),
    ),
    Mutant(
        "replicas: one of them stops at a signal by itself",
        "program/instance.py",
        "notice = None  # other",
        "pass  # other",
        (QUIET, "-k", "stop_request"),
    ),
    Mutant(
        "replicas: a GPU's answer to a stop request is read an interval later",
        "program/instance.py",
        "notice.at_once = self._at_averages",
        "pass",
        (QUIET, "-k", "read_at_once"),
    ),
    Mutant(
        "replicas: one without rows falls behind those that it does not hear",
        "program/instance.py",
        '(self.alone or not is_uncounted(metrics["weight"]))',
        'not is_uncounted(metrics["weight"])',
        (QUIET, "-k", "send_nothing and plain and without"),
    ),
    Mutant(
        "replicas: kinds of losses are compared within one of them only",
        "engine/aux_values.py",
        "if group not in self._groups:",
        "if self.seen is None:",
        (QUIET, "-k", "two_kinds and fsdp"),
    ),
    Mutant(
        "replicas: the hang detector ends a run whose replicas are steps apart",
        "program/update_guard.py",
        "shares = instance.shares and not instance.alone",
        "shares = instance.shares",
        (QUIET, "-k", "steps_apart"),
    ),
    Mutant(
        "replicas: a score mixes buffers of several",
        "loop/evaluating.py",
        "if group is None or (layout.shares_buffers and same_at == state.step):",
        "if group is None or layout.shares_buffers:",
        (ANCHOR, "-k", "mix_replicas"),
    ),
)
