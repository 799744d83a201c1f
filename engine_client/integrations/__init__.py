"""Other systems on this library's transport, each an optional extra; nothing here is imported by the rest."""
