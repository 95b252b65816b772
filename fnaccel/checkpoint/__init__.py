"""Checkpoints: a state on disk, written by any layout of ranks and read by any other.

A root holds one directory for each step. In it, safetensors files hold the tensors and
`manifest.json` everything else. Reading one executes nothing.
"""

from fnaccel.checkpoint.background import Saving as Saving
from fnaccel.checkpoint.disk.publish import Checkpoint as Checkpoint
from fnaccel.checkpoint.disk.publish import checkpoints as checkpoints
from fnaccel.checkpoint.disk.publish import latest as latest
from fnaccel.checkpoint.disk.retention import best as best
from fnaccel.checkpoint.hooks import Hooks as Hooks
from fnaccel.checkpoint.hooks import hooks as hooks
from fnaccel.checkpoint.on_main import save_on_main as save_on_main
from fnaccel.checkpoint.restoring import restore as restore
from fnaccel.checkpoint.resuming import resume_or_init as resume_or_init
from fnaccel.checkpoint.saving import save as save
from fnaccel.checkpoint.saving import save_async as save_async
