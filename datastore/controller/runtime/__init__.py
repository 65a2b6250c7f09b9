"""The parts that all our controllers share, whatever kind of object they reconcile."""
