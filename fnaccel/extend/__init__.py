"""What an extension of yours is written with: transforms, axes, engines, optimizers, trackers, readers.

docs/extending.md shows each at work. Everything else in fnaccel's folders may change without notice.

A transform
    Transform takes_step Phase Info Capability EVERYTHING GradientHook UpdateHook Gradients

An axis
    Axis Strategy maker check_degree runtime_in Spec Settings Mesh MeshAxis LossPart Cut Leaf Traffic

An engine
    Build finisher engine_without Built construct place whole_engine Engine Layout Forward Hooks Updated
    Runtime Capture Question MicroBatch MicroBatches in_turn enter note Delegation delegator

An optimizer
    Optimizer Kernel Bound Group Member group_leaves Part Operations UpdateInfo

A tracker, a reader of loaders
    Tracker Media Artifacts PerRank register reader classify Stream Indexed Grouped rows_of

Errors
    FnaccelError ArgumentError CapabilityError require nearest function_of
"""

from typing import TYPE_CHECKING

from fnaccel import _lazy

if TYPE_CHECKING:
    from fnaccel.data.cut import rows_of as rows_of
    from fnaccel.data.loaders import Grouped as Grouped
    from fnaccel.data.loaders import Indexed as Indexed
    from fnaccel.data.loaders import Stream as Stream
    from fnaccel.data.loaders import classify as classify
    from fnaccel.data.loaders import reader as reader
    from fnaccel.data.micro_batches import MicroBatch as MicroBatch
    from fnaccel.data.micro_batches import MicroBatches as MicroBatches
    from fnaccel.engine.engine import Capture as Capture
    from fnaccel.engine.engine import Engine as Engine
    from fnaccel.engine.engine import Forward as Forward
    from fnaccel.engine.engine import Hooks as Hooks
    from fnaccel.engine.engine import Layout as Layout
    from fnaccel.engine.engine import Runtime as Runtime
    from fnaccel.engine.engine import Updated as Updated
    from fnaccel.engine.engine import in_turn as in_turn
    from fnaccel.engine.gradients import Gradients as Gradients
    from fnaccel.engine.totals import Question as Question
    from fnaccel.errors import ArgumentError as ArgumentError
    from fnaccel.errors import CapabilityError as CapabilityError
    from fnaccel.errors import FnaccelError as FnaccelError
    from fnaccel.errors import nearest as nearest
    from fnaccel.errors import require as require
    from fnaccel.models.building import Built as Built
    from fnaccel.models.building import construct as construct
    from fnaccel.models.parameter import Cut as Cut
    from fnaccel.models.parameter import Leaf as Leaf
    from fnaccel.optim.description import Bound as Bound
    from fnaccel.optim.description import Group as Group
    from fnaccel.optim.description import Kernel as Kernel
    from fnaccel.optim.description import Member as Member
    from fnaccel.optim.description import Optimizer as Optimizer
    from fnaccel.optim.description import group_leaves as group_leaves
    from fnaccel.optim.operations import Operations as Operations
    from fnaccel.optim.rules import Part as Part
    from fnaccel.optim.rules import UpdateInfo as UpdateInfo
    from fnaccel.step.callables import function_of as function_of
    from fnaccel.step.chain import takes_step as takes_step
    from fnaccel.step.settings import Settings as Settings
    from fnaccel.step.spec import LossPart as LossPart
    from fnaccel.step.spec import Spec as Spec
    from fnaccel.step.step import EVERYTHING as EVERYTHING
    from fnaccel.step.step import Capability as Capability
    from fnaccel.step.step import GradientHook as GradientHook
    from fnaccel.step.step import Info as Info
    from fnaccel.step.step import Phase as Phase
    from fnaccel.step.step import Transform as Transform
    from fnaccel.step.step import UpdateHook as UpdateHook
    from fnaccel.strategies.axis import Build as Build
    from fnaccel.strategies.axis import engine_without as engine_without
    from fnaccel.strategies.axis import finisher as finisher
    from fnaccel.strategies.footprint import Traffic as Traffic
    from fnaccel.strategies.local import place as place
    from fnaccel.strategies.local import whole_engine as whole_engine
    from fnaccel.strategies.runtime import Delegation as Delegation
    from fnaccel.strategies.runtime import delegator as delegator
    from fnaccel.strategies.strategy import Axis as Axis
    from fnaccel.strategies.strategy import Strategy as Strategy
    from fnaccel.strategies.strategy import check_degree as check_degree
    from fnaccel.strategies.strategy import maker as maker
    from fnaccel.strategies.strategy import runtime_in as runtime_in
    from fnaccel.track.registry import register as register
    from fnaccel.track.tracker import Artifacts as Artifacts
    from fnaccel.track.tracker import Media as Media
    from fnaccel.track.tracker import PerRank as PerRank
    from fnaccel.track.tracker import Tracker as Tracker
    from fnaccel.world.mesh import Mesh as Mesh
    from fnaccel.world.mesh import MeshAxis as MeshAxis
    from fnaccel.world.progress_marks import enter as enter
    from fnaccel.world.progress_marks import note as note
else:
    __getattr__, __dir__, __all__ = _lazy.attach(
        __name__,
        {
            "fnaccel.data.cut": "rows_of",
            "fnaccel.data.loaders": "Grouped Indexed Stream classify reader",
            "fnaccel.data.micro_batches": "MicroBatch MicroBatches",
            "fnaccel.engine.engine": "Capture Engine Forward Hooks Layout Runtime Updated in_turn",
            "fnaccel.engine.gradients": "Gradients",
            "fnaccel.engine.totals": "Question",
            "fnaccel.errors": "ArgumentError CapabilityError FnaccelError nearest require",
            "fnaccel.models.building": "Built construct",
            "fnaccel.models.parameter": "Cut Leaf",
            "fnaccel.optim.description": "Bound Group Kernel Member Optimizer group_leaves",
            "fnaccel.optim.operations": "Operations",
            "fnaccel.optim.rules": "Part UpdateInfo",
            "fnaccel.step.callables": "function_of",
            "fnaccel.step.chain": "takes_step",
            "fnaccel.step.settings": "Settings",
            "fnaccel.step.spec": "LossPart Spec",
            "fnaccel.step.step": "EVERYTHING Capability GradientHook Info Phase Transform UpdateHook",
            "fnaccel.strategies.axis": "Build engine_without finisher",
            "fnaccel.strategies.footprint": "Traffic",
            "fnaccel.strategies.local": "place whole_engine",
            "fnaccel.strategies.runtime": "Delegation delegator",
            "fnaccel.strategies.strategy": "Axis Strategy check_degree maker runtime_in",
            "fnaccel.track.registry": "register",
            "fnaccel.track.tracker": "Artifacts Media PerRank Tracker",
            "fnaccel.world.mesh": "Mesh MeshAxis",
            "fnaccel.world.progress_marks": "enter note",
        },
    )
