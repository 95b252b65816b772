"""The contents of a checkpoint: values, boxes of tensors, the manifest."""
