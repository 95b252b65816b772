"""Promises of Accelerate's own tests that no other test here holds. docs/accelerate-tests.md has the counts."""
