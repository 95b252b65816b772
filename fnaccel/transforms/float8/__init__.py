"""`Float8`: linear layers in 8-bit floating point; the layers are those of a backend."""
