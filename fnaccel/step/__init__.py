"""The description of a step: transforms, phases, and the parts of a loss."""
