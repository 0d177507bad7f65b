"""The rules by which a run is laid out, as pure functions without torch; and what `ascendchat plan` tells of them.

shape.py is the depth dial, memory.py the bytes, batch.py the batch and the hours, schedule.py the curves: the model and
the training commands import these. plan/command.py is the command; only it uses hf.py, which reads foreign models, plan/goals.py,
which puts the three plans together, plan/refuse.py, which finds what would fit, and plan/show.py. Nothing is imported here.
"""
