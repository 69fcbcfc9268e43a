"""What several built-in programs have in common; it lies beside them on every node."""
