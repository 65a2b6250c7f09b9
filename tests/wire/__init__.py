"""The kernel's protocol: layouts, decoding, a session fed with arbitrary bytes."""
