"""A module that imports attention by name, as some libraries do."""

from torch.nn.functional import scaled_dot_product_attention


def attend(query, key, value):
    return scaled_dot_product_attention(query, key, value, is_causal=True)
