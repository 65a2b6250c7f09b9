"""The contract between the controller, which makes a ModelVersion's Job, and what runs in its pod (jobs.py)."""

from __future__ import annotations

from pathlib import Path

REQUEST = "DATASTORE_REQUEST"
"""Variable of the environment: what is asked for, as JSON without secrets."""
SECRETS = Path("/secrets")
"""Below it store/ and source/: the keys of their Secrets, each a file."""
EXIT_FINAL = 3
"""Trying again would end in the same way."""
EXIT_AGAIN = 1
