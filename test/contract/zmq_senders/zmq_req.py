"""A ZeroMQ REQ socket like checkpoint-engine's: libzmq's (pyzmq) or, if that is not installed, a small one for a single
peer.

The small one speaks ZMTP itself (https://rfc.zeromq.org/spec/37/).
"""

import socket
import struct

try:
    import zmq
except ImportError:
    zmq = None


class Gone(Exception):
    """The peer closed the connection or sent nothing in time."""


class LibzmqReq:
    def __init__(self, endpoint, timeout_s):
        self.socket = zmq.Context.instance().socket(zmq.REQ)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, int(timeout_s * 1000))
        self.socket.setsockopt(zmq.SNDTIMEO, int(timeout_s * 1000))
        self.socket.bind(endpoint)

    def send(self, data):
        try:
            self.socket.send(data)
        except zmq.Again:
            raise Gone("nobody took the message") from None

    def recv(self):
        try:
            return self.socket.recv()
        except zmq.Again:
            raise Gone("no reply") from None

    def close(self):
        self.socket.close()


class PlainReq:
    GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)

    def __init__(self, endpoint, timeout_s):
        assert endpoint.startswith("ipc://")
        name = endpoint[len("ipc://") :]
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.settimeout(timeout_s)
        self.listener.bind("\0" + name[1:] if name.startswith("@") else name)
        self.listener.listen(1)
        self.timeout_s, self.peer = timeout_s, None

    def connected(self):
        if self.peer is None:
            try:
                self.peer, _ = self.listener.accept()
            except TimeoutError:
                raise Gone("nobody took the message") from None
            self.peer.settimeout(self.timeout_s)
            ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 3) + b"REQ\x08Identity" + bytes(4)
            self.peer.sendall(self.GREETING + bytes([4, len(ready)]) + ready)
            assert self.take(64)[:1] == b"\xff"
            flags, body = self.frame()
            assert flags & 4 and body.startswith(b"\x05READY"), body
        return self.peer

    def take(self, count):
        data = b""
        while len(data) < count:
            try:
                piece = self.peer.recv(count - len(data))
            except TimeoutError:
                raise Gone("no reply") from None
            if not piece:
                raise Gone("the peer closed the connection")
            data += piece
        return data

    def frame(self):
        flags = self.take(1)[0]
        (length,) = struct.unpack(">Q", self.take(8)) if flags & 2 else self.take(1)
        return flags, self.take(length)

    def send(self, data):
        head = bytes([0, len(data)]) if len(data) < 256 else bytes([2]) + struct.pack(">Q", len(data))
        try:
            self.connected().sendall(b"\x01\x00" + head + data)
        except (BrokenPipeError, ConnectionResetError):
            raise Gone("the peer closed the connection") from None

    def recv(self):
        assert self.frame() == (1, b""), "a reply begins with an empty frame"
        flags, body = self.frame()
        assert flags & ~2 == 0, flags
        return body

    def close(self):
        for one in (self.peer, self.listener):
            if one is not None:
                one.close()


KINDS = {**({"libzmq": LibzmqReq} if zmq else {}), "plain": PlainReq}


def Req(endpoint, timeout_s=120, kind=None):
    return KINDS[kind or next(iter(KINDS))](endpoint, timeout_s)
