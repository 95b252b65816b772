"""Matrix products of compiled code by the library that is quicker on this processor."""
