"""Bodies of uploads. `parts` yields buffers of `length` bytes in all."""

import ctypes
import json
import os
import struct
import urllib.parse
import uuid

from .tensors import dtype_name

MIB = 1 << 20
SAFETENSORS_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


class PathBody:
    def __init__(self, path):
        self.path, self.length, self.name = path, os.path.getsize(path), os.path.basename(path)

    def parts(self):
        with open(self.path, "rb") as file:
            yield from iter(lambda: file.read(8 * MIB), b"")


class SafetensorsBody:
    """Tensors as a safetensors file: the header's length in eight bytes (little endian), the header as JSON, then the
    tensors' bytes (row-major)."""

    def __init__(self, named, name="model.safetensors"):
        self.name = name
        header, at, self.tensors = {}, 0, []
        for name, tensor in named:
            dtype = dtype_name(tensor.dtype)
            if dtype not in SAFETENSORS_DTYPES:
                known = ", ".join(SAFETENSORS_DTYPES)
                raise TypeError(f"{name}: {dtype} cannot be uploaded; cast it to one of {known}")
            size = tensor.numel() * tensor.element_size()
            header[name] = dict(dtype=SAFETENSORS_DTYPES[dtype], shape=list(tensor.shape), data_offsets=[at, at + size])
            at += size
            self.tensors.append(tensor)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self.head = struct.pack("<Q", len(text)) + text
        self.length = len(self.head) + at

    def parts(self):
        yield self.head
        for tensor in self.tensors:
            tensor = tensor.detach().cpu().contiguous()
            size = tensor.numel() * tensor.element_size()
            # Read the memory directly: numpy has no bfloat16, and may not be installed.
            if size > 0:
                yield memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


class JsonBody:
    def __init__(self, content, name):
        self.text, self.name = json.dumps(content).encode(), name
        self.length = len(self.text)

    def parts(self):
        yield self.text


class FormBody:
    """multipart/form-data (RFC 7578); fields stand before files. `numbered`: the files' names begin with their
    positions, so that all differ."""

    def __init__(self, fields, files, numbered=True):
        self.boundary = uuid.uuid4().hex
        self.pieces = [(self.head(name) + str(value).encode(), None) for name, value in fields.items()]
        self.pieces += [
            (self.head(f"file{i}", f"{i}-{file.name}" if numbered else file.name), file) for i, file in enumerate(files)
        ]
        sizes = [len(head) + (file.length if file else 0) + 2 for head, file in self.pieces]
        self.length = sum(sizes) + len(self.boundary) + 6

    def head(self, name, file=None):
        about = f'; filename="{urllib.parse.quote(file)}"\r\ncontent-type: application/octet-stream' if file else ""
        return f'--{self.boundary}\r\ncontent-disposition: form-data; name="{name}"{about}\r\n\r\n'.encode()

    def parts(self):
        for head, file in self.pieces:
            yield head
            if file:
                yield from file.parts()
            yield b"\r\n"
        yield f"--{self.boundary}--\r\n".encode()
