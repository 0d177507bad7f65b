"""Lets older versions of transformers, and what is built on them, read a folder that version 5 has written.

    add_old_names(config, folder / "config.json")
    add_old_tokenizer_names(folder / "tokenizer_config.json")

Version 5 has new names for some values and writes only these. Programs that read the old ones (transformers 4, releases
of vLLM, vllm-ascend, LMDeploy and MindIE on it) silently take their own default instead, such as rope_theta 10,000 for
1,000,000. So each value is written under both names, which version 5 reads like the new ones alone.
"""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

from ascendchat.files import write_atomic

# Names in the old config.json of some model types: the base of all angles, the share of a head's channels that rotate.
OLD_ROPE = {"gpt_neox": ("rotary_emb_base", "rotary_pct"), "gpt_neox_japanese": ("rotary_emb_base", "rotary_pct")}
USUAL_ROPE = "rope_theta", "partial_rotary_factor"
FAST = "PreTrainedTokenizerFast"  # TokenizersBackend in version 5


def add_old_names(config: Any, path: Path) -> None:
    """Add the old names to a config.json. `config`: the object of transformers that was written to `path`."""
    values = json.loads(path.read_text(encoding="utf-8"))
    write_atomic(path, json.dumps(with_old_names(config, values), indent=2, sort_keys=True) + "\n")


def with_old_names(config: Any, values: dict[str, Any]) -> dict[str, Any]:
    """The values of a config.json, under their names in version 4 too; also in the parts of a multimodal one."""
    result = {
        name: with_old_names(part, value) if hasattr(part := vars(config).get(name), "to_dict") else value
        for name, value in values.items()
    }
    for alias, name in config.attribute_map.items():  # version 4 may have written the alias: num_experts of qwen3_moe
        if name in result:
            result.setdefault(alias, result[name])
    if dtype := result.get("dtype") or result.get("torch_dtype"):
        result["dtype"] = result["torch_dtype"] = dtype
    both = {**result, **old_rope(result)} if result.get("rope_parameters") else result
    return both if reads_alike(config, both) else result


def reads_alike(config: Any, values: dict[str, Any]) -> bool:
    """True if version 5 reads the same rotation from `values` as from `config`. Some of its kinds have no old form, and
    some models apply `rope_scaling` to every type of layer; they are too new for version 4."""
    try:
        again = type(config).from_dict(deepcopy(values))
    except (KeyError, TypeError, ValueError):
        return False
    new, old = (dict(getattr(part, "rope_parameters", None) or {}) for part in (again, config))
    new.pop("type", None)
    return new == old


def old_rope(values: dict[str, Any]) -> dict[str, Any]:
    """The values of version 4 for `rope_parameters`: rope_theta, rope_scaling and others. If they differ between types
    of layers, those of layers without a window are taken."""
    new = values["rope_parameters"]
    full, local = new.get("full_attention", new) or {}, new.get("sliding_attention") or {}
    named = dict(zip(USUAL_ROPE, OLD_ROPE.get(values.get("model_type", ""), USUAL_ROPE)))
    result = {old: full[name] for name, old in named.items() if name in full}
    if local.get("rope_theta", full.get("rope_theta")) != full.get("rope_theta"):
        result["rope_local_base_freq"] = local["rope_theta"]
    kind = full.get("rope_type", "default")
    rest = {name: value for name, value in full.items() if name not in (*USUAL_ROPE, "rope_type")}
    if kind == "longrope":  # Phi-3 takes exactly these, and the length is another entry of its config
        rest = {name: value for name, value in rest.items() if values.get(name) != value}
    scaling = {"type" if kind == "longrope" else "rope_type": kind, **rest}
    return {**result, "rope_scaling": scaling if rest or kind != "default" else None}


def add_old_tokenizer_names(path: Path) -> None:
    """Add the old names to a tokenizer_config.json: version 4 opens neither an unknown class of tokenizers, nor a list
    of further special tokens under its new name."""
    values = json.loads(path.read_text(encoding="utf-8"))
    if values.get("tokenizer_class") == "TokenizersBackend":
        values["tokenizer_class"] = FAST
    if isinstance(values.get("extra_special_tokens"), list):
        values["additional_special_tokens"] = values.pop("extra_special_tokens")
    write_atomic(path, json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
