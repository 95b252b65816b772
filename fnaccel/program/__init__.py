"""`train_step`: a step lowered on an engine, and the state it hands over."""
