"""Benchmarks, on the public API alone."""
