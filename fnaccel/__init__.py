"""fnaccel: functional, JAX-style transformations over PyTorch."""
