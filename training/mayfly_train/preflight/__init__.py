"""Before any engine starts: do all nodes reach each other as it needs, agree on names and time?

`edges` says who tests what (pure), `meeting` is how two nodes talk, `allreduce` sends data round
the ring, `checks` are a node's own, `node` puts them together, `command` is the command line.
"""

from mayfly_train.preflight.command import add_arguments, run

__all__ = ["add_arguments", "run"]
