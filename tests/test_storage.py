"""Files: whole or not at all, bit for bit, and a sentence for everything else."""

import errno
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest
import xarray as xr

from bne import _tables, storage
from bne.errors import FitFileError, InputError
from bne.storage import check_target, read_fit, read_table, write_fit, write_table


@pytest.fixture
def table():
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {"lon": rng.normal(size=5), "county": list("abcde"), "outside": [True, False] * 2 + [True]}
    )


@pytest.fixture
def groups():
    rng = np.random.default_rng(1)
    odd = np.array([0.1 + 0.2, np.pi, -0.0, 5e-324, np.inf, np.nan])
    odd = np.append(odd, np.frombuffer(b"\x01\x00\x00\x00\x00\x00\xf8\x7f"))  # NaN with a payload
    posterior = xr.Dataset(
        {
            "delta": (("chain", "draw", "site"), rng.normal(size=(2, 3, 7))),
            "odd": ("site", odd),
            "single": ("site", odd.astype(np.float32)),
        },
        coords={"site": np.arange(7)},
        attrs={"step": "residual"},
    )
    data = xr.Dataset(
        {
            "name": ("base", np.array(["av", "gs", "caçes"], dtype=object)),
            "kept": ("site", np.array([True, False])),
            "count": ((), 7),
            "nothing": ("empty", np.empty(0)),
        }
    )
    return {"posterior": posterior, "data": data}


@pytest.fixture
def fit(tmp_path, groups):
    path = tmp_path / "fit.nc"
    attrs = {
        "model": "bne",
        "seed": 3,
        "tau": 0.1,
        "base": ["a", "b"],
        "map": {"x": None},
        "on": True,
    }
    write_fit(path, groups, attrs)
    return path


def only_file(folder):
    (path,) = folder.iterdir()
    return path


@pytest.mark.parametrize("suffix", [".csv", ".nc"])
def test_tables_come_back_to_the_last_bit(tmp_path, table, suffix):
    path = tmp_path / f"out{suffix}"
    write_table(table, path)
    pd.testing.assert_frame_equal(read_table(path), table, check_exact=True, check_dtype=False)
    assert only_file(tmp_path) == path


def test_parquet_comes_back(tmp_path, table):
    pytest.importorskip("pyarrow")
    write_table(table, tmp_path / "out.parquet")
    pd.testing.assert_frame_equal(read_table(tmp_path / "out.parquet"), table, check_dtype=False)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, table, monkeypatch):
    monkeypatch.setattr(_tables, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"bne\[parquet\]"):
        write_table(table, tmp_path / "out.parquet")
    (tmp_path / "in.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"bne\[parquet\]"):
        read_table(tmp_path / "in.parquet")


def test_draws_are_columns_or_a_variable(tmp_path, table):
    draws = np.random.default_rng(2).normal(size=(3, 5))
    write_table(table, tmp_path / "out.csv", draws=draws)
    frame = read_table(tmp_path / "out.csv")
    np.testing.assert_array_equal(frame[["draw_0", "draw_1", "draw_2"]].to_numpy().T, draws)
    write_table(table, tmp_path / "out.nc", draws=draws, attrs={"threshold": 12.0})
    with xr.open_dataset(tmp_path / "out.nc", engine="h5netcdf") as dataset:
        assert dataset["draws"].dims == ("draw", "site")
        np.testing.assert_array_equal(dataset["draws"], draws)
        assert dataset.attrs["threshold"] == 12
    assert list(read_table(tmp_path / "out.nc").columns) == list(table.columns)


def test_grids_are_tables_of_their_cells(tmp_path):
    grid = xr.Dataset(
        {"f": (("lat", "lon"), np.arange(6.0).reshape(2, 3))},
        coords={"lat": [41.0, 42.0], "lon": [-72.0, -71.0, -70.0]},
    )
    grid.to_netcdf(tmp_path / "grid.nc", engine="h5netcdf")
    assert list(read_table(tmp_path / "grid.nc").columns) == ["lat", "lon", "f"]


def test_odd_columns_reach_netcdf(tmp_path):
    frame = pd.DataFrame(
        {
            "site": ["p", "q"],
            "a/b": [1.0, 2.0],
            "maybe": pd.array([1, None], dtype="Int64"),
            "note": ["x", None],
        }
    )
    write_table(frame, tmp_path / "out.nc")
    again = read_table(tmp_path / "out.nc")
    assert again["site"].tolist() == ["p", "q"]
    assert again["note"].tolist() == ["x", ""]
    np.testing.assert_array_equal(again["maybe"], [1, np.nan])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"", "is empty"),
        ("a.csv", b"\n\n", "is empty"),
        ("a.csv", b"lon,lat\n", "has no rows"),
        ("a.csv", "lon,é\n1,2\n".encode("latin-1"), "not UTF-8 text"),
        ("a.csv", b"lon,lat\n" + b"1,2\n" * 9000 + b"\xff,2\n", "not UTF-8 text"),
        ("a.csv", "lon,lat\n1,2\n".encode("utf-16"), "not UTF-8 text"),
        ("a.csv", b"lon,lat\n1,2\n1,2,3,4\n", "not a well-formed CSV"),
        ("a.csv", b"lon;lat\n1;2\n", "by commas"),
        ("a.csv", b"lon,lat,lon\n1,2,3\n", "several columns named 'lon'"),
        ("a.nc", b"lon,lat\n1,2\n", "not a readable NetCDF"),
        ("a.xlsx", b"PK", "must be one of .csv"),
    ],
)
def test_unreadable_tables(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_table(tmp_path / name)


def test_missing_files_and_directories(tmp_path):
    with pytest.raises(InputError, match="there is no file"):
        read_table(tmp_path / "none.csv")
    with pytest.raises(InputError, match="is a directory"):
        read_table(tmp_path)
    with pytest.raises(FitFileError, match="there is no file"):
        read_fit(tmp_path / "none.nc")
    with pytest.raises(FitFileError, match="is a directory"):
        read_fit(tmp_path)


def test_csv_with_byte_order_mark_and_spaces(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbflon, lat\n1, 2\n")
    assert list(read_table(tmp_path / "a.csv").columns) == ["lon", "lat"]


def test_targets_are_checked_beforehand(tmp_path, table):
    for path, message in (
        (tmp_path / "out.xlsx", "must end in one of"),
        (tmp_path / "none" / "out.csv", "does not exist"),
    ):
        with pytest.raises(InputError, match=message):
            write_table(table, path)
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(InputError, match="is a directory"):
        write_table(table, tmp_path / "folder.csv")
    with pytest.raises(InputError, match="not a regular file"):
        check_target(os.devnull)


def test_links_are_followed_and_modes_kept(tmp_path, table):
    real, link = tmp_path / "real.csv", tmp_path / "link.csv"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    write_table(table, link)
    assert link.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o640
    assert len(read_table(real)) == 5


def full_disk(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("suffix", [".csv", ".nc"])
def test_a_full_disk_leaves_what_was_there(tmp_path, table, monkeypatch, suffix):
    path = tmp_path / f"out{suffix}"
    path.write_text("before")
    monkeypatch.setattr("bne._files._flush_to_disk", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_table(table, path)
    assert only_file(tmp_path).read_text() == "before"


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupt_leaves_nothing(tmp_path, groups, monkeypatch, error):
    def interrupt(*args, **kwargs):
        raise error

    monkeypatch.setattr(storage, "_plain_encoding", interrupt)
    with pytest.raises(error):
        write_fit(tmp_path / "fit.nc", groups, {})
    assert list(tmp_path.iterdir()) == []


def test_a_file_size_limit_leaves_nothing(tmp_path):
    """The real thing: the operating system refuses to let the file grow."""
    program = f"""
import resource, signal, sys
import numpy as np, xarray as xr
from bne.storage import write_fit
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
try:
    large = xr.Dataset({{"x": ("i", np.ones(10**6))}})
    write_fit({str(tmp_path / "fit.nc")!r}, {{"a": large}}, {{}})
except OSError as error:
    sys.stdout.write("refused: " + str(error))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.startswith("refused"), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_fits_come_back_bit_for_bit(fit, groups):
    again, attrs = read_fit(fit)
    assert list(again) == list(groups)
    for name, group in groups.items():
        assert set(again[name].variables) == set(group.variables)
        assert again[name].attrs == group.attrs
        for key, variable in group.variables.items():
            other = again[name].variables[key]
            assert other.dims == variable.dims
            if variable.dtype.kind == "O":
                assert other.values.tolist() == variable.values.tolist()
            else:
                assert other.values.tobytes() == variable.values.tobytes()
                assert other.dtype == variable.dtype
    assert attrs.pop("bne_version")
    assert attrs == {
        "model": "bne",
        "seed": 3,
        "tau": 0.1,
        "base": ["a", "b"],
        "map": {"x": None},
        "on": True,
        "schema_version": 2,
        "format": "bne-fit",
    }
    assert only_file(fit.parent) == fit


def test_a_fresh_process_reads_the_same_bits(fit, groups):
    program = f"""
import sys
from bne.storage import read_fit
groups, _ = read_fit({str(fit)!r})
sys.stdout.write(groups["posterior"].delta.values.tobytes().hex())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == groups["posterior"].delta.values.tobytes().hex()


def test_a_fit_that_was_read_can_be_written_again(fit, tmp_path):
    groups, attrs = read_fit(fit)
    own = {k: v for k, v in attrs.items() if k not in ("format", "schema_version", "bne_version")}
    write_fit(tmp_path / "again.nc", groups, own)
    again, more = read_fit(tmp_path / "again.nc")
    assert more == attrs
    for name, group in groups.items():
        xr.testing.assert_identical(again[name], group)


def test_arviz_groups_can_be_stored(tmp_path):
    posterior = xr.Dataset(
        {"beta": (("chain", "draw", "k"), np.zeros((2, 3, 2)))},
        coords={"chain": [0, 1], "draw": [0, 1, 2], "k": np.array(["av", "gs"])},
        attrs={"created_at": "2024-01-01T00:00:00", "n": 3},
    )
    stats = xr.Dataset({"diverging": (("chain", "draw"), np.zeros((2, 3), bool))})
    write_fit(tmp_path / "fit.nc", {"posterior": posterior, "sample_stats": stats}, {})
    groups, _ = read_fit(tmp_path / "fit.nc")
    assert groups["posterior"]["k"].values.tolist() == ["av", "gs"]
    assert groups["sample_stats"]["diverging"].dtype == bool


def test_large_attributes_and_numpy_values(tmp_path):
    attrs = {"names": [f"model {i}" for i in range(20_000)], "n": np.int64(3), "x": np.arange(3)}
    write_fit(tmp_path / "fit.nc", {}, attrs)
    _, again = read_fit(tmp_path / "fit.nc")
    assert again["names"] == attrs["names"]
    assert (again["n"], again["x"]) == (3, [0, 1, 2])


@pytest.mark.parametrize(
    ("groups", "attrs", "message"),
    [
        ({"a/b": xr.Dataset()}, {}, "cannot name a part"),
        ({}, {"format": "x"}, "reserved"),
        ({}, {"model": object()}, "object cannot be stored"),
    ],
)
def test_what_cannot_be_stored_is_refused(tmp_path, groups, attrs, message):
    with pytest.raises(InputError, match=message):
        write_fit(tmp_path / "fit.nc", groups, attrs)
    assert list(tmp_path.iterdir()) == []


class Bomb:
    def __reduce__(self):
        return (os.system, ("touch exploded",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a NetCDF-4 file"),
        (b"lon,lat\n1,2\n", "not a NetCDF-4 file"),
        (pickle.dumps(Bomb()), "not a NetCDF-4 file"),
    ],
)
def test_foreign_files(tmp_path, monkeypatch, content, message):
    monkeypatch.chdir(tmp_path)
    Path("fit.nc").write_bytes(content)
    with pytest.raises(FitFileError, match=message):
        read_fit("fit.nc")
    assert not Path("exploded").exists()


def test_another_netcdf_file_is_not_a_fit(tmp_path, table):
    write_table(table, tmp_path / "table.nc")
    with pytest.raises(FitFileError, match="but not a fit"):
        read_fit(tmp_path / "table.nc")


def test_a_fit_is_not_a_table(fit):
    with pytest.raises(InputError, match="is a fit, not a table"):
        read_table(fit)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_truncated_fits(fit, share):
    content = fit.read_bytes()
    fit.write_bytes(content[: int(share * len(content))])
    with pytest.raises(FitFileError, match="damaged"):
        read_fit(fit)


def test_any_changed_byte_is_noticed_or_harmless(fit):
    content, expected = fit.read_bytes(), read_fit(fit)[0]["posterior"].delta.values.tobytes()
    rng = np.random.default_rng(3)
    refused = 0
    for position in rng.integers(0, len(content), 60):
        changed = bytearray(content)
        changed[position] ^= 0xFF
        fit.write_bytes(changed)
        try:
            groups, _ = read_fit(fit)
        except FitFileError:
            refused += 1
        else:
            assert groups["posterior"].delta.values.tobytes() == expected
    assert refused > 0


def edit(path, change):
    with h5py.File(path, "r+") as file:
        change(file)


def newer(file):
    file.attrs["schema_version"] = 3
    file.attrs["bne_version"] = "9.9"


def external(file):
    file.create_dataset("posterior/x", (8,), "u1", external=[("/etc/hostname", 0, 8)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (newer, r"written by bne 9.9 \(schema 3\).*upgrade"),
        (lambda file: file.attrs.__setitem__("schema_version", 0), "no schema 0"),
        (lambda file: file.attrs.__setitem__("schema_version", 1), "earlier bne .*fit again"),
        (lambda file: file.attrs.__delitem__("schema_version"), "damaged"),
        (lambda file: file.attrs.__setitem__("json_attributes", "[1"), "damaged"),
        (lambda file: file["posterior/delta"].__setitem__((0, 0, 0), 7.0), "does not match|digest"),
        (lambda file: file.__setitem__("link", h5py.ExternalLink("/etc/x", "/")), "links to other"),
        (lambda file: file.__setitem__("soft", h5py.SoftLink("/posterior")), "links to other"),
        (external, "in other files"),
        (lambda file: file.create_dataset("huge", (10**9,), "f8", chunks=True), "declares more"),
    ],
)
def test_tampered_fits(fit, change, message):
    edit(fit, change)
    with pytest.raises(FitFileError, match=message):
        read_fit(fit)


def test_structured_attributes_are_json(fit):
    with h5py.File(fit) as file:
        assert json.loads(file.attrs["base"]) == ["a", "b"]
        assert file.attrs["model"] == "bne"
