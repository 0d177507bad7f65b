"""New weights for a generator: those that do not fit the model are refused before anything is overwritten."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import engine_models as make
import pytest
import torch
from torch import Tensor

from ascendchat.device import pick
from ascendchat.errors import UserError
from ascendchat.nn.attention import Sdpa
from ascendchat.rl.source import SyncRolloutSource

NAN = float("nan")
ODD: list[tuple[Callable[[Tensor], dict[str, Tensor]], str]] = [
    (lambda own: {}, "do not fit the model: smear is missing"),
    (lambda own: {"smear": own, "smears": own}, "do not fit the model: smears is unknown"),
    (lambda own: {"smear": own[:-1]}, r"do not fit the model: smear is \(\d+.*\) instead of \(\d+.*\)"),
    (lambda own: {"smear": own.to(torch.int64)}, "do not fit the model: smear is torch.int64 instead of torch.float32"),
    (lambda own: {"smear": torch.full_like(own, NAN)}, "numbers that are not finite, in smear as torch.float32"),
    (lambda own: {"smear": torch.full_like(own, 1e200, dtype=torch.float64)}, "not finite, in smear as torch.float32"),
]


@pytest.mark.parametrize(("change", "says"), ODD)
def test_an_engine_takes_no_weights_that_do_not_fit(change: Callable[[Tensor], dict[str, Tensor]], says: str) -> None:
    engine = make.engine(make.model(0), pick("cpu"), Sdpa(), slots=1, context=16)
    before = {name: tensor.clone() for name, tensor in engine.decoder.model.state_dict().items()}
    others = {name: tensor for name, tensor in make.model(1).state_dict().items() if name != "smear"}
    with pytest.raises(ValueError, match=says):
        engine.load({**others, **change(before["smear"])}, 1)
    assert engine.version == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.decoder.model.state_dict().items())


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        ("these weights do not fit the model: smear is missing", "start the servers with the model that is trained"),
        ("these weights hold numbers that are not finite, in smear", "with a lower learning rate"),
    ],
)
def test_a_server_with_another_model_ends_rl_with_a_sentence(reason: str, says: str) -> None:

    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError(reason)

    rollout: Any = SimpleNamespace(generator=SimpleNamespace(load=refuse, elsewhere=True))
    source = SyncRolloutSource(rollout, SimpleNamespace())  # type: ignore[arg-type]
    with pytest.raises(UserError, match=f"after 3 updates were not taken: {reason}; .*{says}"):
        source.update_weights({}, 3)
