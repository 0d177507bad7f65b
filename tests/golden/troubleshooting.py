"""docs/en/troubleshooting.md and docs/zh/troubleshooting.md, from the rules of `ascendchat explain`.

python tests/golden/troubleshooting.py     writes both pages; tests/test_site.py notices when they are stale
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

HEAD = {
    "en": """# Troubleshooting

Every error and symptom that `ascendchat explain` knows, made from its own data. Paste the log instead of searching, if
you can: it finds the line, and names the fault before what follows from it.

```bash
ascendchat explain train.log          # or a run folder, or - for standard input
ascendchat explain "training hangs"   # what you see, in words
```
""",
    "zh": """# 故障排查

`ascendchat explain` 认识的全部报错和现象，由它自己的数据生成。
可以的话直接把日志交给它：它会找到那一行，先说原因，再说由它引起的其他报错。

```bash
ascendchat explain train.log          # 也可以是运行目录，或 - 表示标准输入
ascendchat explain "training hangs"   # 用文字描述看到的现象
```
""",
}
TOPICS = {
    "memory": ("Memory", "内存和显存"),
    "kernel": ("Operators and kernels", "算子"),
    "cuda": ("CUDA", "CUDA"),
    "torch_npu": ("torch_npu", "torch_npu"),
    "import": ("Imports", "导入"),
    "driver": ("Driver and cards", "驱动和卡"),
    "hccl": ("HCCL", "HCCL"),
    "ranks": ("Ranks and launchers", "进程和启动"),
    "model": ("Model and tokenizer", "模型和分词器"),
    "training": ("Training", "训练"),
    "speed": ("Speed", "速度"),
    "hub": ("Downloads", "下载"),
    "host": ("Host", "主机"),
    "own": ("ascendchat itself", "ascendchat 自己"),
}
WORDS = {
    "en": {"cause": "Cause:", "check": "Check:", "run": "Run:", "seen": "Also called:"},
    "zh": {"cause": "原因：", "check": "检查：", "run": "执行：", "seen": "也叫："},
}


def plain(text: str) -> str:
    """A text of a rule in Markdown: holes shown as names, and nothing taken for a tag or emphasis."""
    text = re.sub(r"\{(\w+)\}", r"\1", text)
    return text.replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


def page(lang: str) -> str:
    """The whole page in one language."""
    from ascendchat.doctor.explain_rules import FOLDER, read_rules

    words, parts, topic = WORDS[lang], [HEAD[lang]], ""
    for rule in read_rules(FOLDER):
        if rule.code:  # a status code that is only decoded
            continue
        found = re.sub(r"^\d+_", "", Path(rule.where.partition(".yaml")[0]).name)
        if found != topic:
            topic = found
            parts.append(f"## {TOPICS[topic][lang == 'zh']}\n")
        parts.append(f"### {plain(rule.title[lang])}\n")
        parts.append(f"`{rule.id}` **{words['cause']}** {plain(rule.cause[lang])}\n")
        checks = [f"- {plain(check[lang])}" for check in rule.check]
        if checks:
            parts.append(f"**{words['check']}**\n\n" + "\n".join(checks) + "\n")
        if rule.commands:
            parts.append(f"**{words['run']}**\n\n```text\n" + "\n".join(rule.commands) + "\n```\n")
        if rule.symptoms[lang]:
            names = ("、" if lang == "zh" else ", ").join(map(plain, rule.symptoms[lang]))
            parts.append(f"{words['seen']} {names}\n")
    return "\n".join(parts)


def target(lang: str) -> Path:
    return ROOT / "docs" / lang / "troubleshooting.md"


if __name__ == "__main__":
    for lang in HEAD:
        target(lang).write_text(page(lang), encoding="utf-8")
        print(f"docs/{lang}/troubleshooting.md: {page(lang).count('### ')} entries")
