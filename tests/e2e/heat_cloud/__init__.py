"""A test tool: an OpenStack of containers, for the subset of HOT that `mayfly heat` writes.

`hot` resolves the template's functions, `cloud` makes networks and nodes of it, `signals` is where
nodes report, `git_server` serves the repository. Nothing here is part of Mayfly.
"""
