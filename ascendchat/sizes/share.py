"""How the optimizer shares matrices out over devices: whole, among teams. nn/optim.py does it, memory.py counts it.

A reduce-scatter gives every device an equal share, so a stack of matrices is padded to a multiple of the devices: 52
matrices on 1,024 devices would be exchanged, and kept, as 1,024. So where padding costs too much, neighbours form teams
that are small enough; each team has all matrices, and the teams add up their gradients. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping

from ascendchat.sizes.shape import Shape

Stacks = Mapping[tuple[int, int], int]  # (rows, columns) -> how many matrices
MOST_PADDING = 1.25  # times the matrices is what a team may exchange,
LITTLE = 2**23  # or so many elements more: less than one more exchange is worth.
NODE = 8  # devices always share, whatever the padding: they have less to keep than each would have alone


def stacks(shape: Shape) -> dict[tuple[int, int], int]:
    """The matrices that Muon updates, by shape, as nn/optim.py groups them."""
    found: dict[tuple[int, int], int] = {}
    heads = shape.q_dim // shape.kv_dim + 2
    for size, count in (
        ((shape.kv_dim, shape.dim), heads),
        ((shape.dim, shape.q_dim), 1),
        ((shape.mlp_dim, shape.dim), 2),
    ):
        found[size] = found.get(size, 0) + count * shape.depth
    return found


def elements(matrices: Stacks, team: int) -> int:
    """Of all matrices, padded so that every device of a team has equally many."""
    return sum(-(-count // team) * team * rows * cols for (rows, cols), count in matrices.items())


def team_size(matrices: Stacks, devices: int) -> int:
    """Devices that share the matrices out: the largest divisor of all that pads little, if it is not too small."""
    whole = elements(matrices, 1)
    most = max(MOST_PADDING * whole, whole + LITTLE)
    divisors = [team for team in range(devices, 0, -1) if devices % team == 0]
    enough = [team for team in divisors if team >= min(devices, NODE)]
    return next((team for team in enough if elements(matrices, team) <= most), enough[-1])


def exchanged_elements(shape: Shape, devices: int) -> tuple[int, int, int]:
    """(reduce-scattered, gathered, all-reduced among teams) by a device in a step. With one device: as if there were
    more, without padding."""
    matrices = stacks(shape)
    rest = shape.total_parameters - elements(matrices, 1)
    team = team_size(matrices, devices)
    padded = elements(matrices, team)
    return rest + padded, rest + padded, padded // team if team < devices else 0
