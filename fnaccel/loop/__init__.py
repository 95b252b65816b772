"""Loops over a train step: `scan`, `evaluate`, saving by itself, preemption, the batch size."""
