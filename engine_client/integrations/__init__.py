"""Other servers on this library's transport."""
