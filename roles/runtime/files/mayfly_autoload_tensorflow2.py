"""Lets fsspec open hdfs:// in training tasks by our own file system (see mayfly_hdfs.py).

Python imports this module at each start (see mayfly.pth); outside of a task it does nothing.
"""

import os

if os.environ.get("MAYFLY_TASK"):
    import fsspec

    fsspec.register_implementation("hdfs", "mayfly_hdfs.HdfsFileSystem", clobber=True)
