"""Sums to train and to measure on. Everything is drawn from a seeded generator."""

import random
from pathlib import Path

PROMPTS = Path(__file__).parent / "prompts.txt"

# How a sum may be asked in a chat. Plain prompts have one form only: "12+345=".
QUESTIONS = ["{}+{}=", "{}+{}", "{} + {} =", "{} + {}", "What is {}+{}?", "What is {} + {}?"]
SYSTEMS = ["You add numbers.", "You are a helpful assistant.", "Answer with the sum only."]

Sum = tuple[int, int]


def held_out() -> tuple[list[Sum], list[Sum]]:
    """500 three-digit sums of prompts.txt, for the reported accuracy, and 500 others that choose the base
    checkpoint."""
    rng = random.Random(20240229)
    drawn: dict[Sum, None] = {}
    while len(drawn) < 1000:
        a, b = rng.randint(100, 999), rng.randint(100, 999)
        if (b, a) not in drawn:
            drawn[a, b] = None
    pairs = list(drawn)
    return pairs[:500], pairs[500:]


def plain(a: int, b: int) -> str:
    return f"{a}+{b}="


class Sampler:
    """Draws training texts: pieces of (text, whether its tokens are learnt). Held-out sums never occur, in either
    order."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.refused = {pair for group in held_out() for a, b in group for pair in ((a, b), (b, a))}

    def sum(self) -> Sum:
        while True:
            digits = self.rng.choices([1, 2, 3], weights=[1, 2, 7], k=2)
            a, b = (self.rng.randint(0 if n == 1 else 10 ** (n - 1), 10**n - 1) for n in digits)
            if (a, b) not in self.refused:
                return a, b

    def three_digits(self) -> Sum:
        """A sum as the held-out ones are: both numbers have three digits."""
        while min(pair := self.sum()) < 100:
            pass
        return pair

    def plain(self) -> list[tuple[str, bool]]:
        a, b = self.sum()
        return [(plain(a, b), False), (f"{a + b}<|endoftext|>", True)]

    def chat(self) -> list[tuple[str, bool]]:
        pieces = []
        if self.rng.random() < 0.15:
            pieces.append((f"<|system|>{self.rng.choice(SYSTEMS)}", False))
        for _ in range(2 if self.rng.random() < 0.25 else 1):
            a, b = self.sum()
            pieces.append((f"<|user|>{self.rng.choice(QUESTIONS).format(a, b)}<|assistant|>", False))
            pieces.append((f"{a + b}<|endoftext|>", True))
        return pieces
