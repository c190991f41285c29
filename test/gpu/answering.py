"""The other end of tensor_process.Process: a program that gets its calls as lines of JSON and replies with lines of
JSON."""

import ctypes
import gc
import json
import os
import sys
import traceback


def answer(performer, collect=True):
    """Calls the performer's methods until the input ends. `collect`: objects in a failed call's frames are released
    before its reply. The program's own output goes to the standard error."""
    # Collections need not walk the modules that have been imported, which takes 0.1 s or more.
    gc.freeze()
    gc.enable()
    # It ends with the process that started it.
    ctypes.CDLL(None).prctl(1, 9)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            reply = dict(result=getattr(performer, asked["do"])(**asked["with"]))
        except Exception:
            reply = dict(error=traceback.format_exc())
        if collect:
            gc.collect()
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
