"""How the driver reaches workers."""
