"""Ends by its own hand."""

# ends: signal
import os
import signal

os.kill(os.getpid(), signal.SIGKILL)
