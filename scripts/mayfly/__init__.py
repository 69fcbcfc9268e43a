"""Mayfly: transient clusters for distributed training."""
