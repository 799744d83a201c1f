"""Faults that users of such software have reported; each case is a test with its id in the name."""
