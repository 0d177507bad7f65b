"""Start one process per device, on one node or many.

    ascendchat launch --devices 8 base --depth 20
    ascendchat launch --nnodes 2 --node-rank 0 --master node0:20123 --devices 8 base --depth 26
    srun --ntasks-per-node=1 ascendchat launch base --depth 26        (Slurm; Kubernetes and ModelArts are read too)

plan.py decides what is started; torchrun, inside this process (torchrun.py), starts the ranks, watches them, starts
them again and passes signals on. What a rank prints goes to RUN/logs/attempt_K/rank_N.log, rank 0 also to the console;
the exit status is that of the rank that failed.
"""

from __future__ import annotations

import importlib
import os

from ascendchat.config.commands import LaunchConfig
from ascendchat.errors import UserError
from ascendchat.launch.plan import LaunchPlan, make_plan, say

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def run(config: LaunchConfig) -> int:
    """Run the command on all ranks; start it again after a failure as often as --max-restarts allows."""
    card = os.environ.get("ASCEND_DEVICE_ID", "0")
    if os.environ.get("RANK_ID") and card != "0":  # ModelArts' preset engine starts this once per card
        say(f"card {card} is used by the launcher that runs on card 0; nothing to do here")
        return 0
    plan = make_plan(config, os.environ)
    where = f", node {plan.node_rank} of {plan.nodes}" if plan.nodes > 1 else ""
    say(f"{plan.devices} process{'es' if plan.devices > 1 else ''}{where}; logs in {plan.logs}")
    try:
        plan.logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot write the logs to {plan.logs} ({error.strerror}); set ASCENDCHAT_HOME to a folder of yours"
        ) from None
    return _run_ranks(plan, config)


def _run_ranks(plan: LaunchPlan, config: LaunchConfig) -> int:
    """Import torch without the plug-ins of devices, one of which may be broken; the ranks have the user's setting."""
    setting = os.environ.get(AUTOLOAD)
    os.environ[AUTOLOAD] = "0"
    try:
        torchrun = importlib.import_module("ascendchat.launch.torchrun")
    finally:
        del os.environ[AUTOLOAD]
        if setting is not None:
            os.environ[AUTOLOAD] = setting
    return int(torchrun.run_ranks(plan, config.max_restarts, config.grace))
