"""The options of grpo.py."""

import argparse
import os
from pathlib import Path

from sender import TRANSPORTS

ROOT = Path(__file__).resolve().parents[2]


def arguments(description, given=None):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="of refit, or of a gateway of several engines")
    parser.add_argument("--api-key", default=os.environ.get("REFIT_API_KEY"))
    parser.add_argument("--model", default=str(ROOT / "models/adder-base"))
    parser.add_argument("--transport", choices=TRANSPORTS, default="handles")
    parser.add_argument("--folder", help="for the transport file: a folder inside the server's --model-root")
    parser.add_argument("--asynchronous", action="store_true", help="refit samples while the trainer learns")
    parser.add_argument("--steps", type=int, default=320, help="over which the rate falls")
    parser.add_argument("--target", type=float, default=0.99, help="the accuracy at which the run ends")
    parser.add_argument("--prompts", type=int, default=160, help="sums of a step")
    parser.add_argument("--samples", type=int, default=4, help="of each sum")
    parser.add_argument("--rate", type=float, default=4e-4)
    parser.add_argument("--warm-up", type=int, default=5, help="steps until the rate is reached")
    parser.add_argument("--most-weight", type=float, default=2.0, help="the truncation of importance weights")
    parser.add_argument("--measure", type=int, default=10, help="steps between measurements of the accuracy")
    parser.add_argument("--threads", type=int, default=1, help="of torch; the server has its own")
    parser.add_argument("--patience", type=float, default=600, help="seconds to wait for a server that has ended")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="folder for steps.csv and steps.svg")
    args = parser.parse_args(given)
    # A live update has requests to reach only while refit samples.
    args.asynchronous |= TRANSPORTS[args.transport].live
    return args
