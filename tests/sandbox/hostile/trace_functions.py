"""Hooks every call of the interpreter."""

# ends: ok exit error
import os
import sys


def spy(frame: object, event: str, argument: object) -> object:
    return spy


sys.settrace(spy)
sys.setprofile(lambda frame, event, argument: None)
sys.addaudithook(lambda event, arguments: None)
os.getpid()
