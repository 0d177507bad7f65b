"""Python imports this when it starts, where the folder is in PYTHONPATH: the row of a new kind of chip, in chips.py."""

from ascendchat import chips

TOY = chips.Chip("Toy X1", "toy", 4 << 30, 1e12, 1e11, 1e9, 1e9, bf16=False, devices_per_node=2, source="made up")
chips.CHIPS[TOY.name] = TOY
chips.KINDS["toy"] = chips.Kind(
    title="Toy card",
    module="toy",
    default=TOY,
    collective="gloo",
    memory=chips.MemoryTraits(context=64 << 20, always_fused=True),
    mfu=0.4,
    visible="TOY_CARDS",
    half=False,
)
