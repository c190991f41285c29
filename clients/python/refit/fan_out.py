"""Calls of several engines at once."""

from concurrent.futures import ThreadPoolExecutor

from .errors import EnginesFailed


def submit(engines, call):
    """{engine: future of call(engine)}, all in parallel: some calls return only when all engines have been called."""
    pool = ThreadPoolExecutor(len(engines))
    calls = {engine: pool.submit(call, engine) for engine in engines}
    pool.shutdown(wait=False)
    return calls


def each(engines, call):
    """{engine: call(engine)}, as `results`. A single engine is called on this thread, which saves time."""
    if len(engines) == 1:
        return {engine: call(engine) for engine in engines}
    return results(submit(engines, call))


def results(calls):
    """{engine: result}, once all calls have ended. Raises the error of a single engine, EnginesFailed for several."""
    failed = {engine.url: future.exception() for engine, future in calls.items() if future.exception() is not None}
    if failed:
        raise next(iter(failed.values())) if len(calls) == 1 else EnginesFailed(failed)
    return {engine: future.result() for engine, future in calls.items()}
