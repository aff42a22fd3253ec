import dataclasses
import gzip
import hashlib
import io
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from fedglimpse.data import readers, sources
from fedglimpse.errors import UserError
from mistakes import mistake


def real(name):
    try:
        present = sources.locate(name) is not None
    except OSError:
        present = False
    return pytest.mark.skipif(not present, reason=f"the real files of {name} are not here")


def md5(raw):
    return hashlib.md5(raw).hexdigest()


@pytest.fixture
def small_cifar(monkeypatch):
    """Six little batches that count as the official ones."""
    generator = np.random.default_rng(0)
    raw = {}
    for name in readers.CIFAR10_MD5:
        rows = generator.integers(0, 256, (4, 3073), dtype=np.uint8)
        rows[:, 0] %= 10
        raw[name] = rows.tobytes()
    monkeypatch.setattr(readers, "CIFAR10_MD5", {n: md5(r) for n, r in raw.items()})
    return raw


@pytest.fixture
def small_fashion(monkeypatch):
    contents = {}
    for name in readers.FASHION_MD5:
        rows = 8 if name.startswith("train") else 4
        shape = (rows, 28, 28) if "images" in name else (rows,)
        values = np.arange(np.prod(shape)) % (256 if "images" in name else 10)
        header = struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape)
        contents[name] = header + values.astype(np.uint8).tobytes()
    monkeypatch.setattr(readers, "FASHION_MD5", {n: md5(r) for n, r in contents.items()})
    only_here = dataclasses.replace(sources._FILES["fashion"], candidates=("fashion-mnist",))
    monkeypatch.setitem(sources._FILES, "fashion", only_here)
    return contents


def test_data_directory_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("FEDGLIMPSE_DATA", raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    assert sources.data_directory() == tmp_path / ".cache/fedglimpse"
    monkeypatch.setattr("sys.platform", "darwin")
    assert sources.data_directory() == tmp_path / "Library/Caches/fedglimpse"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert sources.data_directory() == tmp_path / "xdg/fedglimpse"
    monkeypatch.setenv("FEDGLIMPSE_DATA", str(tmp_path / "mine"))
    assert sources.data_directory() == tmp_path / "mine"
    assert sources.data_directory(tmp_path / "given") == tmp_path / "given"


def test_digits_are_split_the_same_way_every_time():
    first, repeated = sources.load("digits"), sources.load("digits")
    assert first.x_train.shape == (1437, 1, 8, 8)
    assert first.x_test.shape == (360, 1, 8, 8)
    assert first.x_train.dtype == torch.uint8
    assert first.x_train.max() == 255
    assert torch.equal(first.x_test, repeated.x_test)
    shares = first.y_test.bincount() / 360 - first.y_train.bincount() / 1437
    assert shares.abs().max() < 0.003


def test_digits_are_those_of_scikit_learn() -> None:
    digits = sources.digits()
    bunch = load_digits()
    labels = torch.cat([digits.y_train, digits.y_test])
    assert labels.bincount().tolist() == np.bincount(bunch.target).tolist()
    pixels = torch.cat([digits.x_train, digits.x_test]).double().sum((1, 2, 3))
    expected = np.round(bunch.data * (255 / 16)).sum(1)
    assert pixels.sort().values.tolist() == sorted(expected.tolist())


def test_digits_are_found_where_another_version_keeps_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = sources.digits()
    monkeypatch.setattr(sources, "find_spec", lambda name: None)
    assert torch.equal(sources.digits().x_train, expected.x_train)


def test_synthetic_is_deterministic_and_its_sizes_can_be_chosen():
    data = sources.load("synthetic")
    repeated = sources.synthetic()
    other = sources.synthetic(seed=1)
    assert torch.equal(data.x_train, repeated.x_train)
    assert not torch.equal(data.x_train, other.x_train)
    assert data.num_classes == 10
    assert data.x_train.shape == (4000, 32)
    small = sources.synthetic(num_train=50, num_test=20, num_features=5, num_classes=3)
    assert small.x_train.shape == (50, 5)
    assert small.y_test.bincount().tolist() == [7, 7, 6]
    with mistake():
        sources.synthetic(num_classes=1)


def test_synthetic_is_solvable_but_not_trivial():
    data = sources.load("synthetic")
    targets = torch.nn.functional.one_hot(data.y_train).float()
    inputs = torch.cat([data.x_train, torch.ones(len(data.x_train), 1)], dim=1)
    weights = torch.linalg.lstsq(inputs, targets).solution
    guess = (torch.cat([data.x_test, torch.ones(1000, 1)], dim=1) @ weights).argmax(1)
    linear = (guess == data.y_test).float().mean()
    nearest = torch.cdist(data.x_test, data.x_train).topk(9, largest=False).indices
    neighbours = (data.y_train[nearest].mode(1).values == data.y_test).float().mean()
    assert 0.4 < linear < neighbours - 0.1
    assert 0.8 < neighbours < 0.99


@pytest.mark.parametrize("name", ["cifar10", "har", "hapt", "fashion"])
def test_missing_files_name_the_place_and_the_fix(name, tmp_path, small_fashion):
    with pytest.raises(UserError) as caught:
        sources.load(name, tmp_path)
    assert caught.value.key == "data.name"
    assert str(tmp_path) in str(caught.value)
    fix = "place 'hapt561.npz'" if name == "hapt" else f"`fedglimpse data fetch {name}`"
    assert fix in str(caught.value)
    state = sources.status(name, tmp_path)
    assert (state.present, state.path, state.verified) == (False, None, None)


def test_unknown_name_suggests_one():
    for call in (sources.load, sources.status):
        with mistake("data.name"):
            call("cifar")


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_generated_sources_are_always_present(name, tmp_path):
    state = sources.status(name, tmp_path)
    assert (state.present, state.verified) == (True, None)


def test_cifar_folder_and_archive_give_the_same_rows(tmp_path, small_cifar):
    archive = tmp_path / "tar" / "cifar-10-binary.tar.gz"
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as tar:
        for name, raw in small_cifar.items():
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))
    folder = tmp_path / "plain" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for name, raw in small_cifar.items():
        (folder / name).write_bytes(raw)
    a, b = sources.load("cifar10", archive.parent), sources.load("cifar10", folder.parent)
    assert torch.equal(a.x_train, b.x_train)
    assert a.x_train.shape == (20, 3, 32, 32)
    assert a.x_test.shape == (4, 3, 32, 32)
    second = np.frombuffer(small_cifar["data_batch_1.bin"], np.uint8).reshape(4, 3073)[1]
    assert a.y_train[1] == second[0]
    assert a.x_train[1].flatten().tolist() == second[1:].tolist()
    archive.write_bytes(archive.read_bytes()[:500])
    with mistake():
        sources.load("cifar10", archive.parent)


def test_corrupt_and_lacking_cifar_members_are_named(tmp_path, small_cifar):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for name, raw in small_cifar.items():
        (folder / name).write_bytes(raw)
    bad = bytearray(small_cifar["data_batch_3.bin"])
    bad[100] ^= 1
    (folder / "data_batch_3.bin").write_bytes(bad)
    with pytest.raises(UserError) as caught:
        sources.load("cifar10", tmp_path)
    expected = readers.CIFAR10_MD5["data_batch_3.bin"]
    for part in ("data_batch_3.bin", expected, md5(bad)):
        assert part in str(caught.value)
    state = sources.status("cifar10", tmp_path)
    assert (state.present, state.verified) == (True, False)
    (folder / "data_batch_2.bin").unlink()
    with pytest.raises(UserError, match=r"data_batch_2\.bin"):
        sources.load("cifar10", tmp_path)


def test_fashion_is_checked_by_content_whatever_the_gzip_header(tmp_path, small_fashion):
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    for mtime in (0, 123456789):
        for name, raw in small_fashion.items():
            (folder / name).write_bytes(gzip.compress(raw, mtime=mtime))
        data = sources.load("fashion", tmp_path)
        assert data.x_train.shape == (8, 1, 28, 28)
        assert data.y_test.tolist() == [0, 1, 2, 3]
    assert sources.status("fashion", tmp_path).verified
    name = "t10k-labels-idx1-ubyte.gz"
    (folder / name).write_bytes(gzip.compress(small_fashion[name][:-1] + b"\7"))
    with pytest.raises(UserError, match=name):
        sources.load("fashion", tmp_path)
    (folder / name).write_bytes(b"not gzip")
    with pytest.raises(UserError, match=name):
        sources.load("fashion", tmp_path)


def test_a_complete_place_is_preferred_to_a_partial_one(tmp_path, monkeypatch):
    files = sources._FILES["fashion"]
    other = tmp_path / "elsewhere"
    pair = dataclasses.replace(files, candidates=("fashion-mnist", str(other)))
    monkeypatch.setitem(sources._FILES, "fashion", pair)
    (tmp_path / "fashion-mnist").mkdir()
    assert sources.locate("fashion", tmp_path) is None
    (tmp_path / "fashion-mnist/x.part").touch()
    assert sources.locate("fashion", tmp_path) == tmp_path / "fashion-mnist"
    other.mkdir()
    for name in files.members:
        (other / name).touch()
    assert sources.locate("fashion", tmp_path) == other


@pytest.mark.parametrize(
    "raw",
    [b"", b"\0\0\x08", b"\0\0\x09\1\0\0\0\0", b"\0\0\x08\1\0\0\0", b"\0\0\x08\1\0\0\0\2\5"],
)
def test_bad_idx_headers_are_refused(raw):
    with mistake():
        readers.parse_idx(raw, "file")


def test_idx_is_decoded():
    raw = b"\0\0\x08\2\0\0\0\2\0\0\0\3" + bytes(range(6))
    assert readers.parse_idx(raw, "file").tolist() == [[0, 1, 2], [3, 4, 5]]


@real("cifar10")
def test_real_cifar10():
    data = sources.load("cifar10")
    assert data.x_train.shape == (50_000, 3, 32, 32)
    assert data.y_train.bincount().tolist() == [5000] * 10
    assert data.y_test.bincount().tolist() == [1000] * 10
    assert data.y_train[:5].tolist() == [6, 9, 9, 4, 1]
    assert data.x_train[0, :, 0, 0].tolist() == [59, 62, 63]


@real("fashion")
def test_real_fashion():
    data = sources.load("fashion")
    assert data.x_train.shape == (60_000, 1, 28, 28)
    assert data.y_train.bincount().tolist() == [6000] * 10
    assert data.y_train[:5].tolist() == [9, 0, 0, 3, 0]
    assert data.y_test[:4].tolist() == [9, 2, 1, 1]
