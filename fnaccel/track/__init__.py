"""Trackers: write metrics, one file per tracker. `fnaccel.track.tracker` defines the protocol."""

from fnaccel.track.jsonl import JsonlTracker as JsonlTracker
from fnaccel.track.jsonl import read_jsonl as read_jsonl
from fnaccel.track.tracker import Tracker as Tracker
from fnaccel.track.wandb import WandbTracker as WandbTracker
