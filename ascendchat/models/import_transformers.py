"""Hugging Face models behind the interfaces of our own: the only importer of transformers and peft.

    opened = open_folder(find("Qwen2.5-0.5B-Instruct"), torch.bfloat16)     # folder.py; a .gguf file too
    opened.model                 # a LanguageModel (nn/model.py): engine, scorer and trainer run it as they run ours
    opened.tokenizer             # as data/tokenizer, with the model's own chat template
    export(opened.model, opened.tokenizer, Path("out"))                     # back to a folder that transformers loads

`ascendchat chat --model DIR`, `serve`, `eval chat`, `eval base` and `rl` come through here.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

from ascendchat.errors import UserError
from ascendchat.version import install_command


def library() -> ModuleType:
    """transformers, imported so that it neither asks the network nor fails on a torch_npu that has no CANN."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a model is a folder here: nothing is downloaded behind one's back
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        import transformers
        from transformers.utils import import_utils
    except ImportError as error:
        raise UserError(
            f"Hugging Face models need transformers ({error}); install it: {install_command('hf')}"
        ) from None
    transformers.utils.logging.disable_progress_bar()
    if "torch_npu" not in sys.modules:  # transformers would import it wherever it is installed
        found: Any = import_utils._is_package_available

        def without(name: str, *args: Any, **named: Any) -> Any:
            return (False, "N/A") if name == "torch_npu" else found(name, *args, **named)

        vars(import_utils)["_is_package_available"] = without
        try:
            import_utils.is_torch_npu_available()  # the answer is kept
            import_utils.is_torch_npu_available(check_device=True)
        finally:
            vars(import_utils)["_is_package_available"] = found
    return transformers
