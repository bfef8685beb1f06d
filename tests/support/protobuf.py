"""Message classes made by protoc: what Anabranch's own reading of Protobuf schemas is compared with."""

import base64
from pathlib import Path
from tempfile import TemporaryDirectory

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass


def compiled(text, imports=None):
    """Return what protoc makes of a file and its imports; the file itself is the last one."""
    from grpc_tools import protoc

    with TemporaryDirectory() as folder:
        for name, each in {**(imports or {}), "main.proto": text}.items():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(each)
        shipped = Path(protoc.__file__).parent / "_proto"
        output = Path(folder) / "set.bin"
        arguments = ["protoc", f"-I{folder}", f"-I{shipped}", f"--descriptor_set_out={output}", "--include_imports"]
        assert protoc.main([*arguments, "main.proto"]) == 0, text
        return FileDescriptorSet.FromString(output.read_bytes())


def pool_of(files):
    pool = DescriptorPool()
    for file in files.file:
        pool.Add(file)
    return pool


def message_class(text, name, imports=None):
    """Return the class of a message type, by its full name."""
    return GetMessageClass(pool_of(compiled(text, imports)).FindMessageTypeByName(name))


def serialized(text, imports=None):
    """Return a file as a registry has it in its serialized form: its descriptor in base64."""
    return base64.b64encode(compiled(text, imports).file[-1].SerializeToString()).decode()
