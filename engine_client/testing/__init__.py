"""For your tests and ours: a guard against leaks, a scripted engine, small executors, and faults to inject."""
