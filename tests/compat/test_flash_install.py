"""`import ascendchat.compat.flash as flash; flash.install()` lets other people's code import flash_attn."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from ascendchat.compat import flash
from ascendchat.models.import_transformers import library

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:transformers has looked")]


@pytest.fixture(autouse=True)
def _undone() -> Iterator[None]:
    """No test leaves it installed."""
    yield
    flash.uninstall()


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="a real flash-attn is installed")
def test_code_that_imports_flash_attn_gets_our_functions() -> None:
    assert flash.install()
    assert flash.install(), "a second time does no harm"
    program: dict[str, Any] = {}
    exec(
        "import flash_attn\n"
        "from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache\n"
        "from flash_attn.flash_attn_interface import flash_attn_qkvpacked_func\n"
        "from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input\n",
        program,
    )
    for function in (*flash.FUNCTIONS, *flash.PADDING):
        assert program.get(function.__name__, function) is function
    assert program["flash_attn"].__version__.startswith("2.8.3+ascendchat.")
    assert metadata.version("flash-attn") == metadata.version("flash_attn") == program["flash_attn"].__version__
    assert metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
    assert importlib.util.find_spec("flash_attn") is not None
    with pytest.raises(ImportError, match=r"flash_attn\.layers"):
        importlib.import_module("flash_attn.layers.rotary")
    flash.uninstall()
    assert importlib.util.find_spec("flash_attn") is None
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("flash-attn")


def test_a_real_package_stays_unless_it_is_to_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("__version__ = '2.7.4'\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        for imported in (False, True):
            if imported:
                importlib.import_module("flash_attn")
            assert not flash.install()
            assert importlib.import_module("flash_attn").__version__ == "2.7.4"
        assert flash.install(replace=True)
        assert importlib.import_module("flash_attn").flash_attn_func is flash.flash_attn_func
        flash.uninstall()
        assert importlib.import_module("flash_attn").__version__ == "2.7.4"
    finally:
        sys.modules.pop("flash_attn", None)


@pytest.mark.slow
def test_transformers_finds_the_package_if_it_is_imported_afterwards() -> None:
    """And its own functions for NPUs, which take no window, are ours then."""
    program = (
        "import ascendchat.compat.flash as flash\n"
        "assert flash.install()\n"
        "from ascendchat.models.import_transformers import library\n"
        "import_utils = library().utils.import_utils\n"
        "assert import_utils.is_flash_attn_greater_or_equal('2.3.3')\n"
        "from transformers.integrations import npu_flash_attention as theirs\n"
        "assert theirs.npu_flash_attn_func is flash.flash_attn_func\n"
        "assert theirs.npu_flash_attn_varlen_func is flash.flash_attn_varlen_func\n"
        "flash.uninstall()\n"
        "assert theirs.npu_flash_attn_func is not flash.flash_attn_func\n"
    )
    # Not warm: another test may have had transformers imported there.
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """The same tiny Mistral with a window of 4, with transformers' eager attention and with its flash_attention_2. That
    refuses to run on a CPU before it looks for flash_attn: only this check is taken out."""
    pytest.importorskip("transformers")
    transformers = library()
    from transformers import modeling_flash_attention_utils as theirs

    flash.install(replace=True)
    monkeypatch.setattr(theirs, "is_flash_attn_2_available", lambda: True)
    monkeypatch.setattr(theirs, "_loaded_implementation", None)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 40}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 4}
    found = []
    for name in ("eager", "flash_attention_2"):
        torch.manual_seed(0)
        model = transformers.MistralForCausalLM(
            transformers.MistralConfig(**sizes, **heads, attn_implementation="eager")
        )
        model.config._attn_implementation = name
        found.append(model.eval())
    return found[0], found[1]


def test_transformers_padded_batches_equal_its_eager_attention(models: tuple[Any, Any]) -> None:
    eager, ours = models
    tokens = torch.randint(0, 40, (3, 9), generator=torch.Generator().manual_seed(1))
    for mask in (torch.ones(3, 9), (torch.arange(9) >= torch.tensor([[0], [3], [7]])).float()):
        logits = [model(tokens, attention_mask=mask.long()).logits for model in (eager, ours)]
        torch.testing.assert_close(logits[1] * mask[..., None], logits[0] * mask[..., None], rtol=1e-4, atol=1e-5)
        for model, found in zip(models, logits):
            model.zero_grad()
            (found * mask[..., None]).square().sum().backward()
        for one, other in zip(ours.parameters(), eager.parameters()):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-4)
