"""Recipes on the nodes: expansion, the ledger of tasks, the engines, and what runs one attempt."""
