"""Readers of foreign checkpoints, one file per format."""
