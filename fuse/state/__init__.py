"""What a restarted server reads: the journal of unsent changes and renames, known attributes, node ids."""
