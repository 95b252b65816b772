"""The questions of `fnaccel config` in their order. Each knows after which answers it matters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fnaccel.config.questions.question import Machine, Question

Answers = Mapping[str, Any]
Ask = Callable[[Machine, Answers], Question | None]


def next_question(machine: Machine, answers: Answers) -> Question | None:
    """The question that follows the answers so far, or None if all that matter are answered.

    Args:
        machine: the facts of this machine.
        answers: by the names of the questions.

    Example:
        >>> next_question(Machine(), {}).name
        'where'
        >>> next_question(Machine(), {"where": "slurm"}).name
        'machines'
    """
    for ask in _QUESTIONS:
        question = ask(machine, answers)
        if question is not None and question.name not in answers:
            return question
    return None


def _where(machine: Machine, answers: Answers) -> Question | None:
    del machine, answers
    return Question(
        name="where", text="Where do the runs start?", kind="choice", default="here",
        choices=(
            ("here", "on this machine"),
            ("same command", "on several machines, by the same command on each"),
            ("ssh", "on several machines, from here by ssh"),
            ("slurm", "by SLURM"),
            ("tpu", "on a TPU VM or a pod, from here through gcloud"),
            ("sagemaker", "by Amazon SageMaker"),
        ),
    )  # fmt: skip


def _machines(machine: Machine, answers: Answers) -> Question | None:
    del machine
    if answers.get("where") not in ("same command", "slurm", "sagemaker"):
        return None
    one = answers["where"] != "same command"
    return Question(
        name="machines",
        text="How many machines?",
        kind="number",
        default=1 if one else 2,
        least=1 if one else 2,
    )


def _text(
    name: str, where: str, text: str, *, default: str = "", why: str = "", required: bool = False
) -> Any:
    """A question for a text that matters in one place."""

    def ask(machine: Machine, answers: Answers) -> Question | None:
        del machine
        if answers.get("where") != where:
            return None
        return Question(name=name, text=text, kind="text", default=default, why=why, required=required)

    return ask


def _device(machine: Machine, answers: Answers) -> Question | None:
    where = answers.get("where")
    if where == "tpu" or (where == "here" and not machine.accelerators):
        return None
    count = f"this machine has {machine.accelerators}"
    return Question(
        name="device", text="What do the ranks compute on?", kind="choice", default="accelerators",
        why=count if where == "here" else "", choices=(("accelerators", "one each"), ("cpu", "the CPU")),
    )  # fmt: skip


def _ranks(machine: Machine, answers: Answers) -> Question | None:
    if answers.get("where") == "tpu":
        return None
    cpu = on_cpu(machine, answers)
    default = 1 if cpu else machine.accelerators or 1
    why = "on CPUs, processes share the cores" if cpu else "one for each accelerator"
    return Question(
        name="ranks",
        text="How many ranks (processes) on each machine?",
        kind="number",
        default=default,
        why=why,
    )


def _strategy(machine: Machine, answers: Answers) -> Question | None:
    if answers.get("where") == "tpu" or machine.tpu:
        return Question(
            name="strategy", text="How do the devices share the model?", kind="choice", default="xla",
            choices=(("xla", "each has the whole model"), ("xla sharded", "its parts are spread over them")),
        )  # fmt: skip
    several = _total_ranks(answers) > 1
    if not several and on_cpu(machine, answers):
        return None
    choices = [("local", "one process")] if not several else [("ddp", "each rank has the whole model")]
    choices += [
        ("fsdp", "parameters, gradients and optimizer are shared (ZeRO 3)" if several else "can offload")
    ]
    if several:
        choices += [("zero2", "gradients and optimizer are shared, parameters are kept (ZeRO 2)")]
        choices += [("fsdp with tensor", "layers are cut too, over the ranks of a machine")]
    if (answers.get("machines") or 1) > 1:
        choices += [("hsdp", "shared within a machine, repeated on each")]
    if several and "deepspeed" in machine.installed:
        choices += [("deepspeed", "by DeepSpeed, which must be installed everywhere")]
    why = "the fastest if model, gradients and optimizer fit on one device" if several else ""
    return Question(
        name="strategy", text="How do the ranks share the model?", kind="choice", default=choices[0][0],
        why=why, choices=tuple(choices),
    )  # fmt: skip


def _offload(machine: Machine, answers: Answers) -> Question | None:
    if answers.get("strategy") not in ("fsdp", "deepspeed") or on_cpu(machine, answers):
        return None
    return Question(
        name="offload", text="Keep parameters and optimizer in the memory of the host?", kind="yes or no",
        default=False, why="slower, for models that do not fit otherwise",
    )  # fmt: skip


def _stage(machine: Machine, answers: Answers) -> Question | None:
    del machine
    if answers.get("strategy") != "deepspeed":
        return None
    return Question(
        name="stage", text="Which stage of ZeRO?", kind="choice", default="2",
        choices=(("1", "optimizer"), ("2", "and gradients"), ("3", "and parameters")),
    )  # fmt: skip


def _precision(machine: Machine, answers: Answers) -> Question | None:
    choices = [("fp32", "full precision"), ("bf16", "half the memory of activations, faster on new devices")]
    tpu = answers.get("where") == "tpu" or machine.tpu
    if not tpu:
        choices += [("fp16", "as bf16, for older GPUs: the loss is scaled")]
        if machine.fp8 or answers.get("where") != "here":
            choices += [("fp8", "the fastest matrix products, from Hopper on")]
    low = machine.bf16 or tpu
    return Question(
        name="precision", text="In which precision?", kind="choice", default="bf16" if low else "fp32",
        why="the devices compute in bf16" if low else "bf16 is slow or missing here", choices=tuple(choices),
    )  # fmt: skip


def _fp8_backend(machine: Machine, answers: Answers) -> Question | None:
    if answers.get("precision") != "fp8":
        return None
    return Question(
        name="fp8_backend", text="By which library?", kind="choice", default="torchao",
        why="torchao is installed" if "torchao" in machine.installed else "pip install torchao",
        choices=(("torchao", "of PyTorch"), ("transformer_engine", "of NVIDIA")),
    )  # fmt: skip


def _accumulate(machine: Machine, answers: Answers) -> Question | None:
    del machine, answers
    return Question(
        name="accumulate", text="How many micro-batches in an update?", kind="number", default=1,
        why="more than one for larger batches in the same memory",
    )  # fmt: skip


def _clip_norm(machine: Machine, answers: Answers) -> Question | None:
    del machine, answers
    return Question(
        name="clip_norm", text="The largest norm of the gradient (none: no clipping)?", kind="number",
        default=None, least=0,
    )  # fmt: skip


def _compile(machine: Machine, answers: Answers) -> Question | None:
    del machine
    if str(answers.get("strategy", "")).startswith(("xla", "deepspeed")):
        return None
    return Question(
        name="compile", text="Compile with torch.compile?", kind="choice", default="no",
        why="examples/compare_scopes.py measures it on your loss function",
        choices=(("no", "run eagerly"), ("auto", "the widest scope that the step allows"),
                 ("block", "each block: quick to compile"), ("step", "the whole step")),
    )  # fmt: skip


def _remat(machine: Machine, answers: Answers) -> Question | None:
    del machine
    if answers.get("strategy", "local") in ("local", "ddp", "xla"):
        return None
    return Question(
        name="remat", text="Recompute the blocks in backward?", kind="yes or no", default=False,
        why="less memory for activations, about a third more compute",
    )  # fmt: skip


def _checkpoints(machine: Machine, answers: Answers) -> Question | None:
    del machine
    where = answers.get("where")
    return Question(
        name="checkpoints", text="A folder for checkpoints (empty: none)?", kind="text", default="",
        why="" if where in ("here", "tpu", "sagemaker") else "all machines have to share it",
    )  # fmt: skip


def _save_every(machine: Machine, answers: Answers) -> Question | None:
    del machine
    if not answers.get("checkpoints"):
        return None
    return Question(name="save_every", text="Steps between two checkpoints?", kind="number", default=1000)


def _trackers(machine: Machine, answers: Answers) -> Question | None:
    del answers
    names = [name for name in ("tensorboard", "wandb", "mlflow") if name in machine.installed]
    return Question(
        name="trackers", text="Trackers, separated by commas (empty: none)?", kind="text", default="",
        why=f"such as {', '.join(['jsonl', *names])}",
    )  # fmt: skip


def _restarts(machine: Machine, answers: Answers) -> Question | None:
    del machine
    if answers.get("where") not in ("here", "same command", "ssh", "slurm") or _total_ranks(answers) == 1:
        return None
    return Question(
        name="restarts", text="How often may the ranks be started again after a failure?", kind="number",
        default=0, least=0, why="a script that begins with fa.resume_or_init goes on from its checkpoint",
    )  # fmt: skip


def _seed(machine: Machine, answers: Answers) -> Question | None:
    del machine, answers
    return Question(name="seed", text="The seed?", kind="number", default=0, least=0)


_QUESTIONS: tuple[Ask, ...] = (
    _where,
    _machines,
    _text("address", "same command", "An address of the first machine that all reach?", required=True),
    _text("hosts", "ssh", "The hosts, separated by commas, or a host file?", required=True),
    _text("partition", "slurm", "The partition (empty: the default)?"),
    _text("time", "slurm", "The time limit?", default="24:00:00", why="hours:minutes:seconds"),
    _text("tpu_name", "tpu", "The name of the TPU VM?", required=True),
    _text("tpu_zone", "tpu", "Its zone?", required=True),
    _text("role", "sagemaker", "The IAM role of the job?", required=True),
    _text("instance_type", "sagemaker", "The instance type?", default="ml.g5.xlarge"),
    _text("region", "sagemaker", "The region (empty: that of the AWS command line)?"),
    _device,
    _ranks,
    _strategy,
    _offload,
    _stage,
    _precision,
    _fp8_backend,
    _accumulate,
    _clip_norm,
    _compile,
    _remat,
    _checkpoints,
    _save_every,
    _trackers,
    _restarts,
    _seed,
)


def on_cpu(machine: Machine, answers: Answers) -> bool:
    """Whether the ranks compute on the CPU."""
    here = answers.get("where") == "here" and not machine.accelerators
    return here or answers.get("device") == "cpu"


def _total_ranks(answers: Answers) -> int:
    hosts = 2 if answers.get("where") == "ssh" else 1  # at least two, or nobody would need ssh
    return (answers.get("ranks") or 1) * max(answers.get("machines") or 1, hosts)
