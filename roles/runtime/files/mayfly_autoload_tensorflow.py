"""Registers hdfs:// and s3:// in training tasks as soon as TensorFlow has been imported.

TensorFlow 2.15 has these file systems in the package tensorflow-io; programs that were written for
releases that had them built in would not find `hdfs://` otherwise, and would say so in no error.
Python imports this module at each start (see mayfly.pth); outside of a task it does nothing.
"""

import importlib
import os

if os.environ.get("MAYFLY_TASK"):
    import wrapt

    wrapt.register_post_import_hook(
        lambda _module: importlib.import_module("tensorflow_io"), "tensorflow"
    )
