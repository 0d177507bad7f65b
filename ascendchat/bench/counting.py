"""What eager code asks of a device: operators launched, and the bytes that they read and write.

    with Count() as count:
        loss.backward()
    print(count.launches, count.vector_bytes)

Every operator that reaches the device is seen, on any kind of device, those of the backward pass too. One operator is
taken as one launch and one pass over its arguments, which is what it costs without a compiler; a library may launch
more behind it, to copy an argument that is not contiguous. Compiled code is not seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRODUCTS = ("mm", "bmm", "matmul", "linear", "attention")  # in the names of what the cube unit (tensor cores) does
ONLY_WRITES = ("zero_", "fill_", "copy_", "normal_", "uniform_")
LAUNCHES_NOTHING = ("empty", "new_empty", "_unsafe_view", "_reshape_alias", "lift_fresh", "is_pinned", "record_stream")


class Count(TorchDispatchMode):
    """Counts while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.vector_bytes = self.product_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[-1]
        if is_view(func._schema) or name.startswith(LAUNCHES_NOTHING):
            return found
        moved = sum(_moved(func._schema, name, args, kwargs or {}))
        made = [x for x, known in zip(_results(found), func._schema.returns) if known.alias_info is None]
        moved += sum(_bytes(x) for x in made)
        if moved:
            self.launches += 1
        if any(part in name for part in PRODUCTS):
            self.product_bytes += moved
        else:
            self.vector_bytes += moved
        return found


def is_view(schema: Any) -> bool:
    """Whether an operator gives back another look at its argument."""
    return any(known.alias_info is not None and not known.alias_info.is_write for known in schema.returns)


def _results(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


def _bytes(value: Any) -> int:
    return sum(x.nbytes for x in tree_leaves(value) if isinstance(x, torch.Tensor))


def _moved(schema: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[int]:
    """Of each argument: one that is changed in place is read and written, but for those that only get a value."""
    for i, known in enumerate(schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(known.name)
        changed = known.alias_info is not None and known.alias_info.is_write
        twice = changed and not known.is_out and not name.endswith(ONLY_WRITES)
        yield _bytes(value) * (2 if twice else 1)
