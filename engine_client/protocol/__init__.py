"""Pure code: bytes and states in, bytes and plans out; no I/O, no thread, no clock."""
