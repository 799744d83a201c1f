"""The engine process's side: engine core, scheduler, executor interface, busy loop."""
