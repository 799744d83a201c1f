"""Models: executors that an engine can run."""
