"""Files of data sets as torchvision reads and fetches them, and as this library does."""

import functools
import gzip
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_files import cifar10, idx_files, images, jpeg_file, labels, md5, write
from torch.utils.data import DataLoader, Dataset, Subset

from flwr_privacy import FedAvg, simulate
from flwr_privacy.clients.torch import get_arrays, initialise, mlp, train_per_record
from flwr_privacy.errors import DataError
from flwr_privacy.simulations.settings.run_folder import RunFolder
from flwr_privacy.simulations.tasks import data

pytestmark = pytest.mark.vision

# torchvision's class, the folder below the root, and the mean and deviation in our docs.
IDX = {
    "mnist": ("MNIST", "MNIST/raw", 0.1307, 0.3081),
    "fashion-mnist": ("FashionMNIST", "FashionMNIST/raw", 0.2860, 0.3530),
}
FILES = idx_files()


def normalised(mean: Any, std: Any) -> Callable[[Any], torch.Tensor]:
    from torchvision import transforms

    return transforms.Compose([transforms.ToTensor(), transforms.Normalize(mean, std)])


def read(dataset: Dataset[Any]) -> tuple[Any, Any]:
    """Return all that a data set has, through a DataLoader."""
    batches = list(DataLoader(dataset, batch_size=5))
    return tuple(torch.cat(part).numpy() for part in zip(*batches, strict=True))


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let our checksums be those of the written files."""
    sums = {name: md5(content) for name, content in FILES.items()}
    for name in IDX:
        monkeypatch.setitem(data._SOURCES, name, replace(data._SOURCES[name], md5=sums))


def check_equal(ours: Any, root: Path, name: str) -> None:
    """Check that our reading of the files is torchvision's, value for value."""
    import torchvision

    kind, _, mean, std = IDX[name]
    for train_part, features, own in (
        (True, ours.features, ours.labels),
        (False, ours.test_features, ours.test_labels),
    ):
        theirs = getattr(torchvision.datasets, kind)(
            str(root), train=train_part, transform=normalised((mean,), (std,))
        )
        expected, targets = read(theirs)
        assert features.dtype == expected.dtype
        assert own.dtype == targets.dtype
        np.testing.assert_allclose(features, expected, rtol=0, atol=5e-7)
        np.testing.assert_array_equal(own, targets)
        # A pixel is off by 0.01 or not at all.
        np.testing.assert_array_equal(np.rint((features * std + mean) * 255)[:, 0], theirs.data)


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("name", IDX)
def test_idx_files_are_read_as_torchvision_reads_them(name: str, tmp_path: Path) -> None:
    write(tmp_path / IDX[name][1], FILES)
    check_equal(data.load(name, data_root=tmp_path), tmp_path, name)


def test_jpegs_are_decoded_as_torchvision_decodes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision.io import ImageReadMode, decode_jpeg

    archive, streams = jpeg_file(images(12, (32, 32, 3), 3), labels(12, 3))
    source = data._SOURCES["cifar10-jpeg"]
    sums = {"cifar10_jpeg.npz": md5(archive)}
    monkeypatch.setitem(data._SOURCES, "cifar10-jpeg", replace(source, md5=sums))
    write(tmp_path / "cifar10", {"cifar10_jpeg.npz": archive})
    ours = data.load("cifar10-jpeg", data_root=tmp_path)
    decoded = [
        decode_jpeg(torch.frombuffer(bytearray(stream), dtype=torch.uint8), ImageReadMode.RGB)
        for stream in streams
    ]
    mean, std = (
        torch.tensor(part).view(3, 1, 1) for part in (data._CIFAR10_MEAN, data._CIFAR10_STD)
    )
    expected = (torch.stack(decoded) / 255 - mean) / std
    np.testing.assert_allclose(ours.features, expected, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(ours.labels, labels(12, 3))


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: Any) -> None:
        pass


class Garbage(BaseHTTPRequestHandler):
    def handle(self) -> None:
        self.request.recv(4096)
        self.request.sendall(b"no HTTP\r\n")


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Start servers on this machine; return the address of one."""
    servers = []

    def start(handler: Any) -> str:
        servers.append(HTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def mirror(tmp_path: Path, serve: Callable[..., str]) -> str:
    """Publish the written files, zipped; return the address."""
    write(tmp_path / "mirror", FILES, zipped=True)
    return serve(functools.partial(Quiet, directory=str(tmp_path / "mirror")))


@pytest.fixture
def look_at(known: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have torchvision's class fetch the written files, from these addresses in turn."""
    from torchvision import datasets

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    sums = [(f"{name}.gz", md5(gzip.compress(content, mtime=0))) for name, content in FILES.items()]

    def set_addresses(kind: str, *addresses: str) -> None:
        monkeypatch.setattr(getattr(datasets, kind), "resources", sums)
        monkeypatch.setattr(getattr(datasets, kind), "mirrors", addresses)

    return set_addresses


@pytest.mark.parametrize("name", IDX)
def test_what_is_missing_is_fetched_once(
    name: str, mirror: str, look_at: Callable[..., None], tmp_path: Path
) -> None:
    kind, root = IDX[name][0], tmp_path / "data"
    look_at(kind, f"{mirror}nowhere/", mirror)
    with pytest.raises(DataError, match="not found"):
        data.load(name, data_root=root)
    fetched = data.load(name, data_root=root, download=True)
    check_equal(fetched, root, name)
    look_at(kind)
    data._load.cache_clear()
    assert data.load(name, data_root=root, download=True).labels.tolist() == fetched.labels.tolist()
    assert data.available(root)[name] == "found"


def test_a_download_that_fails_says_what_to_put_where(
    mirror: str, look_at: Callable[..., None], serve: Callable[..., str], tmp_path: Path
) -> None:
    other = gzip.compress(b"other labels")
    (tmp_path / "mirror/t10k-labels-idx1-ubyte.gz").write_bytes(other)
    for address, reason in (
        (f"{mirror}nowhere/", "HTTP Error 404"),
        (serve(Garbage), "no HTTP"),
        (mirror, "corrupted"),
    ):
        look_at("MNIST", address)
        with pytest.raises(
            DataError, match=f"(?s)MNIST could not be downloaded.*{reason}"
        ) as error:
            data.load("mnist", data_root=tmp_path / "data", download=True)
        assert f"put the files {', '.join(FILES)}" in str(error.value)
        assert str(tmp_path / "data/mnist") in str(error.value)


def test_a_data_set_of_torchvision_trains_as_its_arrays_do(tmp_path: Path) -> None:
    cifar = cifar10(tmp_path)
    test = cifar10(tmp_path, train=False)
    assert (len(cifar), len(test), len(cifar.classes)) == (40, 8, 10)
    pixels = np.concatenate([images(8, (3, 32, 32), seed) for seed in range(5)])
    features = ((pixels / 255 - 0.5) / 0.5).astype(np.float32)
    own = np.concatenate([labels(8, seed) for seed in range(5)]).astype(np.int64)
    found, targets = read(cifar)
    np.testing.assert_allclose(found, features, atol=5e-7)
    np.testing.assert_array_equal(targets, own)

    def net() -> torch.nn.Module:
        return initialise(lambda: mlp([3 * 32 * 32, 10]), 0)

    by_arrays, by_loader = net(), net()
    settings = {"clipping_norm": 1.0, "learning_rate": 0.1}
    train_per_record(by_arrays, found[:20], own[:20], **settings)
    loader = DataLoader(Subset(cifar, range(20)), batch_size=4, shuffle=True)
    train_per_record(by_loader, loader, **settings)
    for name, array in get_arrays(by_arrays).items():
        np.testing.assert_array_equal(get_arrays(by_loader)[name], array)

    options = {"schemes": FedAvg(), "clients": 2, "rounds": 1, "learning_rate": 0.01}
    given = {"datasets": (cifar, test), "arrays": ((found, own), read(test))}
    models = []
    for name, (one, two) in given.items():
        results = simulate(model=net(), data=one, test=two, out=tmp_path / name, **options)
        with np.load(RunFolder.open(results.folders[0]).model_path) as archive:
            models.append(dict(archive))
    assert models[0].keys() == models[1].keys()
    for name, array in models[0].items():
        np.testing.assert_array_equal(models[1][name], array)
