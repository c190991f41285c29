"""The other end of tensor_process.Process: a program that is told what to do by lines of JSON, and answers in lines of
JSON."""

import ctypes
import gc
import json
import os
import sys
import traceback


def answer(performer, collect=True):
    """Calls the performer's methods until nobody asks any more. `collect`: what a failed call's frames held is let go
    before its answer. Words of the program go to the standard error."""
    # Nobody leaves it behind: it goes with the process that started it.
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
