"""The client process's side."""
