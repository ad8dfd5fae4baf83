import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from maglev.data.sources import iterate_documents, open_source, resolve_source
from maglev.errors import RequestError, WorkError


def refusal(source: Path | str, column: str = "text") -> str:
    with pytest.raises(RequestError) as caught:
        list(iterate_documents(str(source), column))
    assert str(source) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_lines(path: Path, records: list[Any]) -> Path:
    content = "".join(json.dumps(record) + "\n" for record in records)
    path.write_bytes(gzip.compress(content.encode()) if path.suffix == ".gz" else content.encode())
    return path


def test_text_file_is_one_document_read_exactly(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("one\r\n\rtwo 😀\n\n".encode())
    assert list(iterate_documents(str(path))) == ["one\r\n\rtwo 😀\n\n"]
    path.write_bytes(b"\xef\xbb\xbfwith a byte order mark")
    assert list(iterate_documents(str(path))) == ["with a byte order mark"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "A.JSONL"])
def test_json_lines(tmp_path: Path, name: str) -> None:
    records = [{"text": "one\u2028still one"}, {"text": ""}, {"id": 3, "text": "two\n"}, {"text": None}]
    path = write_lines(tmp_path / name, records)
    assert list(iterate_documents(str(path))) == ["one\u2028still one", "two\n"]


def test_json_lines_skip_blank_lines_and_take_another_column(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "one"}\n\n  \n{"body": "two"}')
    assert list(iterate_documents(str(path), "body")) == ["one", "two"]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_over_several_row_groups(tmp_path: Path, kind: pa.DataType) -> None:
    path = tmp_path / "a.parquet"
    texts = [f"document {number}" for number in range(700)]
    table = pa.table({"id": pa.array(range(703)), "text": pa.array([*texts, "", None, "last"]).cast(kind)})
    pq.write_table(table, path, row_group_size=300)
    assert list(iterate_documents(str(path))) == [*texts, "last"]


def test_folder_is_read_recursively_in_order_without_hidden_or_unknown_files(tmp_path: Path) -> None:
    for name in ("b/2.txt", "a/3.txt", "1.txt", ".hidden.txt", ".git/x.txt", "notes.md", "b/.c/4.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(name)
    (tmp_path / "b" / "empty.txt").touch()
    write_lines(tmp_path / "c.jsonl", [{"text": "lines"}])
    assert list(iterate_documents(str(tmp_path))) == ["1.txt", "a/3.txt", "b/2.txt", "lines"]
    names = [str(path.relative_to(tmp_path)) for path in resolve_source(str(tmp_path))]
    assert names == ["1.txt", "a/3.txt", "b/2.txt", "b/empty.txt", "c.jsonl"]


def test_consumed_bytes_grow_to_the_size_on_disk(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["one", "two"]}), tmp_path / "a.parquet")
    write_lines(tmp_path / "b.jsonl.gz", [{"text": "three"}, {"text": "four"}])
    write_lines(tmp_path / "c.jsonl", [{"text": "five"}])
    (tmp_path / "d.txt").write_text("six")
    source = open_source(str(tmp_path))
    consumed = [done for _, done in source.read()]
    assert consumed == sorted(consumed)
    assert consumed[-1] == source.size == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_missing_path(tmp_path: Path) -> None:
    assert "no such file or folder" in refusal(tmp_path / "absent.txt")
    assert "no such file or folder" in refusal("absent/file.parquet")


def test_unknown_ending(tmp_path: Path) -> None:
    path = tmp_path / "a.docx"
    path.write_text("x")
    assert ".parquet" in refusal(path)


def test_folder_without_readable_file(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("x")
    message = refusal(tmp_path)
    assert "no readable file" in message and ".jsonl.gz" in message


def test_empty_sources(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.touch()
    assert "no text in it" in refusal(path)
    assert "no text in it" in refusal(tmp_path)
    assert "no text in it" in refusal(write_lines(tmp_path / "a.jsonl", [{"text": ""}]))
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "a.parquet")
    assert "no text in it" in refusal(tmp_path / "a.parquet")


def test_binary_text_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"abc\0def")
    assert "NUL byte at offset 3" in refusal(path)
    path.write_bytes(b"abcd\xff\xfe")
    message = refusal(path)
    assert "invalid UTF-8 at offset 4" in message and "convert it to UTF-8" in message


def test_bad_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 this is none")
    assert "not a readable parquet file" in refusal(path)
    path.write_bytes(b"")
    assert "not a readable parquet file" in refusal(path)
    pq.write_table(pa.table({"text": [f"some text {number}" for number in range(2000)]}), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "not a readable parquet file" in refusal(path)
    path.write_bytes(whole[:20] + b"\xff" * 200 + whole[220:])
    assert "not a readable parquet file" in refusal(path)


def test_parquet_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"content": ["x"], "id": [1]}), path)
    message = refusal(path)
    assert "no column 'text'" in message and "'content', 'id'" in message
    assert "int64, not text" in refusal(path, "id")
    assert list(iterate_documents(str(path), "content")) == ["x"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{broken", "not JSON"),
        ("[1, 2]", "not a JSON object"),
        ('{"body": "x"}', "'body'"),
        ('{"text": 5}', "int, not text"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_bad_json_line_is_named(tmp_path: Path, line: str, expected: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n\n' + line + "\n")
    message = refusal(path)
    assert "line 3" in message and expected in message


def test_json_lines_that_are_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "\xff"}\n')
    assert "line 1: not JSON" in refusal(path)


def test_bad_gzip(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(b"not gzip at all")
    assert "damaged gzip" in refusal(path)
    write_lines(path, [{"text": f"text {number}"} for number in range(5000)])
    path.write_bytes(path.read_bytes()[:-30])
    assert "damaged gzip" in refusal(path)


def test_hub_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    path = write_lines(tmp_path / "a.jsonl", [{"text": "one"}, {"text": ""}, {"text": "two"}])
    original = datasets.load_dataset
    asked = []

    def local(name: str, config: str | None, **options: Any) -> Any:
        asked.append((name, config))
        return original("json", data_files=str(path), cache_dir=str(tmp_path / "cache"), **options)

    monkeypatch.setattr(datasets, "load_dataset", local)
    for source in ("owner/name", "owner/name:config", "hf://datasets/owner/name"):
        assert list(iterate_documents(source)) == ["one", "two"]
        assert resolve_source(source) == []
        assert open_source(source).size is None
    assert asked == [("owner/name", None), ("owner/name", "config"), ("owner/name", None)]
    assert "only 'text'" in refusal("owner/name", "body")


def test_hub_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def absent(*arguments: Any, **options: Any) -> Any:
        raise FileNotFoundError("no such data set\nsecond line")

    monkeypatch.setattr(datasets, "load_dataset", absent)
    message = refusal("owner/name:config")
    assert "no such file or folder" in message and "no such data set" in message

    def broken(*arguments: Any, **options: Any) -> Any:
        yield {"text": "one"}
        raise ConnectionError("reset")

    monkeypatch.setattr(datasets, "load_dataset", broken)
    with pytest.raises(WorkError, match=r"owner/name.*broke off.*reset"):
        list(iterate_documents("owner/name"))


def test_hub_without_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    message = refusal("owner/name")
    assert "extra 'hub'" in message and "no such file or folder" in message
