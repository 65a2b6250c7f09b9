"""The backends: with them the controller makes, checks, measures and releases the places where data is kept."""
