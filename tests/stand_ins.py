"""Stand-ins for everything that the shipped recipes fetch or read, small, in the layout and under the names in which it
is published, for tests of recipes without a network.

folder = write_stand_ins(tmp_path)      # for `data fetch --source`, and for --sets
"""

from __future__ import annotations

import gzip
import json
import lzma
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import core_bundle
import hf_models
import pyarrow
import pyarrow.parquet

MODELS = "Qwen2.5-0.5B-Instruct", "Qwen2.5-1.5B-Instruct"
SUM = "Ada has {a} pens and buys {b}. How many?"
CODE = {
    "task_id": "HumanEval/0",
    "prompt": "def double(x):\n",
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(f):\n    assert f(2) == 4\n",
    "entry_point": "double",
}


class StandIns:
    """Writes files below a folder; texts are drawn at random, the same each time."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rng = folder, random.Random(0)

    def place(self, name: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def table(self, name: str, rows: list[dict[str, Any]]) -> None:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), self.place(name))

    def lines(self, name: str, rows: list[Any]) -> None:
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        pack: Callable[[bytes], bytes] = {".xz": lzma.compress, ".gz": gzip.compress}.get(Path(name).suffix, bytes)
        self.place(name).write_bytes(pack(text))

    def archive(self, name: str, files: dict[str, str]) -> None:
        with zipfile.ZipFile(self.place(name), "w") as packed:
            for inside, text in files.items():
                packed.writestr(inside, text)

    def texts(self, count: int, words: str = "red blue tree river stone bird sings under over the") -> list[str]:
        drawn = words.split()
        return [" ".join(self.rng.choices(drawn, k=self.rng.randint(5, 40))) + "." for _ in range(count)]

    def talks(self, count: int) -> list[list[dict[str, str]]]:
        asked, said = self.texts(count), self.texts(count)
        return [
            [{"role": "user", "content": a}, {"role": "assistant", "content": b}]
            for a, b in zip(asked, said, strict=True)
        ]

    def chinese(self, count: int) -> list[str]:
        return self.texts(count, "山 水 很大。 树 河 石头 鸟 唱歌 在 上面")

    def sums(self, count: int) -> list[dict[str, str]]:
        drawn = [(self.rng.randint(1, 9), self.rng.randint(1, 9)) for _ in range(count)]
        return [
            {"question": SUM.format(a=a, b=b), "answer": f"She has <<{a}+{b}={a + b}>>{a + b}.\n#### {a + b}"}
            for a, b in drawn
        ]

    def choices(self, count: int) -> list[dict[str, Any]]:
        return [
            {"question": text, "subject": "words", "choices": ["red", "blue", "tree", "river"], "answer": number % 4}
            for number, text in enumerate(self.texts(count))
        ]


def write_text(make: StandIns) -> None:
    """For pretraining."""
    for name in ("shard_00000", "shard_00001", "shard_06542"):
        make.table(f"climbmix-400b-shuffle/{name}.parquet", [{"text": text} for text in make.texts(150)])
    make.lines("SkyPile-150B/data/2020-40_zh_head_0000.jsonl", [{"text": text} for text in make.chinese(150)])
    for language, texts in (("en", make.texts), ("zh", make.chinese)):
        for part in ("train_00", "train_01", "train_02", "train_03", "val"):
            rows = [{"id": str(at), "title": "a", "text": text} for at, text in enumerate(texts(60))]
            make.lines(f"pretrain/{language}/wiki_{part}.jsonl.xz", rows)


def write_talks(make: StandIns) -> None:
    """Conversations."""
    rows = [{"messages": talk, "source": "words"} for talk in make.talks(60)]
    make.table("smol-smoltalk/data/train-00000-of-00001.parquet", rows)
    make.table("smol-smoltalk/data/test-00000-of-00001.parquet", rows[:5])
    make.lines("identity_conversations.jsonl", make.talks(40))
    names = {"user": "human", "assistant": "gpt"}
    turned = [[{"from": names[m["role"]], "value": m["content"]} for m in talk] for talk in make.talks(60)]
    make.table("smoltalk-chinese/smoltalk-chinese.parquet", [{"conversations": talk} for talk in turned])
    rows = [
        {"instruction": ask, "input": "", "output": say}
        for ask, say in zip(make.chinese(60), make.chinese(60), strict=True)
    ]
    make.place("alpaca-zh/alpaca_gpt4_data_zh.json").write_text(json.dumps(rows, ensure_ascii=False, indent=2))
    own = [{f"{la}_{part}": "red tree" for la in ("en", "zh") for part in ("instruction", "input", "output")}] * 30
    make.lines("sft/alpaca_en_zh_52k.jsonl.xz", own)
    make.lines("sft/mc_train/arc_easy.jsonl.xz", [{**row, "gold": row["answer"]} for row in make.choices(30)])
    make.lines("sft/dolly_open_qa.jsonl.xz", [{"text": "### Human: Why? ### Assistant: So."}] * 30)
    make.lines("sft/oasst1_en_val_threads.jsonl.xz", [{"messages": talk} for talk in make.talks(30)])
    code = json.dumps([{"instruction": "Write.", "input": "", "response": "x = 1"}] * 30, indent=4).encode()
    make.place("sft/gpteacher_codegen.json.xz").write_bytes(lzma.compress(code))
    cells = "".join(f"Is {text}\tno\tIt is not so.\n" for text in make.texts(30))
    make.place("sft/flan_cot/creak_train.tsv.xz").parent.mkdir(parents=True, exist_ok=True)
    make.place("sft/flan_cot/creak_train.tsv.xz").write_bytes(lzma.compress(cells.encode()))


def write_examinations(make: StandIns) -> None:
    """As the hubs have them, and once more below eval/, as a folder for --sets has them."""
    for split, count in (("auxiliary_train", 40), ("test", 6), ("dev", 5), ("validation", 5)):
        make.table(f"mmlu/all/{split}-00000-of-00001.parquet", make.choices(count))
    for split, count in (("train", 40), ("test", 6)):
        make.table(f"gsm8k/main/{split}-00000-of-00001.parquet", make.sums(count))
        make.lines(f"eval/gsm8k/{split}.jsonl.xz", make.sums(count))
    for level in ("ARC-Easy", "ARC-Challenge"):
        for split in ("train", "validation", "test"):
            rows = [
                {"id": "a", "question": row["question"], "answerKey": "ABCD"[row["answer"]]}
                | {"choices": {"text": row["choices"], "label": list("ABCD")}}
                for row in make.choices(6)
            ]
            make.table(f"ai2_arc/{level}/{split}-00000-of-00001.parquet", rows)
    make.table("openai_humaneval/openai_humaneval/test-00000-of-00001.parquet", [CODE] * 2)
    make.lines("eval/HumanEval.jsonl.gz", [CODE] * 2)
    for level in ("arc_easy", "arc_challenge"):
        rows = [
            {"query": f"Question: {row['question']}", "choices": row["choices"], "gold": row["answer"]}
            for row in make.choices(6)
        ]
        make.lines(f"eval/eval_bundle/eval_data/world_knowledge/{level}.jsonl", rows)
    bundle = core_bundle.write_bundle(make.place("eval/eval_bundle/core.yaml").parent)
    files = {f"eval_bundle/{path.relative_to(bundle)}": path for path in bundle.rglob("*") if path.is_file()}
    with zipfile.ZipFile(make.place("eval_bundle.zip"), "w") as packed:
        for inside, path in files.items():
            packed.write(path, inside)
    row = "谁?,甲,乙,丙,丁,A\n"
    ceval = {f"{s}/law_{s}.csv": "id,question,A,B,C,D,answer\n" + f"0,{row}" * 4 for s in ("dev", "val", "test")}
    cmmlu = {f"{s}/law.csv": ",Question,A,B,C,D,Answer\n" + f"0,{row}" * 4 for s in ("dev", "test")}
    mmlu = {f"data/{s}/law_{s}.csv": "Who?,he,she,it,they,B\n" * 4 for s in ("dev", "val", "test", "auxiliary_train")}
    for name, files_of in (("ceval-exam/ceval-exam.zip", ceval), ("cmmlu/cmmlu_v1_0_1.zip", cmmlu)):
        make.archive(name, files_of)
    for name, files_of in (("ceval", ceval), ("cmmlu", cmmlu), ("mmlu", mmlu)):
        make.archive(f"eval/{name}.zip", files_of)


def write_stand_ins(folder: Path, models: bool = False) -> Path:
    """All of it; with `models` the Hugging Face models too."""
    make = StandIns(folder)
    for write in (write_text, write_talks, write_examinations):
        write(make)
    for name in MODELS if models else ():
        hf_models.save(make.place(f"{name}/config.json").parent)
    return folder
