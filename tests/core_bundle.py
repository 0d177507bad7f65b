"""A small CORE bundle of all three types of tasks, for tests."""

from __future__ import annotations

import json
import lzma
import random
from pathlib import Path

WORDS = "the cat dog sat ran red blue on mat tree and saw one two big old".split()


def sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def write_bundle(folder: Path, rows: int = 16) -> Path:
    """Five tasks of all three types; `gone` has no file, `part` has 12 of 40 rows, `choice` is packed."""
    rng = random.Random(0)
    data = folder / "eval_data" / "words"
    data.mkdir(parents=True)
    choice = [
        {
            "query": f"{sentence(rng, 9)}.\nWhich?",
            "choices": [sentence(rng, rng.randint(1, 4)) for _ in range(4)],
            "gold": rng.randrange(4),
        }
        for _ in range(rows)
    ]
    choice[3]["choices"][2] = choice[3]["choices"][0]  # equal options: the first must win
    choice[4]["choices"][1] = choice[4]["choices"][0] + " and the cat"  # one begins like another
    schema = [
        {
            "context_options": [sentence(rng, 5), sentence(rng, 7)],
            "continuation": sentence(rng, 3),
            "gold": rng.randrange(2),
        }
        for _ in range(rows)
    ]
    lm = [{"context": f" {sentence(rng, 12)}  ", "continuation": rng.choice(WORDS)} for _ in range(rows)]
    files = {"choice.jsonl.xz": choice, "schema.jsonl": schema, "lm.jsonl": lm, "part.subset12.jsonl": lm[:12]}
    for name, content in files.items():
        text = "".join(json.dumps(row) + "\n" for row in content).encode()
        (data / name).write_bytes(lzma.compress(text) if name.endswith(".xz") else text)
    tasks = [
        ("choice", "multiple_choice", 6, "\\nAnswer: ", rows, 25),
        ("schema", "schema", 2, " ", rows, 50),
        ("lm", "language_modeling", 2, " ", rows, 0),
        ("part", "language_modeling", 0, " ", 40, 0),
        ("gone", "schema", 0, " ", 9, 50),
    ]
    yaml = "icl_tasks:\n" + "".join(
        f"- {{label: {label}, dataset_uri: words/{label}.jsonl, num_fewshot: [{shots}], icl_task_type: {kind}, "
        f'continuation_delimiter: "{between}"}}\n'
        for label, kind, shots, between, _, _ in tasks
    )
    (folder / "core.yaml").write_text(yaml)
    lines = [f"{label},x,{kind},{shots},{count},{chance},,words" for label, kind, shots, _, count, chance in tasks]
    header = "Eval Task,Task Category,Task Type,#shots,#datapoints,Random baseline,Centered Metric?,Description"
    (folder / "eval_meta_data.csv").write_text("\n".join([header, *lines]) + "\n")
    return folder
