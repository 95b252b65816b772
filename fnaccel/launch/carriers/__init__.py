"""Carriers: pure functions from a job to the commands and texts that start it elsewhere. One file each."""

from fnaccel.launch.carriers.choice import choose as choose
from fnaccel.launch.carriers.choice import plan as plan
from fnaccel.launch.carriers.request import Command as Command
from fnaccel.launch.carriers.request import Plan as Plan
from fnaccel.launch.carriers.request import Request as Request
