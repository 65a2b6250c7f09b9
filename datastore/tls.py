"""Checks certificates in the same way under every Python version, and as curl and kubectl do."""

from __future__ import annotations

import ssl


def judged_alike(context: ssl.SSLContext) -> ssl.SSLContext:
    """Set what Python 3.13 changed in its default contexts to one value for all versions; return the context.

    Strictness is off: it refuses certificates without an Authority Key Identifier, as private authorities and old EKS
    clusters have them. An intermediate authority may be trusted without its root. Chain, host and dates are checked.
    Source: ssl.create_default_context in the Python library reference.
    """
    context.verify_flags = context.verify_flags & ~ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
