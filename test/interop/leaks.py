"""Leak checks. They wait until closed connections and ended threads are gone before they compare."""

from server import settled
from tensors import shared_files


def grown(read, before):
    """Pairs (before, now) for each count of `read` that has grown."""
    return settled(lambda: [(old, new) for old, new in zip(before, read()) if new > old], lambda more: not more)


def gone(pid):
    """Whether torch_shm_manager has removed the files of a dead process."""
    return settled(lambda: shared_files(pid), lambda files: not files) == []
