"""Fills the lists of exceptions in tests/test_architecture.py: PYTHONPATH=. python lab/house_lists.py CHECKOUT"""

from __future__ import annotations

import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Asked:
    """Equal to everything, and keeps what it was compared with."""

    value: Any = None

    def __eq__(self, other: object) -> bool:
        self.value = other
        return True

    __hash__ = None  # type: ignore[assignment]


def found_by(rules: Any, test: Callable[[], None], name: str) -> Any:
    asked = Asked()
    setattr(rules, name, asked)
    test()
    return asked.value


def literal(value: Any) -> str:
    if isinstance(value, dict):
        return repr(dict(sorted(value.items())))
    if len(value) <= 8:
        return "{" + ", ".join(f'"{name}"' for name in sorted(value)) + "}"
    lines = [f'"{line} "' for line in textwrap.wrap(" ".join(sorted(value)), 105)]
    return "set(\n    (" + "\n     ".join(lines) + ").split())"


def main(root: Path) -> None:
    sys.path.insert(0, str(root / "tests"))
    import test_architecture as rules

    lists = {
        "NAMES_HARDWARE": rules.test_hardware_is_named_only_where_a_chip_is_described,
        "CODE_IN_INIT": rules.test_a_package_opens_with_a_docstring_and_re_exports_alone,
        "FOREIGN_PRIVATE": rules.test_what_is_private_is_used_in_its_own_file,
    }
    values = {name: found_by(rules, test, name) for name, test in lists.items()}
    classes = rules.classes_and_users()
    count = Counter(name for (name, _), used in classes.items() if used)
    values["SAME_NAME"] = {name for name, number in count.items() if number > 1}
    alone = sorted(f"{module}.{name}" for (name, module), used in classes.items() if not used and name[0] != "_")
    path = root / "tests" / "test_architecture.py"
    text = path.read_text()
    for name, value in values.items():
        start, _, rest = text.partition(f"\n{name}: ")
        kind, _, rest = rest.partition(" = ")
        text = f"{start}\n{name}: {kind} = {literal(value)}\n{rest.partition(chr(10))[2]}"
    block = textwrap.fill(" ".join(alone), 120, break_on_hyphens=False, break_long_words=False)
    text = re.sub(
        r'(PUBLIC_ALONE: str = """\n).*?(""")', lambda found: f"{found[1]}{block}\n{found[2]}", text, flags=re.S
    )
    path.write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
