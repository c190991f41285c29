"""A list of named tests that run one after another and end in a table."""

import json
import sys
import time
import traceback

TESTS = []


class Skip(Exception):
    """Why a test does not apply to this machine or these options."""


def test(name, *, gpu=False, real=False):
    """`gpu`: says nothing on a CPU. `real`: needs real sizes (gigabytes, minutes)."""

    def add(function):
        TESTS.append((name, function, gpu, real))
        return function

    return add


def check(condition, message):
    if not condition:
        raise AssertionError(message)


def run(options):
    """Returns [(name, outcome, seconds, note)]; outcome is passed, failed or skipped."""
    rows = []
    chosen = [entry for entry in TESTS if not options.only or any(word in entry[0] for word in options.only)]
    if not chosen:
        sys.exit(f"no test's name contains {' or '.join(options.only)}; there are:\n" + "\n".join(f"  {name}" for name, *_ in TESTS))
    for name, function, gpu, real in chosen:
        print(f"--- {name}", flush=True)
        began = time.monotonic()
        outcome, note = "passed", ""
        try:
            if gpu and options.device == "cpu":
                raise Skip("asks about a card")
            if real and options.small:
                raise Skip("--small")
            note = function(options) or ""
        except Skip as reason:
            outcome, note = "skipped", str(reason)
        except Exception as error:  # the next test may tell more
            outcome, note = "failed", f"{type(error).__name__}: {error}".splitlines()[0]
            traceback.print_exc(file=sys.stdout)
        rows.append((name, outcome, time.monotonic() - began, note))
        print(f"{outcome} in {rows[-1][2]:.1f} s{': ' + note if note else ''}", flush=True)
    if options.report:
        with open(options.report, "w") as file:
            json.dump([dict(name=name, outcome=outcome, seconds=seconds, note=note) for name, outcome, seconds, note in rows], file)
    return rows
