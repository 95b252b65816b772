"""Strategies: products of axes, one axis a file, and the interpreters that make engines of them."""

from fnaccel.strategies import fsdp_engine as _fsdp_engine
from fnaccel.strategies import local as _local
from fnaccel.strategies.axis import Build as Build
from fnaccel.strategies.axis import finisher as finisher
from fnaccel.strategies.ddp import ddp as ddp
from fnaccel.strategies.ddp_hooks import comm_hook as comm_hook
from fnaccel.strategies.ddp_hooks import powersgd as powersgd
from fnaccel.strategies.distribute import Distributed as Distributed
from fnaccel.strategies.distribute import distribute as distribute
from fnaccel.strategies.footprint import Footprint as Footprint
from fnaccel.strategies.footprint import footprint as footprint
from fnaccel.strategies.fsdp import fsdp as fsdp
from fnaccel.strategies.fsdp import hsdp as hsdp
from fnaccel.strategies.local import local as local
from fnaccel.strategies.local import place as place
from fnaccel.strategies.local import whole_engine as whole_engine
from fnaccel.strategies.runtime import Delegation as Delegation
from fnaccel.strategies.runtime import delegator as delegator
from fnaccel.strategies.strategy import Axis as Axis
from fnaccel.strategies.strategy import Strategy as Strategy
from fnaccel.strategies.strategy import maker as maker
from fnaccel.strategies.strategy import strategy as strategy

_INTERPRETERS = (_local, _fsdp_engine)  # importing them registers them
