"""Checkpoints and versions in memory: an object store for tests of the storage contract and of long runs."""

import contextlib
import itertools

from anabranch.learner.state_dir.folders import MANIFEST

Objects = dict[str, tuple[int, bytes]]
"""Contents by name, each with a stamp that changes with the contents."""


class MemoryFolder:
    """Objects of one prefix; an object that is read in parts is copied to a file first."""

    def __init__(self, objects, stamps, fetched):
        self._objects, self._stamps, self._fetched = objects, stamps, fetched

    def files(self):
        return {name: len(content) for name, (_, content) in self._objects.items()}

    def stamp(self, name):
        return self._objects[name][0] if name in self._objects else None

    def read(self, name, max_bytes=None):
        if name not in self._objects:
            raise FileNotFoundError(name)
        return self._objects[name][1]

    def local(self, name):
        path = self._fetched / f"{self.stamp(name)}"
        path.write_bytes(self.read(name))
        return path

    def write(self, name, pieces):
        self._objects[name] = next(self._stamps), b"".join(pieces)

    def link(self, name, source, other):
        self.write(name, [source.read(other)])

    def replace(self, name, content):
        if not self._objects:
            raise FileNotFoundError(name)
        self.write(name, [content])

    def remove(self, name):
        self._objects.pop(name, None)


class MemoryStorage:
    """A minimal object store: it has neither renames nor links, and a folder exists once its manifest exists."""

    location = "memory"

    def __init__(self, fetched):
        fetched.mkdir()
        self._folders: dict[int, Objects] = {}
        self._stamps, self._fetched = itertools.count(), fetched

    def numbers(self):
        return sorted(number for number, objects in self._folders.items() if MANIFEST in objects)

    def highest(self):
        return max(self._folders, default=0)

    def folder(self, number):
        return MemoryFolder(self._folders.get(number, {}), self._stamps, self._fetched)

    @contextlib.contextmanager
    def publish(self, number, generation):
        if number in self._folders:
            raise FileExistsError(str(number))
        objects: Objects = {}
        yield MemoryFolder(objects, self._stamps, self._fetched)
        self._folders[number] = objects

    def delete(self, number):
        self._folders.pop(number, None)

    def set_aside(self, number):
        self.delete(number)

    def delete_set_aside(self):
        pass

    def clean(self):
        for number in {*self._folders} - {*self.numbers()}:
            self.delete(number)

    def local_base(self, sha256):
        raise FileNotFoundError(sha256)

    def drop_copies(self):
        for path in self._fetched.iterdir():
            path.unlink()
