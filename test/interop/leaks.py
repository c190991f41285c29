"""What must not grow, and what must go: seen once connections that are over have been closed, and threads that end have ended."""

from server import settled
from tensors import shared_files


def grown(read, before):
    """[(before, now)] of the counts that `read` returns and that are larger than before."""
    return settled(lambda: [(old, new) for old, new in zip(before, read()) if new > old], lambda more: not more)


def gone(pid):
    """Whether torch_shm_manager has removed what a dead process left."""
    return settled(lambda: shared_files(pid), lambda files: not files) == []
