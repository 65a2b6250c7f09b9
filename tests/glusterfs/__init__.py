"""GlusterFS volumes of a real glusterd, in a network namespace."""
