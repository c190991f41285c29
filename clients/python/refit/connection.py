"""HTTP: one request, its reply, and its errors."""

import contextlib
import http.client
import json
import os
import re
import select
import socket
import ssl
import time
import urllib.parse

from .errors import LOST, RefitError

# Seconds for which an idle connection may serve the next request, where the server keeps it for much longer.
MOST_IDLE = 1
KEPT_FOR = 4


class Connection:
    """Requests to one url, which may have a path; Client documents the parameters."""

    def __init__(self, url, api_key=None, admin_key=None, timeout=None, retries=2):
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url: expected http://host:port, got {url!r}")
        self.url = url.rstrip("/")
        self.host, self._tls, self._prefix = parts.hostname, parts.scheme == "https", parts.path.rstrip("/")
        self.port = parts.port or (443 if self._tls else 80)
        self._api_key, self._admin_key = api_key, admin_key or api_key
        self.timeout, self.retries = timeout, retries
        self._context, self._idle = None, []

    def call(self, method, path, body=None, admin=False, retry=None, headers=None, length=None):
        """Returns the reply: the content of its JSON, or a text. Raises RefitError.

        body: None, an object that becomes JSON, or a function that returns an iterable of buffers, `length` bytes in
        all. retry: whether the call may be repeated when no reply came; default: only GET. A call that was answered, or
        that timed out, is never repeated.
        """
        tries = 1 + (self.retries if (method == "GET" if retry is None else retry) else 0)
        for attempt in range(tries):
            try:
                with self._open(method, path, body, admin, headers, length) as response:
                    return self._content(response)
            except RefitError as error:
                if error.code not in LOST or attempt + 1 == tries:
                    raise
                time.sleep(0.2 * 2**attempt)

    def json(self, method, path, body=None, **options):
        """Like `call`, for a route that replies with an object."""
        reply = self.call(method, path, body, **options)
        if not isinstance(reply, dict):
            message = f"{method} {path}: expected a JSON object, got {str(reply)[:200]!r}"
            raise RefitError(200, "BAD_REPLY", message, url=self.url)
        return reply

    @contextlib.contextmanager
    def _open(self, method, path, body=None, admin=False, headers=None, length=None):
        """The response, below 400, its body unread."""
        connection = self._take()
        try:
            if connection.sock is None:
                with self._named(f"{method} {path}", "UNREACHABLE"):
                    connection.connect()
            with self._named(f"{method} {path}", "NO_REPLY"):
                response = self._send(connection, method, path, body, admin, headers, length)
                if response.status >= 400:
                    raise self._refusal(response)
                yield response
            self._keep(connection, response)
        except BaseException:
            connection.close()
            raise

    def _take(self):
        """A connection that has just served another request, or a new one.

        The requests of an update follow each other, and a new connection costs as much as a request. A connection that
        has been idle for long can break under a request, so it serves no more."""
        while self._idle:
            connection, since, process = self._idle.pop()
            # A process that was forked has the same sockets.
            if process == os.getpid() and time.monotonic() - since < MOST_IDLE and connection.timeout == self.timeout:
                if not is_readable(connection.sock):
                    return connection
            connection.close()
        if not self._tls:
            return http.client.HTTPConnection(self.host, self.port, timeout=self.timeout)
        self._context = self._context or ssl.create_default_context()
        return http.client.HTTPSConnection(self.host, self.port, timeout=self.timeout, context=self._context)

    def _keep(self, connection, response):
        kept_for = re.search(r"timeout=(\d+)", response.headers.get("keep-alive", ""))
        whole = response.isclosed() and not response.will_close and connection.sock is not None
        if whole and kept_for is not None and int(kept_for[1]) >= KEPT_FOR:
            self._idle.append((connection, time.monotonic(), os.getpid()))
        else:
            connection.close()

    def _send(self, connection, method, path, body, admin, headers, length):
        headers = {"accept": "application/json", **(headers or {})}
        key = self._admin_key if admin else self._api_key
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        if callable(body):
            body, headers["content-length"] = body(), str(length)
        elif body is not None:
            body, headers["content-type"] = json.dumps(body).encode(), "application/json"
        # A server that refuses in the middle of a body has replied already, and its reply says more than a broken pipe.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.request(method, self._prefix + path, body, headers)
        return connection.getresponse()

    @contextlib.contextmanager
    def _named(self, what, code):
        """Turns errors of sockets and of HTTP into RefitError with a code."""
        try:
            yield
        except socket.timeout:
            message = f"{what}: no byte came for {self.timeout} s"
            raise RefitError(0, "TIMEOUT", message, url=self.url) from None
        except (OSError, http.client.HTTPException) as error:
            raise RefitError(0, code, f"{what}: {type(error).__name__}: {error}", url=self.url) from error

    def _content(self, response):
        text = response.read().decode(errors="replace")
        if "json" not in response.headers.get("content-type", ""):
            return text
        try:
            content = json.loads(text)
        except ValueError:
            raise RefitError(response.status, "BAD_REPLY", f"no JSON: {text[:200]!r}", url=self.url) from None
        if isinstance(content, dict) and content.get("success") is False:
            raise RefitError(response.status, "FAILED", str(content.get("message")), url=self.url)
        return content

    def _refusal(self, response):
        """Reads every form of error that servers have, and the error pages of proxies."""
        try:
            text = response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            text = f"its body broke off: {error}"
        try:
            content = json.loads(text)
        except ValueError:
            content = {}
        content = content if isinstance(content, dict) else {}
        inner = content.get("error") if isinstance(content.get("error"), dict) else {}
        texts = [inner.get("message"), *(content.get(key) for key in ("message", "error_message", "error", "detail"))]
        message = next((each for each in texts if each), text[:500])
        code = inner.get("code") if isinstance(inner.get("code"), str) else f"HTTP_{response.status}"
        return RefitError(response.status, code, str(message), content.get("param") or inner.get("param"), self.url)


def is_readable(sock):
    """True for an idle connection that the server has closed. Unlike select(), poll() takes any descriptor."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return len(poll.poll(0)) > 0
