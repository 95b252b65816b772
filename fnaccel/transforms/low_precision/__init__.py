"""What `float8` and `layer_casting` share: which layers are changed, and what a plan can know of them."""
