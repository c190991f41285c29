"""The trainer's processes that send together."""

from .errors import RefitError


class Ranks:
    """The trainer's processes that send together. Rank 0 calls the engines; all ranks call these methods in the same
    order.

    group: None for this process alone."""

    def __init__(self, group=None):
        self.group, self.rank, self.size = group, 0, 1
        if group is not None:
            import torch.distributed as dist

            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def number_of(self, rank):
        """The number in the group of a rank of torch's default group."""
        if self.size == 1:
            return 0
        import torch.distributed as dist

        return dist.get_group_rank(self.group, rank)

    def gather(self, mine):
        """The values of all ranks, by rank, on every rank."""
        if self.size == 1:
            return [mine]
        import torch.distributed as dist

        gathered = [None] * self.size
        dist.all_gather_object(gathered, mine, group=self.group)
        return gathered

    def every(self, act):
        """Runs act() on every rank and returns the results of all, by rank, on every rank. If it fails on some, all
        ranks raise: a rank that raised alone would leave the others waiting for it."""
        result = failed = None
        try:
            result = act()
        except Exception as error:
            failed = error
        told = None if failed is None else f"rank {self.rank}: {failed!r}"
        outcomes = self.gather((result, told))
        if failed is not None:
            raise failed
        for _, told in outcomes:
            if told is not None:
                raise RuntimeError(told)
        return [result for result, _ in outcomes]

    def first(self, act):
        """Runs act() on rank 0 and returns its result on all ranks. If it fails, all ranks raise its error."""
        outcome = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = act()
            except Exception as error:
                outcome[1] = error
        if self.size > 1:
            import torch.distributed as dist

            if outcome[1] is not None and not isinstance(outcome[1], RefitError):
                outcome[1] = RuntimeError(f"rank 0: {outcome[1]!r}")
            try:
                dist.broadcast_object_list(outcome, dist.get_global_rank(self.group, 0), group=self.group)
            except Exception as broken:
                # Another rank has died. That is often the consequence of the error, or its cause: report both.
                if self.rank == 0 and outcome[1] is not None:
                    raise outcome[1] from broken
                raise
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]
