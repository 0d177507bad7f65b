"""Rendezvous of the ranks for `collectives.init`: timeouts in the right order, and the names of missing ranks."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as torch_dist

from ascendchat.parallel.world import World

CONNECT = 600.0  # seconds, where neither the caller nor the device's environment says otherwise
MARGIN = 60.0  # seconds between two timeouts that must fire in order
PARTING = 1.0  # seconds that rank 0 keeps the store open for the others to read who is missing


class MissingRanks(RuntimeError):
    """Some ranks did not arrive; the text names them. Starting the job again can mend it, so it is no UserError."""


@dataclass(frozen=True)
class _Timeouts:
    """Seconds. In this order the one that knows most about a fault speaks first: connect < execute < group."""

    group: float
    connect: float
    variables: dict[str, str]
    notes: tuple[str, ...]


def order_timeouts(
    collective: str, timeout: float, connect_timeout: float | None, environ: Mapping[str, str]
) -> _Timeouts:
    """Fit the process group's timeout to the collective library's own, `<LIBRARY>_CONNECT_TIMEOUT` and `_EXEC_TIMEOUT`.

    A library without such variables (the device's profile sets the first where it exists) keeps the group's timeout.
    """
    connect_name, execute_name = f"{collective.upper()}_CONNECT_TIMEOUT", f"{collective.upper()}_EXEC_TIMEOUT"
    notes: list[str] = []

    def seconds(name: str) -> float | None:
        try:
            return float(environ[name]) if environ.get(name) else None
        except ValueError:
            notes.append(f"{name}={environ[name]!r} is not a number of seconds; unset it")
            return None

    library_connect, execute = seconds(connect_name), seconds(execute_name)
    connect = connect_timeout or library_connect or CONNECT
    variables: dict[str, str] = {}
    if execute is None and library_connect is not None:
        # The library's own default (half an hour) may be longer than ours, and its report would come too late.
        execute = max(timeout - MARGIN, library_connect + MARGIN)
        variables[execute_name] = str(int(execute))
    elif execute == 0:
        notes.append(f"{execute_name}=0 waits for ever for a lost rank; unset it")
        execute = None
    group = timeout
    if execute is not None and group <= execute:
        group = execute + MARGIN
        if not variables:
            notes.append(
                f"{execute_name}={execute:.0f} is not below the process group's timeout of {timeout:.0f} s, which "
                f"would end a hung run before its cause is logged; the timeout is now {group:.0f} s"
            )
    if execute is not None and library_connect is not None and execute <= library_connect:
        notes.append(
            f"{execute_name}={execute:.0f} is not above {connect_name}={library_connect:.0f}: a rank that is late then "
            f"looks like a rank that hangs; unset {execute_name} or make it larger"
        )
    return _Timeouts(group, connect, variables, tuple(notes))


def _store(me: World, serve: bool, limit: float) -> torch_dist.Store:
    server = torch_dist.TCPStore(
        me.master_addr, me.master_port, me.size, serve, timeout=timedelta(seconds=limit), wait_for_workers=False
    )
    return torch_dist.PrefixStore(f"ascendchat/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", server)


def rendezvous(me: World, limit: float) -> torch_dist.Store:
    """Wait until every rank has signed in at the store; MissingRanks names those that did not."""
    # torchrun keeps the store itself; elsewhere rank 0 does.
    serve = me.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    where = f"{me.master_addr}:{me.master_port}"
    end = time.monotonic() + limit
    try:
        store = _store(me, serve, limit)
        store.set(f"here/{me.rank}", socket.gethostname())
    except RuntimeError as error:  # torch's network errors are RuntimeErrors
        if serve:
            raise MissingRanks(
                f"rank 0 cannot listen on {where} ({_first_line(error)}); set another MASTER_PORT, "
                "or let `ascendchat launch` pick a free one"
            ) from error
        raise MissingRanks(
            f"rank {me.rank} could not reach rank 0 at {where} within {limit:.0f} s ({_first_line(error)}): rank 0 "
            f"never arrived, or its host cannot be reached from {socket.gethostname()}; look at the log of rank 0, and "
            f"try: ping {me.master_addr}"
        ) from error
    try:
        store.wait([f"here/{rank}" for rank in range(me.size)], timedelta(seconds=max(0.1, end - time.monotonic())))
    except RuntimeError as error:
        text = _who_is_missing(store, me, "here", limit, "never arrived")
        if serve:
            time.sleep(PARTING)
        raise MissingRanks(text) from error
    return store


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _who_is_missing(store: torch_dist.Store, me: World, stage: str, limit: float, what: str) -> str:
    try:
        missing = [rank for rank in range(me.size) if not store.check([f"{stage}/{rank}"])]
        arrived = [rank for rank in range(me.size) if store.check([f"here/{rank}"])]
        hosts = sorted({store.get(f"here/{rank}").decode() for rank in arrived})
    except RuntimeError as error:  # rank 0 was faster and took the store with it
        return f"rank 0 closed the job while rank {me.rank} was waiting ({_first_line(error)}); look at its log"
    named = ", ".join(f"{rank} (node {rank // me.local_size})" for rank in missing)
    return (
        f"{'rank' if len(missing) == 1 else 'ranks'} {named} of {me.size} {what} within {limit:.0f} s; "
        f"{len(arrived)} arrived, from {', '.join(hosts)}. Look at the {'log' if len(missing) == 1 else 'logs'} "
        f"{', '.join(f'rank_{rank}.log' for rank in missing)} for an earlier error, check that every node runs the "
        f"same command and reaches {me.master_addr}:{me.master_port}; slow ranks need a longer connect timeout"
    )


def end_hung_process(me: World, limit: float) -> None:
    """End the process from a thread of its own: the main one hangs inside the backend and cannot be interrupted."""
    text = f"the first collective did not end within {limit:.0f} s"
    try:
        store = _store(me, False, 5.0)
        text = _who_is_missing(store, me, "warm", limit, "arrived but did not finish the first collective")
    except RuntimeError as error:
        text += f", and the store of rank 0 does not answer ({_first_line(error)})"
    print(f"ascendchat: rank {me.rank}: {text}", file=sys.stderr, flush=True)
    time.sleep(PARTING)
    os._exit(1)


def warm_up(me: World, device: torch.device) -> None:
    """One tiny collective: backends connect lazily, and a failure now is cheaper than one in the first step."""
    ranks = torch.ones(1, device=device)
    torch_dist.all_reduce(ranks)
    if int(ranks.item()) != me.size:
        raise RuntimeError(f"the first all_reduce over {me.size} ranks gave {ranks.item()}, not {me.size}")
