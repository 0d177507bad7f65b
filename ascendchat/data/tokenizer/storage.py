"""The folder of a tokenizer, written by `ascendchat tokenizer train --out DIR`.

bpe.json               ours: pattern, merges as pairs of ids, special tokens, fingerprint
tokenizer.json         the same for Hugging Face tokenizers, transformers and vLLM: equal ids (see MAX_RUN)
tokenizer_config.json  names of the special tokens and the chat template
manifest.json          size and sha256 of each, and the command that mends the folder; written last
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ascendchat.data.verify import MANIFEST
from ascendchat.errors import UserError
from ascendchat.files import write_atomic

OWN = "bpe.json"
BPE_FORMAT = "ascendchat-bpe-1"

# The renderer of data/chat/render.py as a template: neighbouring assistant and tool messages are one turn.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- set ns = namespace(open=false, said=false) -%}
{%- for message in messages -%}
{%- if message.role in ['assistant', 'tool'] -%}
{%- if not ns.open -%}{{- '<|assistant_start|>' -}}{%- set ns.open = true -%}{%- set ns.said = false -%}{%- endif -%}
{%- if message.content is string -%}
{%- set parts = [{'type': 'text', 'text': message.content}] -%}
{%- else -%}
{%- set parts = message.content or [] -%}
{%- endif -%}
{%- if message.role == 'tool' -%}
{{- '<|output_start|>' -}}{%- for part in parts -%}{{- part.text -}}{%- endfor -%}{{- '<|output_end|>' -}}
{%- set ns.said = false -%}
{%- else -%}
{%- if ns.said and parts and parts[0].type == 'text' and parts[0].text -%}{{- '\\n' -}}{%- endif -%}
{%- for part in parts -%}
{%- if part.type == 'text' -%}
{{- part.text -}}{%- if part.text -%}{%- set ns.said = true -%}{%- endif -%}
{%- else -%}
{{- '<|' ~ part.type ~ '_start|>' ~ part.text ~ '<|' ~ part.type ~ '_end|>' -}}{%- set ns.said = false -%}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- if loop.last or loop.nextitem.role not in ['assistant', 'tool'] -%}
{{- '<|assistant_end|>' -}}{%- set ns.open = false -%}
{%- endif -%}
{%- else -%}
{{- '<|' ~ message.role ~ '_start|>' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}{%- for part in message.content -%}{{- part.text -}}{%- endfor -%}{%- endif -%}
{{- '<|' ~ message.role ~ '_end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant_start|>' -}}{%- endif -%}
"""


# Prefix of the template for tokenizers without tokens for the system, whose text goes before the next user's words.
FOLD_SYSTEM = """\
{%- set talk = namespace(turns=[], held='') -%}
{%- for message in messages -%}
{%- if message.content is string -%}{%- set text = message.content -%}
{%- else -%}{%- set text = (message.content or []) | map(attribute='text') | join -%}{%- endif -%}
{%- if message.role == 'system' -%}
{%- set talk.held = talk.held ~ text ~ '\\n\\n' -%}
{%- else -%}
{%- if message.role == 'user' -%}
{%- set talk.turns = talk.turns + [{'role': 'user', 'content': talk.held ~ text}] -%}
{%- else -%}
{%- if talk.held -%}{%- set talk.turns = talk.turns + [{'role': 'user', 'content': talk.held[:-2]}] -%}{%- endif -%}
{%- set talk.turns = talk.turns + [message] -%}
{%- endif -%}
{%- set talk.held = '' -%}
{%- endif -%}
{%- endfor -%}
{%- if talk.held -%}{%- set talk.turns = talk.turns + [{'role': 'user', 'content': talk.held[:-2]}] -%}{%- endif -%}
"""


def chat_template(specials: Mapping[str, int]) -> str:
    """The Jinja chat template for a tokenizer with these special tokens."""
    if "<|system_start|>" in specials:
        return CHAT_TEMPLATE
    return FOLD_SYSTEM + CHAT_TEMPLATE.replace("for message in messages", "for message in talk.turns")


@functools.cache
def byte_letters() -> list[str]:
    """The printable letter of each byte in byte-level vocabularies in JSON: itself, or one above U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = iter(range(0x100, 0x200))
    return [chr(value) if value in printable else chr(next(hidden)) for value in range(256)]


def hf_tokenizer(
    pattern: str, merges: Sequence[tuple[int, int]], tokens: Sequence[bytes], specials: Mapping[str, int]
) -> dict[str, Any]:
    """Build the content of tokenizer.json. `ignore_merges`: a piece that is a token is that token, as in tiktoken."""
    letters = byte_letters()
    words = ["".join(letters[value] for value in token) for token in tokens]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": name, **flags} for name, number in specials.items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {word: number for number, word in enumerate(words)},
            "merges": [[words[left], words[right]] for left, right in merges],
        },
    }


def hf_config(specials: Mapping[str, int]) -> dict[str, Any]:
    """Build the content of tokenizer_config.json."""
    pad = "<|pad|>" if "<|pad|>" in specials else "<|bos|>"
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|assistant_end|>",  # generation of a chat reply ends here
        "pad_token": pad,
        "added_tokens_decoder": {str(number): {"content": name, **flags} for name, number in specials.items()},
        "additional_special_tokens": [n for n in specials if n not in ("<|bos|>", "<|assistant_end|>", pad)],
        "add_bos_token": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template(specials),
    }


def write_folder(folder: Path, own: dict[str, Any], hf: dict[str, Any], command: str = "") -> None:
    """Write the folder; the manifest comes last, so a folder half replaced does not load."""
    specials = {token["content"]: token["id"] for token in hf["added_tokens"]}
    contents = {
        OWN: {"format": BPE_FORMAT, **own},
        "tokenizer.json": hf,
        "tokenizer_config.json": hf_config(specials),
    }
    folder.mkdir(parents=True, exist_ok=True)
    entries = {}
    for name, content in contents.items():
        text = json.dumps(content, ensure_ascii=False, indent=1 if name == "tokenizer_config.json" else None) + "\n"
        write_atomic(folder / name, text)
        entries[name] = {"bytes": len(text.encode()), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    manifest = {"files": entries, "kind": "tokenizer", "mend": command or _train(folder)}
    write_atomic(folder / MANIFEST, json.dumps(manifest, ensure_ascii=False, indent=1) + "\n")


def _train(folder: Path) -> str:
    return f"ascendchat tokenizer train --source DIR --out {folder}"


def damaged(folder: Path, name: str, why: str) -> str:
    """The sentence for a file that cannot be used."""
    command = _train(folder)
    with contextlib.suppress(OSError, ValueError, RecursionError, KeyError, TypeError):  # the manifest itself may be it
        command = str(json.loads((folder / MANIFEST).read_bytes())["mend"])
    return (
        f"{folder / name} is damaged: {why}; copy the folder again from where it came, or train it again on the same "
        f"texts: {command}"
    )


def read_folder(folder: Path) -> dict[str, Any]:
    """Read bpe.json, after comparing every file of the folder with the manifest."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        entries = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
    except NotADirectoryError:
        train = _train(folder.with_name("tokenizer"))
        raise UserError(f"{folder} is a file; name the folder of a tokenizer, or train one: {train}") from None
    except FileNotFoundError:
        raise UserError(f"there is no tokenizer in {folder}; train one: {_train(folder)}") from None
    except OSError as error:
        raise UserError(damaged(folder, MANIFEST, f"it cannot be read ({error.strerror})")) from None
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise UserError(damaged(folder, MANIFEST, f"it cannot be read ({type(error).__name__})")) from None
    if OWN not in entries:
        raise UserError(damaged(folder, MANIFEST, f"it does not list {OWN}"))
    for name, (size, checksum) in entries.items():
        try:
            data = (folder / name).read_bytes()
        except FileNotFoundError:
            raise UserError(damaged(folder, name, "it is missing")) from None
        except OSError as error:
            raise UserError(damaged(folder, name, f"it cannot be read ({error.strerror})")) from None
        if len(data) != size:
            raise UserError(damaged(folder, name, f"it has {len(data)} bytes instead of {size}"))
        if hashlib.sha256(data).hexdigest() != checksum:
            raise UserError(damaged(folder, name, "its checksum does not match the manifest"))
        if name == OWN:
            own = data
    try:
        content = json.loads(own)
    except (ValueError, RecursionError):
        raise UserError(damaged(folder, OWN, "it is not JSON")) from None
    if not isinstance(content, dict) or content.get("format") != BPE_FORMAT:
        raise UserError(damaged(folder, OWN, f"its format is not {BPE_FORMAT}"))
    return content
