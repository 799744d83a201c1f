"""``engine-client bench``: this library measured beside another transport on the same work, and as the work grows."""
