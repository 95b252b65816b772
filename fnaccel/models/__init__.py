"""How modules are built, cut into blocks, and watched."""
