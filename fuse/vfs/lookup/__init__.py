"""What is behind a name or in a directory, and how fresh what is known of it is."""
