"""Data files: what is written is read; what is broken is named."""

import json
import struct
import zipfile

import numpy as np
import pytest

import tiny
from deepssm import DeepSSMError
from deepssm.data.sequences import Dataset, check, load, save


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return tiny.DATA.generate()


def test_round_trip(dataset, tmp_path):
    save(dataset, tmp_path / "data.npz")
    back = load(tmp_path / "data.npz")
    assert back.about == dataset.about
    for name in ("train", "validation", "test"):
        for one, two in zip(getattr(dataset, name), getattr(back, name), strict=True):
            np.testing.assert_array_equal(one, two)
            assert one.dtype == two.dtype


def change(dataset: Dataset, **fields: object) -> Dataset:
    return dataset._replace(validation=dataset.validation._replace(**fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"x": np.zeros((16, 7))}, "validation/x has shape"),
        ({"x": np.zeros((16, 7, 9, 9))}, "validation/x has shape"),
        ({"u": np.zeros((16, 7))}, "width zero"),
        ({"u": np.zeros((16, 7, 2))}, "validation/u has shape"),
        ({"mask": np.ones((16, 6), bool)}, "validation/mask has shape"),
        ({"state": np.zeros((16, 7, 5))}, "one column for each variable"),
    ],
)
def test_wrong_shapes_are_named(dataset, fields, message):
    with pytest.raises(DeepSSMError, match=message):
        check(change(dataset, **fields))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_named_unless_unseen(dataset, value):
    x, mask = dataset.validation.x.copy(), dataset.validation.mask.copy()
    x[3, 2, 0, 0] = value
    with pytest.raises(DeepSSMError, match="sequence 3, frame 2"):
        check(change(dataset, x=x))
    mask[3, 2] = False
    check(change(dataset, x=x, mask=mask))
    u = dataset.validation.u.copy()
    u[1, 4] = value
    with pytest.raises(DeepSSMError, match=r"validation/u.*sequence 1, frame 4"):
        check(change(dataset, u=u))


def test_broken_files_are_named(dataset, tmp_path):
    path = tmp_path / "data.npz"
    with pytest.raises(DeepSSMError, match="No data file"):
        load(path)
    save(dataset, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DeepSSMError, match="not a whole"):
        load(path)
    path.write_bytes(b"something else")
    with pytest.raises(DeepSSMError, match="not a whole"):
        load(path)
    np.savez(path, x=np.zeros(3))
    with pytest.raises(DeepSSMError, match="not a deepssm-data file"):
        load(path)
    np.savez(path, about=np.array([object()], dtype=object))
    with pytest.raises(DeepSSMError):
        load(path)


@pytest.mark.parametrize("array", ["about", "train/x", "validation/u", "test/mask", "test/state"])
def test_altered_file_is_refused(array, dataset, tmp_path):
    """Any bit of any array, at its beginning or its end."""
    path = tmp_path / "data.npz"
    save(dataset, path)
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        member = archive.getinfo(f"{array}.npy")
    name, extra = struct.unpack_from("<HH", whole, member.header_offset + 26)
    begin = member.header_offset + 30 + name + extra
    for place in (begin + 2, begin + member.compress_size // 2, begin + member.compress_size - 4):
        content = bytearray(whole)
        content[place] ^= 0x10
        path.write_bytes(bytes(content))
        with pytest.raises(DeepSSMError):
            load(path)


def test_other_versions_are_refused(dataset, tmp_path):
    path = tmp_path / "data.npz"
    save(dataset, path)
    with np.load(path) as archive:
        arrays = dict(archive)
    about = {**json.loads(arrays["about"].tobytes()), "version": 99}
    np.savez(path, **{**arrays, "about": np.frombuffer(json.dumps(about).encode(), np.uint8)})
    with pytest.raises(DeepSSMError, match="version"):
        load(path)


def test_unwritable_folder(dataset, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DeepSSMError, match="Cannot write"):
        save(dataset, tmp_path / "file" / "data.npz")
