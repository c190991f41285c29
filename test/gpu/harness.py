"""Named tests that run one after another and end in a table. A hanging test is ended, and all findings are always
printed."""

import faulthandler
import json
import os
import signal
import sys
import time
import traceback

TESTS = []
NOTHING_CHOSEN = 3  # exit status
ENDINGS = []
LIMIT_S, REAL_LIMIT_S = 150, 400
# After its limit a test gets an exception. If it cannot raise it (stuck in a driver's call), the program ends.
GRACE_S = 45


class Skip(Exception):
    """Why a test does not apply to this machine or these options."""


class TooLong(BaseException):
    """A test exceeded its limit. It is no Exception, so no handler in between catches it."""


def test(name, *, gpu=False, real=False, limit_s=None):
    """`gpu`: has no meaning on a CPU. `real`: needs real sizes (gigabytes, minutes). `limit_s`: its limit in
    seconds."""

    def add(function):
        TESTS.append((name, function, gpu, real, limit_s or (REAL_LIMIT_S if real else LIMIT_S)))
        return function

    return add


def at_end(name, function):
    """Called after the last test, whatever the outcomes. A failure gets a row of its own."""
    ENDINGS.append((name, function))


def check(condition, message):
    if not condition:
        raise AssertionError(message)


def wanted(name, options):
    return not options.only or any(word in name for word in options.only)


def run(options):
    """Returns [(name, outcome, seconds, note)]; outcome is passed, failed or skipped."""
    rows = []
    # Cheap tests come first.
    chosen = sorted((entry for entry in TESTS if wanted(entry[0], options)), key=lambda entry: entry[3])
    if not chosen:
        print(
            f"no test's name contains {' or '.join(options.only)}; there are:\n"
            + "\n".join(f"  {name}" for name, *_ in TESTS)
        )
        sys.exit(NOTHING_CHOSEN)
    until = time.monotonic() + options.within
    signal.signal(signal.SIGALRM, too_long)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    try:
        for name, function, gpu, real, limit_s in chosen:
            if time.monotonic() > until:
                rows.append((name, "skipped", 0.0, "not run: no time left"))
                print(f"--- {name}\nNOT RUN: --within is over", flush=True)
                continue
            write_report(options, [*rows, (name, "failed", 0.0, "it was running when the program ended")])
            rows.append(one(options, name, function, gpu, real, limit_s))
    finally:
        for name, function in ENDINGS:
            row = one(options, name, lambda _: function(), False, False, LIMIT_S)
            if row[1] == "failed":
                rows.append(row)
        write_report(options, rows)
    return rows


def one(options, name, function, gpu, real, limit_s):
    print(f"--- {name}", flush=True)
    began = time.monotonic()
    outcome, note = "passed", ""
    signal.alarm(limit_s)
    faulthandler.dump_traceback_later(limit_s + GRACE_S, exit=True, file=sys.stdout)
    try:
        if gpu and options.device == "cpu":
            raise Skip("asks about a card")
        if real and options.small:
            raise Skip("--small")
        note = function(options) or ""
    except Skip as reason:
        outcome, note = "skipped", str(reason)
    except (Exception, TooLong) as error:  # the next test may tell more
        outcome, note = "failed", f"{type(error).__name__}: {error}".splitlines()[0]
        traceback.print_exc(file=sys.stdout)
    finally:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()
    row = (name, outcome, time.monotonic() - began, note)
    print(
        f"{outcome.upper() if outcome != 'passed' else outcome} in {row[2]:.1f} s{': ' + note if note else ''}",
        flush=True,
    )
    return row


def too_long(*_):
    raise TooLong("it takes longer than it may; where it was, the lines above tell")


def write_report(options, rows):
    if not options.report:
        return
    with open(options.report + ".new", "w") as file:
        json.dump(
            [dict(name=name, outcome=outcome, seconds=seconds, note=note) for name, outcome, seconds, note in rows],
            file,
        )
    os.replace(options.report + ".new", options.report)
