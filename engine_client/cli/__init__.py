"""The ``engine-client`` command, on the public API alone."""
