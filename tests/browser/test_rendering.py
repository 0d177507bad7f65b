"""Markdown, code and maths as the page draws them: small texts in, the outline of the elements out. And whether
everybody can read the pages, that of `ascendchat report` too: axe finds nothing serious."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_visit import Visit, visit
from stand_in import WEB, StandIn

from ascendchat.cli import main

pytestmark = pytest.mark.slow

# Elements as tag(children), text as it is; attributes only where they carry meaning.
OUTLINE = """async ([text, cuts]) => {
    const { MarkdownView } = await import('/web/markdown.js');
    const outline = (node) => {
        if (node.nodeType === Node.TEXT_NODE) return node.data;
        if (node.localName === 'math') return 'math:' + node.textContent;
        if (node.className === 'code-head') return node.textContent + ': ';
        const inside = [...node.childNodes].map(outline).join('');
        return ['span', 'div'].includes(node.localName) ? inside : node.localName + '(' + inside + ')';
    };
    const root = document.createElement('div');
    const view = new MarkdownView(root, () => null);
    for (const cut of cuts) view.update(text.slice(0, cut));
    return [...root.childNodes].map(outline).join(' ');
}"""

DRAWN = {
    "plain *em* **strong** ***both*** ~~gone~~": "p(plain em(em) strong(strong) em(strong(both)) del(gone))",
    "**中文**字 *“引号”*字": "p(strong(中文)字 em(“引号”)字)",
    "17*25*3 and snake_case_name and 2 * 3 * 4": "p(17*25*3 and snake_case_name and 2 * 3 * 4)",
    "*a **b* c**": "p(em(a em(em(b) c)))",
    r"\*not\* `a*b*` ``a`b`` `open": "p(*not* code(a*b*) code(a`b) `open)",
    "one\ntwo<br>three &lt;b&gt; &copy;": "p(onebr()twobr()three <b> &copy;)",
    "# Title #\n## Next\n#tag": "h3(Title) h4(Next) p(#tag)",
    "- a\n- b\n  - c\n    more\n\n1. x\n2. y": "ul(li(a)li(bul(li(cbr()more)))) ol(li(x)li(y))",
    "1. a\n  - nested\n2. b": "ol(li(aul(li(nested)))li(b))",
    "- a\n\n  second\n- b": "ul(li(p(a)p(second))li(p(b)))",
    "- [ ] to do\n- [x] done": "ul(li(☐ to do)li(☑ done))",
    "> quote\n> > inner\n\nafter": "blockquote(p(quote)blockquote(p(inner))) p(after)",
    "text\n---\n***": "p(text) hr() hr()",
    "| a | b |\n|:-|-:|\n| 1 | x\\|y |\n| 2 |\nafter": (
        "table(thead(tr(th(a)th(b)))tbody(tr(td(1)td(x|y))tr(td(2)td()))) p(after)"
    ),
    "a | b\nno table": "p(a | bbr()no table)",
    "```py\nx = 1\n\n# y\n```\nafter": "py: pre(code(x = 1\n\n# y)) p(after)",
    "~~~\n```\n~~~": ": pre(code(```))",
    "- a\n  ```\n  code\n  ```\n- b": "ul(li(a: pre(code(code)))li(b))",
    "$x^2$ costs $5 and $10": "p(math:x2 costs $5 and $10)",
    r"\(a_1\) and \[b\]": "p(math:a1 and math:b)",
    "$$\nE = mc^2\n$$\nafter": "math:E=mc2 p(after)",
    r"\begin{align}a &= b \\ c &= d\end{align}": "math:a=bc=d",
    r"$\unknown{x}$": r"p(code(\unknown{x}))",
    "[a *b*](https://x.example 'title') [no](nowhere)": "p(a(a em(b)) [no](nowhere))",
}


@pytest.fixture(scope="module")
def page(chromium: Any) -> Iterator[Any]:
    """The chat page in a browser, in front of a server that stands in for ours."""
    with StandIn() as server, visit(chromium, server.url) as seen:
        yield seen.page


@pytest.mark.parametrize("text", DRAWN)
def test_markdown_is_drawn_the_same_whole_and_letter_by_letter(page: Any, text: str) -> None:
    assert page.evaluate(OUTLINE, [text, [len(text)]]) == DRAWN[text]
    assert page.evaluate(OUTLINE, [text, list(range(len(text) + 1))]) == DRAWN[text]


def test_a_finished_block_is_never_drawn_again(page: Any) -> None:
    kept = """async () => {
        const { MarkdownView } = await import('/web/markdown.js');
        const root = document.createElement('div');
        const view = new MarkdownView(root, () => null);
        let text = 'first\\n\\n```py\\n';
        view.update(text);
        const [paragraph, code] = root.childNodes;
        for (let i = 0; i < 50; i += 1) view.update(text += `line ${i}\\n`);
        return [root.childNodes[0] === paragraph, root.childNodes[1] === code, root.childNodes.length];
    }"""
    assert page.evaluate(kept) == [True, True, 2]


FORMULAS = {
    r"\frac{a}{b}": "<mfrac><mi>a</mi><mi>b</mi></mfrac>",
    r"\sqrt[3]{x}": "<mroot><mi>x</mi><mn>3</mn></mroot>",
    r"x_i^{2}": "<msubsup><mi>x</mi><mi>i</mi><mn>2</mn></msubsup>",
    r"x^10": "<msup><mi>x</mi><mn>1</mn></msup><mn>0</mn>",
    r"\alpha \leq \infty": '<mi>α</mi><mo stretchy="false">≤</mo><mi>∞</mi>',
    r"\mathbb{R}": "<mi>ℝ</mi>",
    r"\text{if } x": "<mtext>if&nbsp;</mtext><mi>x</mi>",
}


@pytest.mark.parametrize("formula", FORMULAS)
def test_formulas_become_mathml(page: Any, formula: str) -> None:
    drawn = "async (text) => (await import('/web/maths.js')).renderMaths(text, false).innerHTML"
    found = page.evaluate(drawn, formula).removeprefix("<mrow>").removesuffix("</mrow>")
    assert found == FORMULAS[formula]


def test_sums_stand_under_their_limits_in_a_formula_of_its_own(page: Any) -> None:
    tags = """async (display) => {
        const { renderMaths } = await import('/web/maths.js');
        return Boolean(renderMaths('\\\\sum_{i=1}^n i', display).querySelector('munderover'));
    }"""
    assert page.evaluate(tags, True) is True
    assert page.evaluate(tags, False) is False


CODE = {
    ("python", "def f(x):  # note\n    return 'a' + 1"): ["k:def", "n:f", "c:# note", "k:return", "s:'a'", "#:1"],
    ("js", "const a = `x${1}`; // b"): ["k:const", "s:`x${1}`", "c:// b"],
    ("json", '{"a": "b", "c": null}'): ['n:"a"', 's:"b"', 'n:"c"', "k:null"],
    ("bash", "echo $HOME --all # x"): ["k:echo", "n:$HOME", "n:--all", "c:# x"],
    ("cpp", "#include <a>\nint x = 0xFF;"): ["c:#include <a>", "k:int", "#:0xFF"],
    ("sql", "SELECT 'it''s' -- x"): ["k:SELECT", "s:'it''s'", "c:-- x"],
    ("html", '<a href="x">t</a>'): ["k:<a", "n:href", 's:"x"', "k:</a"],
    ("unknown", "def f"): [],
    ("__proto__", "def f"): [],
}


@pytest.mark.parametrize(("language", "text"), CODE)
def test_code_is_coloured(page: Any, language: str, text: str) -> None:
    spans = """async ([text, language]) => {
        const { fillCode } = await import('/web/highlight.js');
        const code = document.createElement('code');
        fillCode(code, text, language);
        if (code.textContent !== text) throw new Error('the text has changed');
        const short = { keyword: 'k', name: 'n', comment: 'c', string: 's', number: '#' };
        return [...code.children].map((span) => short[span.className.slice(3)] + ':' + span.textContent);
    }"""
    assert page.evaluate(spans, [text, language]) == CODE[language, text]


def test_every_word_is_there_in_both_languages() -> None:
    english, chinese = (WEB / "strings.js").read_text(encoding="utf-8").split("  zh: {")
    names = [re.findall(r"(?:^|[ {,])(\w+): \"", part) for part in (english, chinese)]
    assert names[0] == names[1]
    assert len(names[0]) > 50


def test_axe_finds_nothing_serious(chromium: Any, server: StandIn) -> None:
    axe = pytest.importorskip("axe_playwright_python.base", reason="axe is not installed: pip install -e '.[dev]'")
    found = (
        "async () => (await axe.run()).violations.map((v) => [v.impact, v.id, v.nodes.map((n) => n.html).slice(0, 3)])"
    )

    def check(chat: Visit, where: str) -> None:
        chat.page.evaluate(axe.AXE_SCRIPT)
        bad = [
            violation for violation in chat.page.evaluate(found) if violation[0] in ("serious", "critical", "moderate")
        ]
        assert not bad, (where, bad)

    for scheme in ("light", "dark"):
        # axe itself needs what the policy of the page forbids.
        with visit(chromium, server.url, color_scheme=scheme, bypass_csp=True, reduced_motion="reduce") as chat:
            server.say(
                "# T\n\n*a* `b` [c](https://c.example)\n\n- d\n\n> e\n\n| f | g |\n|---|---|\n| 1 | 2 |\n\n",
                "```python\ndef f(): return 'x' + 1  # y\n```\n\n$$x = \\frac{1}{2}$$",
                {"ascendchat": {"tool": {"kind": "tool", "text": "1+1"}}},
                finish="length",
            )
            chat.exchange("Show everything")
            server.refuse(503, {"Retry-After": "7"})
            chat.expected = ("503",)
            chat.exchange("Again")
            chat.page.get_by_role("button", name="Conversation menu").click()
            check(chat, f"{scheme}, a conversation and its menu")
            if scheme == "light":
                chat.page.keyboard.press("Escape")
                chat.page.get_by_role("button", name="Settings").click()
                check(chat, "settings")
                chat.page.keyboard.press("Escape")
                chat.page.get_by_role("button", name="New chat").click()
                check(chat, "empty")


def test_the_page_of_a_report_is_whole_by_itself_and_can_be_read_by_everybody(
    chromium: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    axe = pytest.importorskip("axe_playwright_python.base", reason="axe is not installed: pip install -e '.[dev]'")
    monkeypatch.setenv("ASCENDCHAT_HOME", str(tmp_path))
    folder = tmp_path / "runs" / "demo" / "base"
    folder.mkdir(parents=True)
    rows = [{"step": step, "time": 1.0 * step, "loss": 5 / step, "lr_scale": 1.0} for step in range(1, 40)]
    rows.append({"step": 40, "time": 40.0, "samples": ["The capital of France is Paris.", "你好"]})  # type: ignore[dict-item]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text("depth: 4\n")
    assert main(["report", "--run", "demo"]) == 0
    page = chromium.new_page(viewport={"width": 1240, "height": 900})
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((tmp_path / "runs" / "demo" / "report.html").as_uri())
    assert page.locator("figure img").evaluate("image => image.complete && image.naturalWidth") > 500
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    page.evaluate(axe.AXE_SCRIPT)
    found = page.evaluate("async () => (await axe.run()).violations.map((v) => [v.impact, v.id, v.nodes[0].html])")
    page.close()
    assert [entry for entry in found if entry[0] in ("serious", "critical")] == []
