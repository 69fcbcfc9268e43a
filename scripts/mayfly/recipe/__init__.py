"""Recipes on the control side: the file, its checks, the plan, and the commands."""
