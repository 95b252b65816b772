"""How checkpoints reach a disk whole, are found, held and removed."""
