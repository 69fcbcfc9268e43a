"""Faults that are made to happen on a real cluster, and what becomes of the run."""
