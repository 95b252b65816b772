"""`Float8`: linear layers in 8-bit floating point, with the layers of a backend."""
