"""What a conversation teaches, against the training templates of TRL: the same ids, the same turns.

`pip install --no-deps --target DIR/trl trl` and ASCENDCHAT_TEST_CLIENTS=DIR; skipped elsewhere. Three things differ on
purpose: TRL also learns what opens a turn and the newline behind its end, and it writes thoughts of earlier turns where
the model's own template does not, so that one row holds what are rows of their own here.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import hf_models
import pytest
import tokenizers

from ascendchat.data.chat.render import Counts, render, render_pieces
from ascendchat.errors import UserError
from ascendchat.models.tokenizer import HFTokenizer

FOLDER = Path(os.environ.get("ASCENDCHAT_TEST_CLIENTS", "")) / "trl" / "trl" / "chat_templates"
OF_PICTURES = {"idefics3", "llava_next", "smolvlm"}  # their templates take only lists of texts and pictures
FAMILIES = sorted({path.name.removesuffix("_training.jinja") for path in FOLDER.glob("*_training.jinja")} - OF_PICTURES)
SPECIAL = re.compile(r"<[|｜][^<>\n{}]*[|｜]>|<(?:start|end)_of_turn>|<turn\|>|<\|turn>|\[gMASK\]|<sop>|</s>")
ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|end|>", "<|END_OF_TURN_TOKEN|>", "<end_of_turn>", "<turn|>", "<|return|>"),
    *("<｜end▁of▁sentence｜>", "<|endoftext|>", "</s>"),
)
CALL = {"type": "tool", "text": json.dumps({"name": "weather", "arguments": {"city": "Rome"}})}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
OFFER = json.dumps([{"name": "weather", "description": "d", "parameters": PARAMETERS}])
TALKS: dict[str, list[tuple[str, Any]]] = {
    "plain": [("user", "Hi"), ("assistant", "Hello you"), ("user", "Bye"), ("assistant", "Ciao")],
    "system": [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Hello you"),
        ("user", "Bye"),
        ("assistant", "C"),
    ],
    "thoughts": [("user", "Hi"), ("assistant", "<think>\nHm.\n</think>\n\nHello you")],
    "tools": [
        ("system", f"You can call these tools:\n{OFFER}"),
        ("user", "Weather?"),
        ("assistant", [CALL, {"type": "output", "text": "sunny"}, {"type": "text", "text": "It is sunny"}]),
    ],
}
THOUGHTLESS = "leaves out what an answer thinks"  # even of the last turn; TRL's templates write it
REFUSED = {
    ("deepseek_r1_distill", "thoughts"): THOUGHTLESS,
    ("deepseekv3", "thoughts"): THOUGHTLESS,
    ("gemma", "system"): "refuses this conversation",  # by TRL's too
    **{(family, "tools"): "no form for calls" for family in ("deepseekv3", "gemma")},
}
OTHERWISE = {  # a template's own form of the last turn is learned here for each turn; TRL has another for earlier ones
    *(("gptoss", talk) for talk in ("plain", "system")),
    *((phi, talk) for phi in ("phi3", "phi3_5") for talk in ("plain", "system")),
    ("diffusion_gemma", "tools"),  # its prompts do not open a turn behind a result
}


def tokenizer(template: str, specials: set[str]) -> HFTokenizer:
    """Bytes, and the special tokens of a family."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    names = sorted(specials | {"<bos>", "<eos>"})
    made.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in names])
    end = next((name for name in ENDS if name in specials), "<eos>")
    inner = hf_models.library().PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<bos>", eos_token=end)
    inner.chat_template = template
    return HFTokenizer(inner, len(letters) + len(names))


def messages(talk: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in TALKS[talk]]


def learned(made: HFTokenizer, talk: str) -> tuple[list[str], list[str]]:
    """(texts of the rows, what the assistant writes in them)."""
    pieces = render_pieces(made, messages(talk), 10_000, Counts())
    parts: list[str] = []
    for piece in pieces:
        now: list[int] = []
        for token, mine in [*zip(piece.ids, piece.mask), (0, 0)]:
            if mine:
                now.append(token)
            elif now:
                parts.append(made.decode(now))
                now = []
    return [made.decode(piece.ids) for piece in pieces], parts


@pytest.mark.skipif(not FAMILIES, reason="TRL's templates are not in $ASCENDCHAT_TEST_CLIENTS/trl")
@pytest.mark.long(short="test_where_a_turn_has_no_end_what_opens_the_next_one_is_learned_and_ends_answers")
@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("family", FAMILIES or ["none"])
def test_what_is_learned_is_what_trl_learns(family: str, talk: str) -> None:
    own, training = ((FOLDER / f"{family}{ending}.jinja").read_text(encoding="utf-8") for ending in ("", "_training"))
    specials = set(SPECIAL.findall(own + training))
    made, theirs = tokenizer(own, specials), tokenizer(training, specials)
    if (family, talk) in REFUSED:
        with pytest.raises(UserError, match=REFUSED[family, talk]):
            render(made, messages(talk))
        return
    wanted_rows, wanted = learned(theirs, talk)
    rows, found = learned(made, talk)
    assert len(found) == len(wanted)
    if (family, talk) in OTHERWISE:
        return
    for part, theirs_part in zip(found, wanted):
        assert theirs_part.rstrip("\n").endswith(part)
        assert len(theirs_part) - len(part) < 40, "more than what opens a turn"
    if len(rows) == len(wanted_rows) and "<think>" not in "".join(wanted_rows):
        assert rows == wanted_rows
