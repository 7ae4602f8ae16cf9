"""Image data sets in the files in which they are published, with pixels of a test's own."""

import gzip
import hashlib
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

CIFAR10_FOLDER = "cifar-10-batches-py"


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def idx(array: NDArray[np.uint8]) -> bytes:
    """Return a file of MNIST or Fashion-MNIST."""
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    return header + array.tobytes()


def images(records: int, shape: tuple[int, ...], seed: int) -> NDArray[np.uint8]:
    """Return images with every pixel from 0 to 255."""
    return np.random.default_rng(seed).integers(0, 256, (records, *shape), dtype=np.uint8)


def labels(records: int, seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 10, records, dtype=np.uint8)


def idx_files(train: int = 24, test: int = 8) -> dict[str, bytes]:
    """Return the four files of MNIST by their names."""
    return {
        f"{part}-{what}": idx(array)
        for part, records, seed in (("train", train, 0), ("t10k", test, 1))
        for what, array in (
            ("images-idx3-ubyte", images(records, (28, 28), seed)),
            ("labels-idx1-ubyte", labels(records, seed)),
        )
    }


def write(folder: Path, files: dict[str, bytes], *, zipped: bool = False) -> None:
    """Write files into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content, mtime=0))
        else:
            (folder / name).write_bytes(content)


def write_cifar10(root: Path, records: int = 8) -> dict[str, str]:
    """Write CIFAR-10's pickled batches below a folder; return the checksum of each file."""
    batches: dict[str, Any] = {}
    for seed, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        batches[name] = {
            "data": images(records, (3 * 32 * 32,), seed),
            "labels": labels(records, seed).tolist(),
        }
    batches["batches.meta"] = {"label_names": [f"class {n}" for n in range(10)]}
    files = {name: pickle.dumps(batch, protocol=2) for name, batch in batches.items()}
    write(root / CIFAR10_FOLDER, files)
    return {name: md5(content) for name, content in files.items()}


def cifar10(root: Path, *, train: bool = True) -> Any:
    """Return torchvision's CIFAR-10 of files that this writes, transformed as Flower's apps do.

    torchvision knows the published files by their checksums: this one knows these.
    """
    from torchvision import transforms
    from torchvision.datasets import CIFAR10

    sums = write_cifar10(root)
    known: Any = type("Written", (CIFAR10,), {})
    for part in ("train_list", "test_list"):
        setattr(known, part, [[name, sums[name]] for name, _ in getattr(CIFAR10, part)])
    known.meta = {**CIFAR10.meta, "md5": sums[CIFAR10.meta["filename"]]}
    half = (0.5, 0.5, 0.5)
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(half, half)])
    return known(str(root), train=train, transform=transform)


def jpeg_file(pixels: NDArray[np.uint8], labels: NDArray[np.uint8]) -> tuple[bytes, list[bytes]]:
    """Return `cifar10_jpeg.npz` with images for training and test, and the JPEG of each."""
    streams = []
    for image in pixels:
        stream = io.BytesIO()
        Image.fromarray(image).save(stream, "JPEG", quality=90)
        streams.append(stream.getvalue())
    joined = np.frombuffer(b"".join(streams), dtype=np.uint8)
    offsets = np.cumsum([0, *map(len, streams)], dtype=np.int64)
    parts = {"bytes": joined, "offsets": offsets, "labels": labels}
    archive = io.BytesIO()
    np.savez(archive, **{f"{p}_{name}": a for p in ("train", "test") for name, a in parts.items()})
    return archive.getvalue(), streams
