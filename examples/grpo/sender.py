"""Sends the model's weights to refit by any transport of its client, and carries a run over the end of the server."""

import contextlib
import re
import shutil
import time
from pathlib import Path

from refit import RefitError

# No reply, or one that says "later": the server has ended, starts, or has torn weights.
LOST = (0, 502, 503, 504)


class Plain:
    """A transport of the client that needs nothing besides its name."""

    def __init__(self, client, name, folder):
        self.options = {"transport": name}

    def sent(self, label):
        """The server has all weights under this label."""

    def lost(self):
        """The server may have ended."""

    def close(self):
        """The run is over."""


class Kept(Plain):
    """The model's own memory stays open in the server; from the second update on, a request is a few bytes."""

    def __init__(self, client, name, folder):
        super().__init__(client, name, folder)
        self.client, self.options["in_place"] = client, True

    def close(self):
        with contextlib.suppress(RefitError):
            self.client.release_kept()


class Group(Plain):
    """A broadcast; the group is made again after a failure."""

    def __init__(self, client, name, folder):
        self.group = client.group(timeout_s=60)
        self.options = {"group": self.group}

    def lost(self):
        self.group.drop()

    def close(self):
        with contextlib.suppress(RefitError):
            self.group.leave()


class File(Plain):
    """Files in a folder that the server reads; those of the step before are removed."""

    def __init__(self, client, name, folder):
        if folder is None:
            raise SystemExit("--transport file needs --folder, a folder inside the server's --model-root")
        self.folder, self.label, self.options = Path(folder), None, {"folder": folder}

    def sent(self, label):
        if self.label not in (None, label):
            shutil.rmtree(self.folder / re.sub(r"[^\w.-]", "_", self.label), ignore_errors=True)
        self.label = label


# One more transport of the client is one more line.
TRANSPORTS = {"handles": Plain, "kept": Kept, "upload": Plain, "group": Group, "file": File}


class Sender:
    """note: gets a text when something unusual happened."""

    def __init__(self, client, model, transport, folder=None, patience=600, note=print):
        self.client, self.model, self.patience, self.note = client, model, patience, note
        self.transport = TRANSPORTS[transport](client, transport, folder)
        self.label, self.running, self.reports = None, False, []

    def send(self, label, running=False):
        """Replaces the weights, however often the server ends meanwhile. running: requests go on with the new ones."""
        self.label, self.running = label, running
        self.insist(self.once)

    def once(self):
        pause = self.client.paused("in_place") if self.running else contextlib.nullcontext()
        with pause, self.client.update(version=self.label, **self.transport.options) as update:
            update.add_all(self.model)
        self.transport.sent(self.label)
        self.reports.append(update.report)

    def insist(self, call):
        """call() until it succeeds. After a failure the server gets the weights again before the next try, because it
        may have been started again with those of its folder. A third refusal is raised: it would be repeated for
        ever."""
        refusals, deadline = 0, None
        while True:
            try:
                if deadline is not None:
                    self.transport.lost()
                    if self.label is not None:
                        self.once()
                    self.note("the server is there, with the weights of this step")
                return call()
            except RefitError as error:
                if deadline is None:
                    deadline = time.monotonic() + self.patience
                    self.note(f"the server fails, waiting for it: {error}")
                refusals += error.status not in LOST
                if refusals == 3 or time.monotonic() > deadline:
                    raise
                time.sleep(0.25)

    def close(self):
        self.transport.close()
