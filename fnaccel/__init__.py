"""fnaccel: functional, JAX-style transformations over PyTorch.

Write one pure function `loss_fn(model, batch)`; transform it; distribute a model under a strategy;
get `train_step(state, batch) -> (state, metrics)`, which runs unchanged on one process or many.

Steps and transforms
    train_step TrainStep Step Transform Phase Mean Sum Max Min Concat LossInfo
    chain with_precision accumulate with_weight clip_norm clip_value skip_nonfinite with_ema remat compile

Strategies
    distribute strategy local ddp fsdp hsdp tensor context pipeline local_sgd diloco deepspeed xla

Parameters and gradients as values
    params call value_and_grad perturb with_gradient per_example row_norms epsilon
    pure recomputed

Optimizers
    sgd adam adamw schedules warmup_cosine

Data and loops
    shard set_seed scan Autosave Evaluation Tracking Watch evaluate fit_batch_size

Collectives
    gather reduce broadcast pad_across_processes split_between_processes

State and checkpoints
    TrainState snapshot save save_async restore resume_or_init

Running
    start World simulate notebook_launch debug_launch preemption
    progress print_in_order tracked profile layout

Namespaces
    big checkpoint collectives config data errors estimate extend interchange losses
    optim random seeing state strategies testing track transforms tree
"""

import importlib as _importlib  # an underscore keeps it out of `from fnaccel import *`
import sys as _sys
from typing import TYPE_CHECKING

from fnaccel import _lazy

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fnaccel import big as big
    from fnaccel import checkpoint as checkpoint
    from fnaccel import collectives as collectives
    from fnaccel import config as config
    from fnaccel import data as data
    from fnaccel import errors as errors
    from fnaccel import estimate as estimate
    from fnaccel import extend as extend
    from fnaccel import interchange as interchange
    from fnaccel import losses as losses
    from fnaccel import optim as optim
    from fnaccel import random as random
    from fnaccel import seeing as seeing
    from fnaccel import state as state
    from fnaccel import strategies as strategies
    from fnaccel import testing as testing
    from fnaccel import track as track
    from fnaccel import transforms as transforms
    from fnaccel import tree as tree
    from fnaccel.checkpoint import restore as restore
    from fnaccel.checkpoint import resume_or_init as resume_or_init
    from fnaccel.checkpoint import save as save
    from fnaccel.checkpoint import save_async as save_async
    from fnaccel.collectives import broadcast as broadcast
    from fnaccel.collectives import gather as gather
    from fnaccel.collectives import pad_across_processes as pad_across_processes
    from fnaccel.collectives import reduce as reduce
    from fnaccel.collectives import split_between_processes as split_between_processes
    from fnaccel.data import set_seed as set_seed
    from fnaccel.data import shard as shard
    from fnaccel.launch.notebook import debug_launch as debug_launch
    from fnaccel.launch.notebook import notebook_launch as notebook_launch
    from fnaccel.loop.autosave import Autosave as Autosave
    from fnaccel.loop.batch_size import fit_batch_size as fit_batch_size
    from fnaccel.loop.evaluating import Evaluation as Evaluation
    from fnaccel.loop.evaluating import evaluate as evaluate
    from fnaccel.loop.measured import Watch as Watch
    from fnaccel.loop.preemption import preemption as preemption
    from fnaccel.loop.printing import print_in_order as print_in_order
    from fnaccel.loop.privacy import epsilon as epsilon
    from fnaccel.loop.progress import progress as progress
    from fnaccel.loop.scanning import scan as scan
    from fnaccel.loop.tracked import tracked as tracked
    from fnaccel.loop.tracking import Tracking as Tracking
    from fnaccel.models.parameter_values import call as call
    from fnaccel.models.parameter_values import params as params
    from fnaccel.optim import adam as adam
    from fnaccel.optim import adamw as adamw
    from fnaccel.optim import schedules as schedules
    from fnaccel.optim import sgd as sgd
    from fnaccel.optim.schedules import warmup_cosine as warmup_cosine
    from fnaccel.program.parameter_layout import layout as layout
    from fnaccel.program.pure import pure as pure
    from fnaccel.program.train_step import TrainStep as TrainStep
    from fnaccel.program.train_step import train_step as train_step
    from fnaccel.program.train_step import value_and_grad as value_and_grad
    from fnaccel.seeing.profile import profile as profile
    from fnaccel.state import TrainState as TrainState
    from fnaccel.state import snapshot as snapshot
    from fnaccel.step.given_gradient import with_gradient as with_gradient
    from fnaccel.step.loss import Concat as Concat
    from fnaccel.step.loss import Max as Max
    from fnaccel.step.loss import Mean as Mean
    from fnaccel.step.loss import Min as Min
    from fnaccel.step.loss import Sum as Sum
    from fnaccel.step.loss_info import LossInfo as LossInfo
    from fnaccel.step.step import Phase as Phase
    from fnaccel.step.step import Step as Step
    from fnaccel.step.step import Transform as Transform
    from fnaccel.strategies import ddp as ddp
    from fnaccel.strategies import distribute as distribute
    from fnaccel.strategies import fsdp as fsdp
    from fnaccel.strategies import hsdp as hsdp
    from fnaccel.strategies import local as local
    from fnaccel.strategies import strategy as strategy
    from fnaccel.strategies.context import context as context
    from fnaccel.strategies.deepspeed import deepspeed as deepspeed
    from fnaccel.strategies.pipeline import pipeline as pipeline
    from fnaccel.strategies.replicas import diloco as diloco
    from fnaccel.strategies.replicas import local_sgd as local_sgd
    from fnaccel.strategies.tensor import tensor as tensor
    from fnaccel.strategies.xla import xla as xla
    from fnaccel.transforms import accumulate as accumulate
    from fnaccel.transforms import chain as chain
    from fnaccel.transforms import clip_norm as clip_norm
    from fnaccel.transforms import clip_value as clip_value
    from fnaccel.transforms import compile as compile  # noqa: A004 - jax.jit's place, torch.compile's name
    from fnaccel.transforms import remat as remat
    from fnaccel.transforms import skip_nonfinite as skip_nonfinite
    from fnaccel.transforms import with_ema as with_ema
    from fnaccel.transforms import with_precision as with_precision
    from fnaccel.transforms import with_weight as with_weight
    from fnaccel.transforms.per_example import per_example as per_example
    from fnaccel.transforms.per_example import row_norms as row_norms
    from fnaccel.transforms.perturbation import perturb as perturb
    from fnaccel.transforms.recomputed import recomputed as recomputed
    from fnaccel.world.simulation import simulate as simulate
    from fnaccel.world.world import World as World
    from fnaccel.world.world import start as start
else:  # an unknown name is an error of a type checker, which does not see this `__getattr__`
    __getattr__, __dir__, __all__ = _lazy.attach(
        __name__,
        {
            "fnaccel.checkpoint": "restore resume_or_init save save_async",
            "fnaccel.collectives": "broadcast gather pad_across_processes reduce split_between_processes",
            "fnaccel.data": "set_seed shard",
            "fnaccel.launch.notebook": "debug_launch notebook_launch",
            "fnaccel.loop.autosave": "Autosave",
            "fnaccel.loop.batch_size": "fit_batch_size",
            "fnaccel.loop.evaluating": "Evaluation evaluate",
            "fnaccel.loop.measured": "Watch",
            "fnaccel.loop.preemption": "preemption",
            "fnaccel.loop.privacy": "epsilon",
            "fnaccel.loop.printing": "print_in_order",
            "fnaccel.loop.progress": "progress",
            "fnaccel.loop.scanning": "scan",
            "fnaccel.loop.tracked": "tracked",
            "fnaccel.loop.tracking": "Tracking",
            "fnaccel.models.parameter_values": "call params",
            "fnaccel.optim": "adam adamw schedules sgd",
            "fnaccel.optim.schedules": "warmup_cosine",
            "fnaccel.program.parameter_layout": "layout",
            "fnaccel.program.pure": "pure",
            "fnaccel.program.train_step": "TrainStep train_step value_and_grad",
            "fnaccel.seeing.profile": "profile",
            "fnaccel.state": "TrainState snapshot",
            "fnaccel.step.given_gradient": "with_gradient",
            "fnaccel.step.loss": "Concat Max Mean Min Sum",
            "fnaccel.step.loss_info": "LossInfo",
            "fnaccel.step.step": "Phase Step Transform",
            "fnaccel.strategies": "ddp distribute fsdp hsdp local strategy",
            "fnaccel.strategies.context": "context",
            "fnaccel.strategies.deepspeed": "deepspeed",
            "fnaccel.strategies.pipeline": "pipeline",
            "fnaccel.strategies.replicas": "diloco local_sgd",
            "fnaccel.strategies.tensor": "tensor",
            "fnaccel.strategies.xla": "xla",
            "fnaccel.transforms": "accumulate chain clip_norm clip_value compile remat skip_nonfinite "
            "with_ema with_precision with_weight",
            "fnaccel.transforms.per_example": "per_example row_norms",
            "fnaccel.transforms.perturbation": "perturb",
            "fnaccel.transforms.recomputed": "recomputed",
            "fnaccel.world.simulation": "simulate",
            "fnaccel.world.world": "World start",
        },
        namespaces="big checkpoint collectives config data errors estimate extend interchange losses optim "
        "random seeing state strategies testing track transforms tree",
        hints="schedules",
    )

if "ipykernel" in _sys.modules:  # so that notebook_launch can name the line that used CUDA first
    _importlib.import_module("fnaccel.launch.accelerator_use").watch()
