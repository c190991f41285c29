"""The exceptions of the client."""

# No connection was made; or a connection was made, and nobody knows whether the server got the request.
LOST = ("UNREACHABLE", "NO_REPLY")


class RefitError(Exception):
    """A server refused a call, or did not reply.

    status: HTTP status; 0 where no whole reply came.
    code: refit's own code (`WEIGHTS_TORN`, `QUEUE_FULL`, ... : src/errors.ts), or `UNREACHABLE`, `NO_REPLY`, `TIMEOUT`,
    `BAD_REPLY`, or `HTTP_<status>` where the reply has no code.
    message: the text of the reply. param: the field at fault, or None. url: the server's.
    """

    def __init__(self, status, code, message, param=None, url=""):
        super().__init__(f"{url}: {status or 'no reply'} {code}: {message}" if url else message)
        self.status, self.code, self.message, self.param, self.url = status, code, message, param, url

    def __reduce__(self):
        return type(self), (self.status, self.code, self.message, self.param, self.url)


class EnginesFailed(RefitError):
    """Some of several engines failed. errors: {url: exception}; status and code are those of the first."""

    def __init__(self, errors):
        first = next(iter(errors.values()))
        message = "; ".join(str(error) for error in errors.values())
        super().__init__(getattr(first, "status", 0), getattr(first, "code", "NO_REPLY"), message)
        self.errors = errors

    def __reduce__(self):
        return type(self), (self.errors,)
