"""Lets older versions of transformers, and what is built on them, read a folder that version 5 has written.

    add_old_names(config, folder / "config.json")
    add_old_tokenizer_names(folder / "tokenizer_config.json")

Version 5 has new names for some values and writes only these. Who looks for the old ones (transformers 4, the releases
of vLLM, vllm-ascend, LMDeploy and MindIE on it) takes its own default instead, such as rope_theta 10,000 for 1,000,000,
without a word. So each value is written under both names, with which version 5 reads the same as before.
"""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

from ascendchat.files import write_atomic

# Of model types whose old config.json had its own: the base of all angles, the part of a head's channels that turns.
OLD_ROPE = {"gpt_neox": ("rotary_emb_base", "rotary_pct"), "gpt_neox_japanese": ("rotary_emb_base", "rotary_pct")}
USUAL_ROPE = "rope_theta", "partial_rotary_factor"
FAST = "PreTrainedTokenizerFast"  # what version 5 calls TokenizersBackend


def add_old_names(config: Any, path: Path) -> None:
    """`config`: transformers' own, as it is written in `path`."""
    values = json.loads(path.read_text(encoding="utf-8"))
    write_atomic(path, json.dumps(with_old_names(config, values), indent=2, sort_keys=True) + "\n")


def with_old_names(config: Any, values: dict[str, Any]) -> dict[str, Any]:
    """The values of a config.json and what they are called in version 4; parts of a multimodal one too."""
    found = {
        name: with_old_names(part, value) if hasattr(part := vars(config).get(name), "to_dict") else value
        for name, value in values.items()
    }
    for alias, name in config.attribute_map.items():  # version 4 may have written the alias: num_experts of qwen3_moe
        if name in found:
            found.setdefault(alias, found[name])
    if dtype := found.get("dtype") or found.get("torch_dtype"):
        found["dtype"] = found["torch_dtype"] = dtype
    both = {**found, **old_rope(found)} if found.get("rope_parameters") else found
    return both if reads_alike(config, both) else found


def reads_alike(config: Any, values: dict[str, Any]) -> bool:
    """Whether version 5 finds the rotation of `config` in both forms. Some of its own kinds have no old form, and some
    models take `rope_scaling` for that of every type of layer; they are too new for version 4."""
    try:
        again = type(config).from_dict(deepcopy(values))
    except (KeyError, TypeError, ValueError):
        return False
    new, known = (dict(getattr(part, "rope_parameters", None) or {}) for part in (again, config))
    new.pop("type", None)
    return new == known


def old_rope(values: dict[str, Any]) -> dict[str, Any]:
    """rope_theta, rope_scaling and what else version 4 has for `rope_parameters`, which may hold some for each type of
    layer: those of layers without a window are then the usual ones."""
    new = values["rope_parameters"]
    full, local = new.get("full_attention", new) or {}, new.get("sliding_attention") or {}
    named = dict(zip(USUAL_ROPE, OLD_ROPE.get(values.get("model_type", ""), USUAL_ROPE)))
    found = {old: full[name] for name, old in named.items() if name in full}
    if local.get("rope_theta", full.get("rope_theta")) != full.get("rope_theta"):
        found["rope_local_base_freq"] = local["rope_theta"]
    kind = full.get("rope_type", "default")
    rest = {name: value for name, value in full.items() if name not in (*USUAL_ROPE, "rope_type")}
    if kind == "longrope":  # Phi-3 takes exactly these, and has the length beside them
        rest = {name: value for name, value in rest.items() if values.get(name) != value}
    scaling = {"type" if kind == "longrope" else "rope_type": kind, **rest}
    return {**found, "rope_scaling": scaling if rest or kind != "default" else None}


def add_old_tokenizer_names(path: Path) -> None:
    """Version 4 opens no tokenizer of a class that it does not know, nor one whose further special tokens are a list
    under their new name."""
    values = json.loads(path.read_text(encoding="utf-8"))
    if values.get("tokenizer_class") == "TokenizersBackend":
        values["tokenizer_class"] = FAST
    if isinstance(values.get("extra_special_tokens"), list):
        values["additional_special_tokens"] = values.pop("extra_special_tokens")
    write_atomic(path, json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
