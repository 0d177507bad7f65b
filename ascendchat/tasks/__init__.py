"""Tasks: questions with answers, to train on and to evaluate with.

    from ascendchat.tasks.by_name import load
    load("mmlu"), load("gsm8k", "train"), load("smoltalk", "train"), load("my.jsonl", "train"), load("toy_fact_zh")

task.py defines a task, by_name.py lists those with a name. Nothing is imported here: the processes of reward functions
(sandbox/process.py) need none of them, and each would start 0.4 s later.
"""
