"""Code that nobody has checked: whole programs (program.py), and functions of users in processes (pool.py)."""

from ascendchat.sandbox.program import INSIDE, LAYERS, ProgramResult, capabilities, run

__all__ = ["INSIDE", "LAYERS", "ProgramResult", "capabilities", "run"]
