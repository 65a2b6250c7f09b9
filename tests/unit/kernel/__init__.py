"""The engine's parts, without a kernel."""
