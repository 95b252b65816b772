"""The description of a step: transforms, phases, and what a loss returns."""
