"""Quantization: linear layers whose weights are codes of 4 or 8 bits, with scales."""
