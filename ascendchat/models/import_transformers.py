"""Imports transformers, for this package alone: it never asks the network, and no broken torch_npu breaks it."""

from __future__ import annotations

import os
import sys
from types import ModuleType

from ascendchat.errors import UserError
from ascendchat.version import install_command


def library() -> ModuleType:
    """Import transformers."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are folders here; `ascendchat data fetch` downloads
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        import transformers
        from transformers.utils import import_utils
    except ImportError as error:
        raise UserError(
            f"Hugging Face models need transformers ({error}); install it: {install_command('hf')}"
        ) from None
    transformers.utils.logging.disable_progress_bar()
    if "torch_npu" not in sys.modules:
        # transformers imports torch_npu wherever it is installed, which fails without CANN. To Python, None means that
        # there is no such module; transformers remembers its two answers.
        sys.modules["torch_npu"] = None  # type: ignore[assignment]
        try:
            import_utils.is_torch_npu_available()
            import_utils.is_torch_npu_available(check_device=True)
        finally:
            del sys.modules["torch_npu"]
    return transformers
