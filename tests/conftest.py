"""What every test relies on."""

import signal

# A test run in a shell's background is deaf to Ctrl-C, and so would be every process it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
