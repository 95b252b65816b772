"""Tests of fnaccel.data."""
