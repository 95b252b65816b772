"""Trackers: where metrics go, one file each. What a tracker is stands in `fnaccel.track.tracker`."""

from fnaccel.track.jsonl import JsonlTracker as JsonlTracker
from fnaccel.track.jsonl import read_jsonl as read_jsonl
from fnaccel.track.tracker import Tracker as Tracker
from fnaccel.track.wandb import WandbTracker as WandbTracker
