"""Where `ascendchat data fetch` gets things from: hub APIs, mirrors in order, a local folder, or only the disk."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_server import CHUNK, COMMIT, DATA, FAST, Server, noise, serve

from ascendchat.config import parse
from ascendchat.config.data import DataFetchConfig
from ascendchat.data.fetch import SETS, fetch, folder_of, request, run
from ascendchat.data.fetch.request import fixed_folder
from ascendchat.data.fetch.sources import find_set
from ascendchat.errors import UserError, home


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server that is both hubs."""
    yield from serve(monkeypatch)


def test_a_named_set_comes_from_the_hub_with_its_validation_shard(server: Server) -> None:
    shards = {f"shard_{i:05d}.parquet": noise(i, 1000 + i) for i in range(12)}
    files = {**shards, "shard_06542.parquet": noise(99, 777), "README.md": b"# hi"}
    server.hugging_face("karpathy/climbmix-400b-shuffle", files, page=5)
    folder = fetch("climbmix", shards=3, policy=FAST)
    assert folder == home() / "data" / "climbmix"
    names = ["shard_00000.parquet", "shard_00001.parquet", "shard_00002.parquet", "shard_06542.parquet"]
    assert sorted(p.name for p in folder.glob("*.parquet")) == names
    assert all((folder / n).read_bytes() == files[n] for n in names)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert sorted(manifest["files"]) == names
    assert manifest["source"] == f"hf:karpathy/climbmix-400b-shuffle at {server.url}"
    sent = server.sent()
    fetch("climbmix", shards=4, policy=FAST)  # one more: only that one is fetched
    assert server.sent() == sent + len(files["shard_00003.parquet"])
    assert all(COMMIT in a.path for a in server.asked if "/resolve/" in a.path)


def test_only_the_folder_of_the_set_is_listed(server: Server) -> None:
    files = {"sample/10BT/000_00000.parquet": DATA, "sample/100BT/x.parquet": b"1", "data/y.parquet": b"2"}
    server.hugging_face("HuggingFaceFW/fineweb-edu", files)
    folder = fetch("fineweb-edu", policy=FAST)
    assert (folder / "sample/10BT/000_00000.parquet").read_bytes() == DATA
    assert next(a.path for a in server.asked if "/tree/" in a.path).endswith("/sample/10BT")
    assert fixed_folder("a/b/*.x,a/c/*.x") == ""
    assert fixed_folder("data/*_head_*/x.json") == "data"


def test_patterns_choose_files_of_any_repository(server: Server) -> None:
    server.hugging_face("o/n", {"data/train-0.parquet": DATA, "data/test-0.parquet": b"t", "b c/é.txt": b"odd"})
    folder = fetch("o/n", files="data/train-*,*.txt", policy=FAST)
    assert {p.name for p in folder.rglob("*") if p.is_file()} == {"train-0.parquet", "é.txt", "manifest.json", ".lock"}
    assert (folder / "b c" / "é.txt").read_bytes() == b"odd"
    with pytest.raises(UserError, match=r"has no file that matches \*\.zip"):
        fetch("o/n", files="*.zip", policy=FAST)


def test_a_listing_cannot_write_outside_the_folder(server: Server) -> None:
    server.hugging_face("o/n", {"../../evil.txt": b"x"})
    with pytest.raises(UserError, match="unsafe name"):
        fetch("o/n", policy=FAST)
    assert not (home() / "evil.txt").exists()


def test_the_mirror_is_tried_when_the_hub_cannot_be_reached_and_never_gets_the_token(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.hugging_face("o/n", {"x.bin": DATA})
    monkeypatch.delenv("HF_ENDPOINT")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr(request, "HUGGING_FACE", "http://127.0.0.1:1")  # nobody there
    monkeypatch.setattr(request, "MIRROR", server.url)
    assert (fetch("o/n", policy=FAST) / "x.bin").read_bytes() == DATA
    assert not any("authorization" in a.headers for a in server.asked)
    monkeypatch.setenv("HF_ENDPOINT", server.url)  # chosen by the user: now it may have it
    fetch("o/n", files="x.*", out=home() / "again", policy=FAST)
    assert server.asked[-1].path.startswith("/cdn/")
    assert {a.headers.get("authorization") for a in server.asked if "/tree/" in a.path} == {None, "Bearer hf_secret"}


def test_the_token_does_not_follow_a_redirect_to_another_host(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.hugging_face("o/n", {"x.bin": DATA})
    elsewhere = server.url.replace("127.0.0.1", "localhost")
    server.files[f"/datasets/o/n/resolve/{COMMIT}/x.bin"].always = f"redirect:{elsewhere}/cdn/o/n/x.bin"
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert (fetch("o/n", policy=FAST) / "x.bin").read_bytes() == DATA
    assert all(("authorization" in a.headers) == ("/cdn/" not in a.path) for a in server.asked)


def test_modelscope_is_next_when_the_hub_fails(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    files = {"main/train-00000-of-00001.parquet": DATA, "main/test-00000-of-00001.parquet": b"PAR1", "a.md": b"#"}
    server.modelscope("AI-ModelScope/gsm8k", files)
    folder = fetch("gsm8k", policy=FAST)
    assert (folder / "main/train-00000-of-00001.parquet").read_bytes() == DATA
    assert not (folder / "a.md").exists()
    assert json.loads((folder / "manifest.json").read_text())["source"].startswith("modelscope:AI-ModelScope/gsm8k")
    assert "404" in capsys.readouterr().err


def test_a_download_begun_at_one_source_is_finished_from_another(server: Server) -> None:
    files = {"main/train-00000-of-00001.parquet": DATA}
    server.hugging_face("openai/gsm8k", files)
    server.modelscope("AI-ModelScope/gsm8k", files)
    server.files["/cdn/openai/gsm8k/main/train-00000-of-00001.parquet"].faults = ["", "", "", "403"]
    folder = fetch("gsm8k", workers=1, policy=FAST)
    assert (folder / "main/train-00000-of-00001.parquet").read_bytes() == DATA
    assert server.sent() == len(DATA)  # the same sha256 on both hubs: no byte twice
    assert server.sent("/cdn/openai/gsm8k/main/train-00000-of-00001.parquet") == 3 * CHUNK


def test_when_every_source_fails_the_error_names_each_and_the_way_out(server: Server) -> None:
    with pytest.raises(UserError) as caught:
        fetch("gsm8k", policy=FAST)
    text = str(caught.value)
    for part in ("openai/gsm8k", "AI-ModelScope/gsm8k", "HF_ENDPOINT=https://hf-mirror", "--source DIR", "HTTPS_PROXY"):
        assert part in text


def test_proxies_of_the_environment_are_used(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.add("/x.bin", DATA)  # as a proxy the server is asked for the absolute URL of another host
    monkeypatch.setenv("HTTP_PROXY", server.url)
    folder = fetch("http://data.example/x.bin", policy=FAST)
    assert (folder / "x.bin").read_bytes() == DATA
    assert {a.headers["host"] for a in server.asked} == {"data.example"}


def test_a_proxy_that_needs_a_missing_package_is_explained(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("socksio"):
        pytest.skip("socksio is installed")
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1")
    with pytest.raises(UserError, match="pip install socksio"):
        fetch(server.add("/x.bin", DATA), policy=FAST)


def test_offline_uses_what_is_there_and_says_what_is_missing(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"offline, and .*climbmix.*ascendchat data fetch climbmix"):
        fetch("climbmix", offline=True)
    server.hugging_face("o/n", {"a.bin": DATA, "b.bin": b"2"})
    folder = fetch("o/n", policy=FAST)
    asked = len(server.asked)
    assert fetch("o/n", offline=True) == fetch("o/n", offline=True, files="a.*") == folder
    (folder / "b.bin").unlink()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"1 of 2 files of o/n are missing in .*: b\.bin; .*ascendchat data fetch o/n"):
        fetch("o/n")
    assert len(server.asked) == asked


def test_linked_folders_of_a_local_source_are_copied_and_hidden_ones_are_not(tmp_path: Path) -> None:
    for path in ("there/test.jsonl", "usb/gsm8k/train.jsonl", "usb/gsm8k/.cache/old.jsonl"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"{}")
    (tmp_path / "usb" / "gsm8k" / "sub").symlink_to(tmp_path / "there")
    folder = fetch("gsm8k", source=str(tmp_path / "usb"))
    assert sorted(json.loads((folder / "manifest.json").read_text())["files"]) == ["sub/test.jsonl", "train.jsonl"]
    assert not (folder / "sub").is_symlink(), "copied, so that the set does not change with its origin"


def test_a_link_to_nothing_in_a_local_source_is_named_where_its_file_is_wanted(tmp_path: Path) -> None:
    put = tmp_path / "usb" / "gsm8k"
    put.mkdir(parents=True)
    (put / "test.jsonl").write_bytes(b"{}")
    (put / "README.md").symlink_to(tmp_path / "gone")
    folder = fetch("gsm8k", source=str(tmp_path / "usb"))
    assert sorted(path.name for path in folder.iterdir() if path.suffix == ".jsonl") == ["test.jsonl"]
    with pytest.raises(UserError, match=r"README\.md is a link to nothing"):
        fetch("gsm8k", source=str(tmp_path / "usb"), files="*.md,*.jsonl")


def test_a_local_folder_is_a_source_and_is_verified(tmp_path: Path) -> None:
    usb = tmp_path / "usb"
    for path, content in {"gsm8k/train.jsonl": b"{}", "gsm8k/sub/test.jsonl": b"[]", "mmlu.zip": b"PK1"}.items():
        (usb / path).parent.mkdir(parents=True, exist_ok=True)
        (usb / path).write_bytes(content)
    folder = fetch("gsm8k", source=str(usb), offline=True)
    assert (folder / "train.jsonl").read_bytes() == b"{}"
    assert (folder / "sub" / "test.jsonl").read_bytes() == b"[]"
    assert fetch("gsm8k", offline=True) == folder
    with (folder / "train.jsonl").open("ab") as stream:
        stream.write(b"damage")
    assert (usb / "gsm8k" / "train.jsonl").read_bytes() == b"{}", "the set shares no bytes with its origin"
    fetch("gsm8k", source=str(usb), check=True)  # and from there it is mended
    assert (folder / "train.jsonl").read_bytes() == b"{}"
    assert (fetch("mmlu", source=str(usb)) / "mmlu.zip").read_bytes() == b"PK1"
    with pytest.raises(UserError, match=r"has no files of arc: looked for a folder arc/"):
        fetch("arc", source=str(usb))
    (usb / "ceval.zip").write_bytes(b"not a zip")
    with pytest.raises(UserError, match=r"ceval\.zip is damaged: it is not a whole zip file"):
        fetch("ceval", source=str(usb))
    (usb / "corpus").mkdir()
    (usb / "corpus" / "a.jsonl").write_bytes(b"damaged")
    listed = {"files": {"a.jsonl": {"bytes": 7, "sha256": "0" * 64}}}
    (usb / "corpus" / "manifest.json").write_text(json.dumps(listed))
    with pytest.raises(UserError, match=r"a\.jsonl is damaged: its sha256 is"):
        fetch("corpus", source=str(usb))
    assert not (home() / "data" / "corpus" / "a.jsonl").exists()
    (folder / "manifest.json").rename(tmp_path / "kept.json")
    fetch("gsm8k", source=str(folder))  # a folder copied without its manifest is taken as it is
    assert sorted(json.loads((folder / "manifest.json").read_text())["files"]) == ["sub/test.jsonl", "train.jsonl"]


def test_words_name_sets_repositories_models_and_urls() -> None:
    assert find_set("smol-smoltalk").name == "smoltalk"
    assert find_set("models/Qwen/Qwen3-0.6B").sources[0].model
    assert folder_of("o/n") == home() / "data" / "o--n"
    page = find_set("https://huggingface.co/datasets/o/n/tree/main/data")
    assert (page.name, page.sources[0].hub, page.sources[0].files) == ("o--n", "hf", "data/*")
    assert find_set("https://www.modelscope.cn/datasets/o/n/files").sources[0].where == "o/n"
    assert find_set("https://example.org/x/wiki.jsonl.gz?sig=1").name.startswith("wiki-")
    hubs_of = {source.hub for known in SETS.values() for source in known.sources}
    assert hubs_of == {"hf", "modelscope", "http"}
    for bad in ("climbmux", "../etc", "o/n/x/y", "https://example.org/"):
        with pytest.raises(UserError):
            find_set(bad)
    with pytest.raises(UserError, match="did you mean climbmix"):
        find_set("climbmux")
    with pytest.raises(UserError, match="it is on: hf"):
        fetch("climbmix", source="modelscope")


def test_the_command_lists_names_and_reports_what_it_fetched(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(parse(DataFetchConfig, [])) == 0
    assert "chinese-fineweb-edu" in capsys.readouterr().out
    url = server.add("/a.bin", DATA)
    assert run(parse(DataFetchConfig, [url, "--workers", "2"])) == 0
    assert f"{url}: 1 files, 640.1 KiB, verified, in {home()}" in capsys.readouterr().out
    with pytest.raises(UserError, match="--workers must be at least 1"):
        run(parse(DataFetchConfig, [url, "--workers", "0"]))
