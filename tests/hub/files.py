"""Small files that are what their endings say."""

import json
import struct
import zlib


def png(*chunks: tuple[bytes, bytes], pixels: bytes = b"\0\0") -> bytes:
    """A picture of one grey pixel, with further chunks before it."""
    first = (b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0))
    parts = [first, *chunks, (b"IDAT", zlib.compress(pixels)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )


def weights(data: bytes = b"", **remarks: str) -> bytes:
    """Weights with one tensor of these bytes."""
    tensor = {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}
    header = json.dumps({"__metadata__": remarks, "a": tensor}).encode()
    return len(header).to_bytes(8, "little") + header + data
