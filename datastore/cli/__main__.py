"""`python -m datastore.cli` is the command `datastore`."""

from __future__ import annotations

from datastore.cli.main import main

if __name__ == "__main__":
    main()
