"""Trackers: write metrics, one file per tracker. `fnaccel.track.tracker` defines the protocols."""

from typing import TYPE_CHECKING

from fnaccel import _lazy
from fnaccel.track.jsonl import JsonlTracker as JsonlTracker
from fnaccel.track.jsonl import read_jsonl as read_jsonl
from fnaccel.track.registry import installed as installed
from fnaccel.track.registry import of as of
from fnaccel.track.registry import register as register
from fnaccel.track.tracker import Artifacts as Artifacts
from fnaccel.track.tracker import Media as Media
from fnaccel.track.tracker import PerRank as PerRank
from fnaccel.track.tracker import Tracker as Tracker

if TYPE_CHECKING:
    from fnaccel.track.aim import AimTracker as AimTracker
    from fnaccel.track.clearml import ClearMLTracker as ClearMLTracker
    from fnaccel.track.comet import CometTracker as CometTracker
    from fnaccel.track.dvclive import DVCLiveTracker as DVCLiveTracker
    from fnaccel.track.mlflow import MLflowTracker as MLflowTracker
    from fnaccel.track.swanlab import SwanLabTracker as SwanLabTracker
    from fnaccel.track.tensorboard import TensorBoardTracker as TensorBoardTracker
    from fnaccel.track.trackio import TrackioTracker as TrackioTracker
    from fnaccel.track.wandb import WandbTracker as WandbTracker
else:  # a copy of fnaccel may lack them
    from fnaccel.track.registry import BUILT_IN as _BUILT_IN

    __getattr__, __dir__, __all__ = _lazy.attach(
        __name__, {f"fnaccel.track.{name}": kind for name, (kind, _) in _BUILT_IN.items()}
    )
