# SPDX-License-Identifier: Apache-2.0
"""A peer that has the key and speaks ZMTP with CURVE (ZeroMQ RFC 25, 26) as it likes: libzmq itself
sends no message before its last frame is there."""

import ctypes
import itertools
import os
import re
import socket
from pathlib import Path

from zmq.utils import z85

from omni_connector.net.keys import ClusterKey

_FOUND = re.search(r"/\S*libsodium\S*", Path("/proc/self/maps").read_text())
AVAILABLE = _FOUND is not None


class RawPeer:
    """A connection beyond its handshake.

    Args:
        port: on loopback.
        key: what both have.
    """

    def __init__(self, port: int, key: ClusterKey) -> None:
        assert _FOUND is not None
        self._sodium = ctypes.CDLL(_FOUND[0])
        self._nonces = itertools.count(1)
        public, secret = z85.decode(key.public), z85.decode(key.secret)
        ours, self._secret = self._keypair()
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=10.0)
        self.socket.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(52, b"\0"))
        self._read(64)
        short = self._short()
        handshake = self._box(bytes(64), b"CurveZMQHELLO---" + short, public, self._secret)
        self._command(b"\x05HELLO\x01\x00" + bytes(72) + ours + short + handshake)
        handshake_reply = self._frame()
        opened = self._open(
            handshake_reply[24:], b"WELCOME-" + handshake_reply[8:24], public, self._secret
        )
        self._theirs, cookie = opened[:32], opened[32:]
        long = os.urandom(16)
        vouch = long + self._box(ours + public, b"VOUCH---" + long, self._theirs, secret)
        short = self._short()
        metadata = b"\x0bSocket-Type\x00\x00\x00\x06DEALER"
        nonce = b"CurveZMQINITIATE" + short
        boxed = self._box(public + vouch + metadata, nonce, self._theirs, self._secret)
        self._command(b"\x08INITIATE" + cookie + short + boxed)
        assert self._frame().startswith(b"\x05READY")

    def send(self, content: bytes, *, more: bool) -> None:
        """Send one frame of a message."""
        short = self._short()
        nonce = b"CurveZMQMESSAGEC" + short
        boxed = self._box(bytes([more]) + content, nonce, self._theirs, self._secret)
        body = b"\x07MESSAGE" + short + boxed
        self.socket.sendall(b"\x02" + len(body).to_bytes(8, "big") + body)

    def close(self) -> None:
        """Hang up."""
        self.socket.close()

    def _short(self) -> bytes:
        return next(self._nonces).to_bytes(8, "big")

    def _command(self, body: bytes) -> None:
        flag, width = (4, 1) if len(body) < 256 else (6, 8)
        self.socket.sendall(bytes([flag]) + len(body).to_bytes(width, "big") + body)

    def _frame(self) -> bytes:
        (flag,) = self._read(1)
        return self._read(int.from_bytes(self._read(8 if flag & 2 else 1), "big"))

    def _read(self, size: int) -> bytes:
        got = b""
        while len(got) < size:
            part = self.socket.recv(size - len(got))
            assert part, "the server hung up"
            got += part
        return got

    def _keypair(self) -> tuple[bytes, bytes]:
        public, secret = ctypes.create_string_buffer(32), ctypes.create_string_buffer(32)
        assert self._sodium.crypto_box_keypair(public, secret) == 0
        return public.raw, secret.raw

    def _box(self, text: bytes, nonce: bytes, public: bytes, secret: bytes) -> bytes:
        out, size = ctypes.create_string_buffer(len(text) + 16), ctypes.c_ulonglong(len(text))
        assert self._sodium.crypto_box_easy(out, text, size, nonce, public, secret) == 0
        return out.raw

    def _open(self, boxed: bytes, nonce: bytes, public: bytes, secret: bytes) -> bytes:
        out, size = ctypes.create_string_buffer(len(boxed) - 16), ctypes.c_ulonglong(len(boxed))
        assert self._sodium.crypto_box_open_easy(out, boxed, size, nonce, public, secret) == 0
        return out.raw
