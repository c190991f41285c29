"""Shared by the benchmarks of updates: rows of a table, written as they come, and parts that may fail."""

import argparse
import pathlib
import sys
import time

import models

ROWS, OUT = [], []


def row(figure, ours, other, ratio, goal=None, most=False):
    """`most`: the ratio may be at most the goal; else it must be at least the goal. goal None: reported without a
    goal."""
    asked = "" if goal is None else f"{'at most' if most else 'at least'} {goal:.2f}"
    reached = "" if goal is None else "yes" if (ratio <= goal if most else ratio >= goal) else "NO"
    tell(f"| {figure} | {ours} | {other} | {ratio:.2f} | {asked} | {reached} |")


def tell(line):
    ROWS.append(line)
    print(line, flush=True)


def attempt(part, run, failed, server=None):
    """A failure becomes a row, and the next part runs."""
    began = time.monotonic()
    try:
        run()
    except Exception as error:
        failed.append(part)
        ROWS.append(f"| {part} | FAILED: {' '.join(str(error).split())[:400]} | | | | NO |")
        log = f"\nthe server's log ends with\n{server.tail()}" if server is not None else ""
        print(
            f"{part} FAILED\n{type(error).__name__}: {error}\n{chr(10).join(getattr(error, '__notes__', []))}{log}",
            flush=True,
        )
    print(f"({part} took {time.monotonic() - began:.0f} s)", flush=True)
    keep()


def keep():
    if OUT:
        pathlib.Path(OUT[0]).write_text("\n".join(ROWS) + "\n")


def read_options(description, parts, real=False):
    """The options of the command line, and the chosen parts. `real`: only on GPUs and with real sizes, with a choice of
    ranks."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--only", action="append", default=[], metavar="WORD")
    parser.add_argument("--device", choices=["cuda"] if real else ["cuda", "cpu"], default="cuda")
    parser.add_argument("--model", choices=[*models.REAL] if real else [*models.REAL, "tiny"], default="qwen3-8b")
    if real:
        parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--folder")
    parser.add_argument("--out")
    options = parser.parse_args()
    options.torch_device = "cuda:0" if options.device == "cuda" else "cpu"
    chosen = [part for part in parts if not options.only or any(word in part for word in options.only)]
    if not chosen:
        sys.exit(f"no part's name contains {' or '.join(options.only)}; there are {', '.join(parts)}")
    OUT.extend([options.out] if options.out else [])
    return options, chosen
