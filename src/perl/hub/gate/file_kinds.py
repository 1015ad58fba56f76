"""What a published file holds as text, and whether it is what its ending says.

name, bytes -> passages of text, or why it is no such file

Of weights the header is read, of a picture the remarks; JSON and YAML are read as data, so that no escape hides a word,
and every pair of key and value counts, a key's second one too.
"""

import json
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from perl.errors import first_line
from perl.recipe.plain_yaml import plain_value, refuse_tags

_LARGEST_HEADER = 100_000_000  # of weights, as safetensors itself says
_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16}
_BITS |= {"BF16": 16, "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F4": 4}
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Chunks of a picture that hold numbers, or text that is read; no others are let through.
_NUMBERS = {b"PLTE", b"tRNS", b"gAMA", b"cHRM", b"sRGB", b"pHYs", b"sBIT", b"bKGD", b"hIST", b"tIME"}
_REMARKS = {b"tEXt", b"zTXt", b"iTXt"}
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type
_LARGEST_PICTURE = 200_000_000  # bytes of its pixels
_LARGEST_REMARK = 1_000_000
# They turn text around, so that it reads otherwise than it is; and what moves a terminal's cursor.
_DECEITFUL = frozenset(map(chr, [*range(9), 11, 12, *range(14, 32), *range(0x7F, 0xA0), *range(0x202A, 0x202F)]))
_DECEITFUL |= frozenset(map(chr, range(0x2066, 0x206A)))


class MalformedFileError(ValueError):
    """A file is not what its ending says."""


@dataclass(frozen=True)
class Passage:
    """A piece of a file's text.

    Attributes:
        text: A line, or ``key: "value"`` of data.
        line: Where, from 1; 0: it is looked up in ``whole``.
        whole: The file's text; empty: it has no lines.
    """

    text: str
    line: int = 0
    whole: str = ""

    def find_line(self) -> int:
        """The first line in which it stands as it is; 0: it is written otherwise, or there are no lines."""
        return self.line or (_line_of(self.text, self.whole) if self.whole else 0)


def read_passages(name: str, content: bytes) -> list[Passage]:
    """The text of a file.

    Args:
        name: Its ending says how it is read; whatever has none of ours is text.
        content: All of it.

    Raises:
        MalformedFileError: It is not what its ending says.
    """
    return _READERS.get(PurePosixPath(name).suffix, _text)(content)


def lines_of(content: bytes) -> list[Passage]:
    """Lines of whatever it is."""
    lines = content.decode("utf-8", "replace").split("\n")
    return [Passage(line, number) for number, line in enumerate(lines, 1)]


def _text(content: bytes) -> list[Passage]:
    text = _decoded(content)
    deceitful = sorted(_DECEITFUL.intersection(text))
    if deceitful:
        line = text[: text.index(deceitful[0])].count("\n") + 1
        raise MalformedFileError(f"holds the control character U+{ord(deceitful[0]):04X} in line {line}")
    return [Passage(line, number) for number, line in enumerate(text.split("\n"), 1)]


def _json(content: bytes) -> list[Passage]:
    text = _decoded(content)
    return [Passage(pair, whole=text) for pair in _pairs_of(_loaded(text))]


def _json_lines(content: bytes) -> list[Passage]:
    found: dict[str, int] = {}
    for number, line in enumerate(_decoded(content).split("\n"), 1):
        if line.strip():
            try:
                for pair in _pairs_of(_loaded(line)):
                    found.setdefault(pair, number)
            except MalformedFileError as error:
                raise MalformedFileError(f"{error} in line {number}") from None
    return [Passage(pair, number) for pair, number in found.items()]


def _yaml(content: bytes) -> list[Passage]:
    """As data, and line by line, for what stands in remarks."""
    text = _decoded(content)
    try:
        refuse_tags(text, "")  # an alias may stand for any number of values
        seen = _pairs_of(plain_value(text))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise MalformedFileError(f"is not valid YAML: {first_line(error)}") from None
    return [*_text(content), *(Passage(pair, whole=text) for pair in seen)]


def _weights(content: bytes) -> list[Passage]:
    """The header; the tensors must fill the rest without a gap, in which anything could be."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(_LARGEST_HEADER, len(content) - 8):
        raise MalformedFileError("is not a valid safetensors file: it has no whole header")
    text = _decoded(content[8 : 8 + length])
    seen = _pairs_of(_loaded(text))
    header = json.loads(text)
    if not isinstance(header, dict):
        raise MalformedFileError("is not a valid safetensors file: its header is not a mapping")
    end = 0
    try:
        tensors = [facts for name, facts in header.items() if name != "__metadata__"]
        for facts in sorted(tensors, key=lambda facts: facts["data_offsets"]):
            size = _BITS[facts["dtype"]]
            for length_of_axis in facts["shape"]:
                size *= length_of_axis
            first, last = facts["data_offsets"]
            if first != end or (last - first) * 8 != size:
                raise ValueError("its tensors do not lie one behind the other")
            end = last
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedFileError(f"is not a valid safetensors file: {type(error).__name__}: {error}") from None
    if end != len(content) - 8 - length:
        raise MalformedFileError("is not a valid safetensors file: it has bytes that are of no tensor")
    return [Passage(pair) for pair in seen]


def _picture(content: bytes) -> list[Passage]:
    """The remarks of a PNG, whose pixels can be read and behind which nothing follows."""
    found, pixels, size, held, over = [], zlib.decompressobj(), 0, 0, False
    for kind, data in _chunks(content):
        if size == 0:
            size = _bytes_of_pixels(kind, data)
        elif kind == b"IDAT":
            if held > size:  # decompress(data, 0) would know no end
                break
            try:
                held += len(pixels.decompress(data, size - held + 1))
            except zlib.error as error:
                raise MalformedFileError(f"is not a valid PNG: {error}") from None
        elif kind in _REMARKS:
            found.append(Passage(_remark(kind, data)))
        elif kind == b"IEND":
            over = True
        elif kind not in _NUMBERS:
            raise MalformedFileError(f"is not a PNG that perl would draw: it holds {kind.decode('ascii', 'replace')!r}")
    if not over or held != size or not pixels.eof or pixels.unused_data:
        raise MalformedFileError("is not a valid PNG: its pixels are not those of its size")
    return found


def _chunks(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    place = len(_SIGNATURE)
    if not content.startswith(_SIGNATURE):
        raise MalformedFileError("is not a valid PNG")
    kind = b""
    while place < len(content):
        if kind == b"IEND" or len(content) - place < 12:
            raise MalformedFileError("is not a valid PNG: something follows its end")
        length, kind = struct.unpack(">I4s", content[place : place + 8])
        data, check = content[place + 8 : place + 8 + length], content[place + 8 + length : place + 12 + length]
        if len(data) != length or check != struct.pack(">I", zlib.crc32(kind + data)):
            raise MalformedFileError("is not a valid PNG: a chunk is not whole")
        place += 12 + length
        yield kind, data


def _bytes_of_pixels(kind: bytes, data: bytes) -> int:
    if kind != b"IHDR" or len(data) != 13:
        raise MalformedFileError("is not a valid PNG: it does not begin with its size")
    width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", data)
    size = height * (1 + (width * depth * _CHANNELS.get(colour, 0) + 7) // 8)
    if interlaced or colour not in _CHANNELS or not 0 < size <= _LARGEST_PICTURE or not width:
        raise MalformedFileError("is not a PNG that perl would draw")
    return int(size)


def _remark(kind: bytes, data: bytes) -> str:
    """Keyword and text, whatever way they are packed."""
    keyword, _, rest = data.partition(b"\0")
    packed = kind == b"zTXt" or (kind == b"iTXt" and rest[:1] == b"\1")
    if kind == b"iTXt":
        language, _, rest = rest[2:].partition(b"\0")
        translated, _, rest = rest.partition(b"\0")
        keyword = b" ".join((keyword, language, translated))
    if packed:
        try:
            opened = zlib.decompressobj()
            rest = opened.decompress(rest[1:] if kind == b"zTXt" else rest, _LARGEST_REMARK)
        except zlib.error as error:
            raise MalformedFileError(f"is not a valid PNG: {error}") from None
        if not opened.eof:
            raise MalformedFileError("is not a PNG that perl would draw: it holds a long remark")
    return f"{keyword.decode('utf-8', 'replace')}: {rest.decode('utf-8', 'replace')}"


def _decoded(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise MalformedFileError("is not UTF-8") from None


class _Pairs(list[tuple[str, Any]]):
    """A JSON object, all of whose pairs are kept."""


def _loaded(text: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError) as error:
        raise MalformedFileError(f"is not valid JSON: {str(error)[:80]}") from None


def _pairs_of(data: object) -> list[str]:
    """``key: "value"`` of every text in data, each once and in order; what lies in a list has the list's key."""
    seen: dict[str, None] = {}
    rest: list[tuple[str, object]] = [("", data)]
    while rest:  # not by recursion: data may be deep
        key, value = rest.pop()
        if isinstance(value, str):
            seen.setdefault(f'{key}: "{value}"' if key else value)
        elif isinstance(value, _Pairs | dict):
            pairs = list(value.items() if isinstance(value, dict) else value)
            seen.update(dict.fromkeys(str(name) for name, inner in pairs if not isinstance(inner, str)))
            rest += reversed([(str(name), inner) for name, inner in pairs])
        elif isinstance(value, list):
            rest += reversed([(key, inner) for inner in value])
    return list(seen)


def _line_of(pair: str, text: str) -> int:
    """The first line of a file in which a pair's value stands as it is; 0: it is written otherwise."""
    value = pair.partition(': "')[2].removesuffix('"') or pair
    place = max(text.find(json.dumps(value)[1:-1]), text.find(json.dumps(value, ensure_ascii=False)[1:-1]))
    return text.count("\n", 0, place) + 1 if place >= 0 else 0


_READERS: dict[str, Callable[[bytes], list[Passage]]] = {
    ".json": _json,
    ".jsonl": _json_lines,
    ".yaml": _yaml,
    ".safetensors": _weights,
    ".png": _picture,
}
