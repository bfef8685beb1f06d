"""Parses .proto files of proto2 and proto3 into file descriptors, as protoc does before it resolves names.

The text comes from the network, so that protoc, which reads imported files, is not run on it. Options, services and
extensions are skipped: none changes how a message is read. Names of types stay as they are written; the descriptor pool
of Protobuf resolves them.

Source: https://protobuf.dev/reference/protobuf/proto3-spec/ and proto2-spec/.
"""

import re
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)

_TOKEN = re.compile(
    r"""\s+|//[^\n]*|/\*.*?\*/                                   # skipped
    |(?P<text>"(?:[^"\\\n\0]|\\.)*"|'(?:[^'\\\n\0]|\\.)*')
    |(?P<word>[A-Za-z_][\w.]*|\.[A-Za-z_][\w.]*)
    |(?P<number>\.?\d(?:[eE][+-]|[\w.])*)
    |(?P<symbol>[^\w\s"'])""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)
_LABELS = {
    "optional": FieldDescriptorProto.LABEL_OPTIONAL,
    "required": FieldDescriptorProto.LABEL_REQUIRED,
    "repeated": FieldDescriptorProto.LABEL_REPEATED,
}
_SCALARS = {
    name.removeprefix("TYPE_").lower(): number
    for name, number in FieldDescriptorProto.Type.items()
    if name not in ("TYPE_MESSAGE", "TYPE_ENUM", "TYPE_GROUP")
}
_CLOSING = {"{": "}", "[": "]", "(": ")"}
_DEEPEST = 32
"""Messages within each other, which is also the limit of protoc."""
_LONGEST = 1_000_000


class ProtoTextError(ValueError):
    """A text that is not a .proto file of proto2 or proto3; its sentence names the line."""


def parse_proto(name: str, text: str) -> FileDescriptorProto:
    """Return the descriptor of a .proto file, under this file name.

    Raises:
        ProtoTextError: the text cannot be parsed.
    """
    return _Parser(name, text).parse()


class _Tokens:
    """The tokens of a text: words (with their dots), numbers, quoted texts and symbols."""

    def __init__(self, text: str) -> None:
        if len(text) > _LONGEST:
            raise ProtoTextError(f"its {len(text)} characters are more than {_LONGEST}")
        self._text = text
        self._at = 0
        self._kind: str | None = None
        self.current = ""
        """The current token; empty at the end."""
        self.next()

    def next(self) -> str:
        """Return the current token, and go on to the next one."""
        passed, self._kind, self.current = self.current, None, ""
        while self._kind is None and self._at < len(self._text):
            match = _TOKEN.match(self._text, self._at)
            if match is None:
                self.current = self._text[self._at]
                raise self.error("expected a name, a number or a symbol")
            self._at, self._kind, self.current = match.end(), match.lastgroup, match[0]
            if self.current == "/" and self._text.startswith("*", self._at):
                raise self.error("expected the end of a comment")
        if self._kind is None:
            self.current = ""
        return passed

    def take(self, token: str) -> bool:
        """Go on if this is the current token."""
        if self.current != token:
            return False
        self.next()
        return True

    def expect(self, token: str) -> None:
        """Go on if this is the current token, else raise."""
        if not self.take(token):
            raise self.error(f"expected {token!r}")

    def word(self, *, dotted: bool = False) -> str:
        """Return the current token if it is a name, which has dots only if `dotted`."""
        if self._kind != "word" or (not dotted and "." in self.current):
            raise self.error("expected a name")
        return self.next()

    def integer(self) -> int:
        """Return the current token as a whole number: decimal, octal or hexadecimal."""
        sign = -1 if self.take("-") else 1
        try:
            value = int(self.current, 8 if re.fullmatch(r"0\d+", self.current) else 0)
        except ValueError:
            raise self.error("expected a whole number") from None
        self.next()
        return sign * value

    def text(self) -> str:
        """Return the current token without its quotes."""
        if self._kind != "text":
            raise self.error("expected a text in quotes")
        return self.next()[1:-1]

    def skip_statement(self) -> None:
        """Skip to the end of a statement: its semicolon, or the end of its block in braces."""
        while not self.take(";"):
            if self.current == "{":
                self.skip_block()
                return
            if self.current in _CLOSING:
                self.skip_block()
            elif self.current == "":
                raise self.error("expected ';'")
            else:
                self.next()

    def skip_options(self) -> None:
        """Skip the options of a field or of an enum's value, in square brackets, if there are any."""
        if self.current == "[":
            self.skip_block()

    def skip_block(self) -> None:
        """Skip a block in brackets of any kind, with the blocks in it."""
        closing = [_CLOSING[self.next()]]
        while closing:
            if self.current == "":
                raise self.error(f"expected {closing[-1]!r}")
            if self.current in _CLOSING:
                closing.append(_CLOSING[self.current])
            elif self.current == closing[-1]:
                closing.pop()
            self.next()

    def error(self, expected: str) -> ProtoTextError:
        """Return an error at the current token."""
        line = self._text.count("\n", 0, self._at) + 1
        return ProtoTextError(
            f"line {line}: {expected}, found {repr(self.current[:40]) if self.current else 'the end'}"
        )


class _Parser:
    """Parses one file by recursive descent; only messages recurse."""

    def __init__(self, name: str, text: str) -> None:
        self._tokens = _Tokens(text)
        self._file = FileDescriptorProto(name=name, syntax="proto2")

    def parse(self) -> FileDescriptorProto:
        tokens, file = self._tokens, self._file
        if tokens.current == "edition":
            raise ProtoTextError(
                "it is written in an edition; register it as proto2 or proto3, or use a registry that returns "
                "serialized descriptors"
            )
        if tokens.take("syntax"):
            tokens.expect("=")
            file.syntax = tokens.text()
            if file.syntax not in ("proto2", "proto3"):
                raise ProtoTextError(f'its syntax is "{file.syntax}", not "proto2" or "proto3"')
            tokens.expect(";")
        statements: dict[str, Callable[[], None]] = {
            "message": lambda: self._message(file.message_type.add(), 1),
            "enum": lambda: self._enum(file.enum_type.add()),
            "package": self._package,
            "import": self._import,
            ";": lambda: None,
        }
        while tokens.current:
            statement = statements.get(tokens.current)
            if statement is not None:
                tokens.next()
                statement()
            elif tokens.current in ("option", "service", "extend"):
                tokens.skip_statement()
            else:
                raise tokens.error("expected a statement such as message")
        return file

    def _package(self) -> None:
        self._file.package = self._tokens.word(dotted=True)
        self._tokens.expect(";")

    def _import(self) -> None:
        tokens, file = self._tokens, self._file
        if tokens.take("public"):
            file.public_dependency.append(len(file.dependency))
        else:
            tokens.take("weak")
        file.dependency.append(tokens.text())
        tokens.expect(";")

    def _message(self, message: DescriptorProto, depth: int) -> None:
        message.name = self._tokens.word()
        self._message_body(message, depth)

    def _message_body(self, message: DescriptorProto, depth: int) -> None:
        tokens = self._tokens
        if depth > _DEEPEST:
            raise tokens.error(f"expected at most {_DEEPEST} messages within each other")
        tokens.expect("{")
        statements: dict[str, Callable[[], None]] = {
            "message": lambda: self._message(message.nested_type.add(), depth + 1),
            "enum": lambda: self._enum(message.enum_type.add()),
            "oneof": lambda: self._oneof(message, depth),
            ";": lambda: None,
        }
        optional: list[FieldDescriptorProto] = []
        while not tokens.take("}"):
            statement = statements.get(tokens.current)
            if statement is not None:
                tokens.next()
                statement()
            elif tokens.current in ("option", "reserved", "extensions", "extend"):
                tokens.skip_statement()
            else:
                explicit = tokens.current == "optional" and self._file.syntax == "proto3"
                field = self._field(message, depth)
                if explicit and field is not None:
                    optional.append(field)
        _add_synthetic_oneofs(message, optional)

    def _field(self, message: DescriptorProto, depth: int, oneof: int | None = None) -> FieldDescriptorProto | None:
        """Parse a field into a message, and return it; None for a group, which no feature can be."""
        tokens = self._tokens
        label = _LABELS.get(tokens.current) if oneof is None else None
        if label is not None:
            tokens.next()
        kind = tokens.word(dotted=True)
        if kind == "group":
            self._group(message.nested_type.add(), depth)
            return None
        key, value = self._map_types() if kind == "map" and tokens.current == "<" else ("", "")
        field = message.field.add(name=tokens.word(), label=label or FieldDescriptorProto.LABEL_OPTIONAL)
        if key:
            entry = message.nested_type.add(name=_entry_name(field.name))
            entry.options.map_entry = True
            for number, (name, each) in enumerate((("key", key), ("value", value)), start=1):
                _set_type(entry.field.add(name=name, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL), each)
            field.label = FieldDescriptorProto.LABEL_REPEATED
            kind = entry.name
        _set_type(field, kind)
        self._number(field)
        if oneof is not None:
            field.oneof_index = oneof
        tokens.skip_options()
        tokens.expect(";")
        return field

    def _number(self, field: Any) -> None:
        """Parse `= number` into a field or a value of an enum."""
        self._tokens.expect("=")
        number = self._tokens.integer()
        if not -(2**31) <= number < 2**31:
            raise self._tokens.error("expected a number of 32 bits before")
        field.number = number

    def _map_types(self) -> tuple[str, str]:
        self._tokens.expect("<")
        key = self._tokens.word()
        self._tokens.expect(",")
        value = self._tokens.word(dotted=True)
        self._tokens.expect(">")
        return key, value

    def _group(self, message: DescriptorProto, depth: int) -> None:
        """Parse a group: its message counts among the nested ones, and its field is left out."""
        tokens = self._tokens
        message.name = tokens.word()
        tokens.expect("=")
        tokens.integer()
        tokens.skip_options()
        self._message_body(message, depth + 1)

    def _oneof(self, message: DescriptorProto, depth: int) -> None:
        tokens, index = self._tokens, len(message.oneof_decl)
        message.oneof_decl.add(name=tokens.word())
        tokens.expect("{")
        while not tokens.take("}"):
            if tokens.current == "option":
                tokens.skip_statement()
            elif not tokens.take(";"):
                self._field(message, depth, index)

    def _enum(self, enum: EnumDescriptorProto) -> None:
        tokens = self._tokens
        enum.name = tokens.word()
        tokens.expect("{")
        while not tokens.take("}"):
            if tokens.current in ("option", "reserved"):
                tokens.skip_statement()
            elif not tokens.take(";"):
                value = enum.value.add(name=tokens.word())
                self._number(value)
                tokens.skip_options()
                tokens.expect(";")
        if len({value.number for value in enum.value}) < len(enum.value):
            enum.options.allow_alias = True


def _set_type(field: FieldDescriptorProto, kind: str) -> None:
    """Set a scalar type, or the name of a message or enum, which the descriptor pool distinguishes."""
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type_name = kind


def _entry_name(field: str) -> str:
    """Return the name that protoc gives to the entries of a map: `by_id` becomes `ByIdEntry`."""
    return "".join(part[:1].upper() + part[1:] for part in field.split("_")) + "Entry"


def _add_synthetic_oneofs(message: DescriptorProto, fields: list[FieldDescriptorProto]) -> None:
    """Give each optional field of proto3 a oneof, behind all others, by which its presence is known."""
    names = {each.name for each in (*message.field, *message.oneof_decl)}
    for field in fields:
        name = field.name if field.name.startswith("_") else f"_{field.name}"
        while name in names:
            name = f"X{name}"
        names.add(name)
        field.proto3_optional = True
        field.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=name)
