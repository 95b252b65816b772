"""What lies in a checkpoint: values, boxes of tensors, the manifest."""
