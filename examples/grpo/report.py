"""The reports of a run: a line for each step, steps.csv, and steps.svg (drawn here: nothing but Python is needed)."""

import contextlib
import csv
import time

COLUMNS = "step reward accuracy staleness mismatch mismatch_max kl clipped rollout_s train_s update_s measure_s".split()
PHASES = ["rollout", "train", "update", "measure"]
PANELS = [
    ("accuracy on unseen sums, and reward", ["accuracy", "reward"]),
    ("mismatch: mean |trainer's logprob - refit's|", ["mismatch"]),
    ("staleness: steps since the weights that sampled", ["staleness"]),
    ("seconds of a step", [f"{phase}_s" for phase in PHASES]),
]
COLOURS = ["#0969da", "#cf222e", "#1a7f37", "#8250df"]
WIDTH, HEIGHT, LEFT, TOP = 720, 150, 60, 30


class Report:
    def __init__(self, folder=None):
        self.folder, self.rows, self.times, self.started = folder, [], {}, time.monotonic()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def seconds(self):
        return time.monotonic() - self.started

    def note(self, text):
        print(f"{self.seconds:7.1f} s  {text}", flush=True)

    @contextlib.contextmanager
    def timed(self, phase):
        began = time.monotonic()
        yield
        self.times[f"{phase}_s"] = time.monotonic() - began

    def row(self, step, **values):
        self.rows.append(dict(values, step=step, **self.times))
        self.times = {}
        texts = [f"step {step:3d}"]
        for name, form in dict(reward=".3f", accuracy=".1%", staleness=".2f", mismatch=".4f", kl=".1e").items():
            texts.append(f"{name} {values[name]:{form}}" if name in values else " " * (len(name) + 7))
        texts += [f"{phase} {self.rows[-1].get(phase + '_s', 0):.2f}" for phase in PHASES[:3]]
        self.note("  ".join(texts))

    def end(self):
        """Prints where the time went, and writes the files."""
        total = {phase: sum(row.get(f"{phase}_s", 0) for row in self.rows) for phase in PHASES}
        cpu = time.process_time()
        self.note("seconds: " + ", ".join(f"{phase} {s:.1f}" for phase, s in total.items()) + f"; CPU {cpu:.1f}")
        self.note("accuracy " + sparkline([row["accuracy"] for row in self.rows if "accuracy" in row], 0, 1))
        if self.folder is None:
            return
        with open(self.folder / "steps.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(self.rows)
        (self.folder / "steps.svg").write_text(plot(self.rows))
        self.note(f"wrote {self.folder / 'steps.csv'} and {self.folder / 'steps.svg'}")


def sparkline(values, low, high):
    bars = "▁▂▃▄▅▆▇█"
    return "".join(bars[min(7, int(8 * (value - low) / (high - low)))] for value in values)


def plot(rows):
    """An SVG with a panel for each figure."""
    parts = []
    for index, (title, names) in enumerate(PANELS):
        parts.append(panel(rows, title, names, TOP + index * (HEIGHT + 50)))
    height = TOP + len(PANELS) * (HEIGHT + 50)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + 2 * LEFT}" height="{height}" '
    style = 'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
    return head + style + "".join(parts) + "</svg>\n"


def panel(rows, title, names, top):
    values = [row[name] for row in rows for name in names if name in row]
    high, last = max([*values, 1e-9]), max([row["step"] for row in rows], default=1)

    def place(step, value):
        return f"{LEFT + WIDTH * step / last:.1f},{top + HEIGHT * (1 - value / high):.1f}"

    parts = [
        f'<text x="{LEFT}" y="{top - 8}" font-weight="bold">{title}</text>',
        f'<rect x="{LEFT}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#d0d7de"/>',
        f'<text x="{LEFT - 6}" y="{top + 10}" text-anchor="end">{high:.3g}</text>',
        f'<text x="{LEFT - 6}" y="{top + HEIGHT}" text-anchor="end">0</text>',
        f'<text x="{LEFT + WIDTH}" y="{top + HEIGHT + 15}" text-anchor="end">step {last}</text>',
    ]
    for name, colour in zip(names, COLOURS):
        points = " ".join(place(row["step"], row[name]) for row in rows if name in row)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        x, y = LEFT + 8 + 110 * names.index(name), top + HEIGHT + 15
        parts.append(f'<text x="{x}" y="{y}" fill="{colour}">{name.removesuffix("_s")}</text>')
    return "".join(parts)
