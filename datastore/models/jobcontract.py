"""The contract between the controller, which makes the Jobs of models, and the program in their pods (jobs.py)."""

from __future__ import annotations

from pathlib import Path

REQUEST = "DATASTORE_REQUEST"
"""The environment variable with the request, as JSON without secrets."""
SECRETS = Path("/secrets")
"""The folder with store/, source/ and target/, in which each key of the place's Secret is a file."""
EXIT_FINAL = 3
"""The exit code when another attempt would fail in the same way."""
EXIT_AGAIN = 1
