"""What runs on the nodes of a Mayfly cluster."""
