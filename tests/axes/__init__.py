"""Axes that cut the model or its activations."""
