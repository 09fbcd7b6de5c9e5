"""Length specs: what they draw, that a seed fixes it, and what they say when they are wrong."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from jfabench.operators.lengths import MAX_ROWS, LengthsSpec, draw, lengths_hash

SPEC: TypeAdapter[Any] = TypeAdapter(LengthsSpec)
GENERATORS = [
    {"kind": "fill", "max_len": 1024, "fill": 0.5},
    {"kind": "constant", "length": 77},
    {"kind": "lognormal", "median": 200, "sigma": 1.0, "max_len": 1024},
    {"kind": "lognormal", "mean": 200, "sigma": 1.0, "max_len": 1024},
    {"kind": "zipf", "exponent": 1.1, "max_len": 1024},
]


def parse(**spec: Any) -> Any:
    return SPEC.validate_python(spec)


def complaint(**spec: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        parse(**spec)
    return str(caught.value)


@given(st.integers(1, 5000), st.floats(0.001, 1), st.integers(0, 2**32))
def test_fill_is_the_published_range(max_len: int, fill: float, seed: int) -> None:
    lengths = draw(parse(kind="fill", max_len=max_len, fill=fill), 64, seed)
    if fill == 1:
        low, high = max_len, max_len
    elif fill >= 0.5:
        low = max(1, int((2 * fill - 1) * max_len))
        high = max(low, max_len - 1)
    else:
        low, high = 1, max(2, int(2 * fill * max_len)) - 1
    assert lengths.dtype == np.int64
    assert lengths.shape == (64,)
    assert low <= lengths.min()
    assert lengths.max() <= high


@pytest.mark.parametrize(("fill", "low", "high"), [(0.1, 1, 203), (0.5, 1, 1023), (0.9, 819, 1023), (1.0, 1024, 1024)])
def test_fill_reaches_both_ends(fill: float, low: int, high: int) -> None:
    lengths = draw(parse(kind="fill", max_len=1024, fill=fill), 100_000, 0)
    assert (lengths.min(), lengths.max()) == (low, high)


@pytest.mark.parametrize("spec", GENERATORS)
def test_seed_and_stream_fix_the_draw(spec: dict[str, Any]) -> None:
    parsed = parse(**spec)
    first = draw(parsed, 500, 7)
    assert (draw(parsed, 500, 7) == first).all()
    if spec["kind"] != "constant":
        assert (draw(parsed, 500, 8) != first).any()
        assert (draw(parsed, 500, 7, stream=1) != first).any()


@pytest.mark.parametrize("spec", GENERATORS)
@given(empty=st.floats(0, 1), batch=st.integers(1, 200))
def test_empty_share_is_exact(spec: dict[str, Any], empty: float, batch: int) -> None:
    lengths = draw(parse(**spec, empty=empty), batch, 3)
    assert (lengths == 0).sum() == round(empty * batch)
    assert lengths.max(initial=0) <= 1024


def test_lognormal_has_its_median_and_mean() -> None:
    by_median = draw(parse(kind="lognormal", median=300, sigma=0.7, max_len=10**6), 200_000, 0)
    assert np.median(by_median) == pytest.approx(300, rel=0.01)
    assert by_median.mean() == pytest.approx(300 * math.exp(0.7**2 / 2), rel=0.01)
    by_mean = draw(parse(kind="lognormal", mean=300, sigma=0.7, max_len=10**6), 200_000, 0)
    assert by_mean.mean() == pytest.approx(300, rel=0.01)


def test_lognormal_is_clipped_without_overflow() -> None:
    lengths = draw(parse(kind="lognormal", median=1e9, sigma=10, max_len=4096), 1000, 0)
    assert lengths.max() == 4096
    assert lengths.min() == 1


def test_zipf_has_its_law() -> None:
    lengths = draw(parse(kind="zipf", exponent=1.5, max_len=50), 400_000, 0)
    weights = np.arange(1, 51) ** -1.5
    counts = np.bincount(lengths, minlength=51)[1:]
    np.testing.assert_allclose(counts / counts.sum(), weights / weights.sum(), atol=0.003)


def test_list_keeps_its_order_and_wants_its_batch() -> None:
    spec = parse(kind="list", values=[3, 0, 17])
    assert spec.count == 3
    assert spec.may_be_empty
    assert draw(spec, 3, 99).tolist() == [3, 0, 17]
    with pytest.raises(ValueError, match="the lengths are 3, the batch is 4"):
        draw(spec, 4, 0)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (-1, "-1 is not a length"),
        (2.5, "2.5 is not a whole number"),
        (True, "True is not a whole number"),
        (float("nan"), "missing"),
        (None, "missing"),
        ("twelve", "'twelve' is not a whole number"),
        (2**31, "expected 0 to"),
    ],
)
def test_list_names_the_bad_entry(value: Any, words: str) -> None:
    message = complaint(kind="list", values=[1, value])
    assert words in message
    assert "entry 1" in message


def test_whole_numbers_written_as_floats_are_lengths(tmp_path: Path) -> None:
    spec = parse(kind="list", values=[2.0, 3])
    assert spec == parse(kind="list", values=[2, 3])
    path = write(tmp_path / "floats.csv", "length\n3.0\n1e2\n0\n")
    assert draw(parse(kind="file", path=path, column="length"), 3, 0).tolist() == [3, 100, 0]


def test_hash_is_of_the_values() -> None:
    expected = hashlib.sha256(b"\x03" + bytes(7) + b"\x00\x01" + bytes(6)).hexdigest()[:16]
    assert lengths_hash(np.array([3, 256])) == expected
    assert lengths_hash(np.array([3, 256], np.int32)) == expected
    assert lengths_hash(np.array([256, 3])) != expected


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    "text",
    [
        "length\n3\n0\n17\n",
        "3\n0\n17\n",
        "3\n0\n17",
        "\ufefflength\r\n3\r\n0\r\n17\r\n\r\n",
        '"length"\n"3"\n" 0 "\n17\n',
    ],
)
def test_csv_with_and_without_header(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lengths.csv"
    path.write_bytes(text.encode())
    spec = parse(kind="file", path=str(path))
    assert draw(spec, 3, 0).tolist() == [3, 0, 17]
    assert spec.digest == hashlib.sha256(path.read_bytes()).hexdigest()


def test_parquet(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    path = str(tmp_path / "lengths.parquet")
    parquet.write_table(pyarrow.table({"user": ["a", "b"], "tokens": [5, 9]}), path)
    spec = parse(kind="file", path=path, column="tokens")
    assert draw(spec, 2, 0).tolist() == [5, 9]
    assert "not a whole number" in complaint(kind="file", path=path, column="user")


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    path = write(tmp_path / "lengths.parquet", "not read")
    assert "needs pyarrow: pip install 'jfabench[parquet]'" in complaint(kind="file", path=path)


def test_file_digest_names_the_content(tmp_path: Path) -> None:
    path = write(tmp_path / "lengths.csv", "1\n2\n")
    spec = parse(kind="file", path=path)
    dumped = spec.model_dump(mode="json", exclude_none=True)
    assert parse(**dumped) == spec
    write(tmp_path / "lengths.csv", "1\n3\n")
    assert "has changed" in complaint(**dumped)
    fresh = parse(kind="file", path=path)
    assert fresh.digest != spec.digest
    assert draw(fresh, 2, 0).tolist() == [1, 3]


@pytest.mark.parametrize(
    ("text", "spec", "words"),
    [
        ("tokens,user\n1,2\n", {}, "has the columns tokens, user: name one as `column`"),
        ("tokens,user\n1,2\n", {"column": "token"}, "did you mean 'tokens'?"),
        ("tokens\n1\n-2\n", {}, "row 3: -2 is not a length"),
        ("tokens\n1\nnan\n", {}, "row 3: the length is missing"),
        ("tokens\n1\n\n3\n", {}, "row 3: the length is missing"),
        ("tokens\n1\n2.5\n", {}, "row 3: 2.5 is not a whole number"),
        ("tokens\n1\nmany\n", {}, "row 3: 'many' is not a whole number"),
        ("tokens\n", {}, "holds no lengths"),
        ("", {}, "has no columns"),
    ],
)
def test_file_errors_name_place_and_remedy(tmp_path: Path, text: str, spec: dict[str, str], words: str) -> None:
    assert words in complaint(kind="file", path=write(tmp_path / "lengths.csv", text), **spec)


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    assert "there is no file" in complaint(kind="file", path=str(tmp_path / "absent.csv"))
    assert "cannot read" in complaint(kind="file", path=str(tmp_path))
    binary = tmp_path / "lengths.csv"
    binary.write_bytes(b"\xff\xfe\x00\x80")
    assert "is not text" in complaint(kind="file", path=str(binary))
    assert "not a readable Parquet file" in complaint(
        kind="file", path=write(tmp_path / "lengths.parquet", "plain text")
    )


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"kind": "fil", "max_len": 3}, "'fill', 'constant', 'lognormal', 'zipf', 'list', 'file'"),
        ({"kind": "fill", "max_len": 8, "fill": 0}, "greater than 0"),
        ({"kind": "fill", "max_len": 8, "fill": 1.5}, "less than or equal to 1"),
        ({"kind": "fill", "max_len": 8, "sparsity": 0.5}, "sparsity"),
        ({"kind": "lognormal", "sigma": 1, "max_len": 8}, "exactly one of `median` and `mean`"),
        ({"kind": "lognormal", "sigma": 1, "max_len": 8, "mean": 2, "median": 2}, "exactly one of"),
        ({"kind": "constant", "length": MAX_ROWS + 1}, "less than or equal to"),
        ({"kind": "list", "values": []}, "at least 1 item"),
    ],
)
def test_wrong_specs(spec: dict[str, Any], words: str) -> None:
    assert words in complaint(**spec)
