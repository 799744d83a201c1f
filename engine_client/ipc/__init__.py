"""Descriptors, shared memory, processes and the one thread; no rule of the engine's business."""
