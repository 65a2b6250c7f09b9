"""The backends, with which the controller creates, checks, measures and releases the places where data is kept."""
