"""What runs own in an account, found by our marks on it, and removed."""
