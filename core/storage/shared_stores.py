"""Stores that the traces of one process share.

A store stays open for a moment after its last trace has ended. Opening one costs several milliseconds, which an
application that traces each request would otherwise pay per request.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from cotune.runtime.forks import leave_open
from cotune.runtime.process_state import ProcessState
from cotune.storage.open_store import is_path, open_store, records_file
from cotune.storage.protocol import Store
from cotune.storage.sql.store import SqlStore

log = logging.getLogger("cotune.store")

UNUSED_SECONDS = 1.0
"""How long a store without a trace stays open. An application that traces less often than this spends less than one
percent of its time on opening stores."""
MOST_UNUSED = 8
"""Maximum number of stores that stay open without a trace. Each has a thread and three open files, and an application
may trace every request into a separate folder."""
_ENDS = (signal.SIGTERM, signal.SIGHUP)


@dataclass(slots=True)
class _SharedStore:
    """A store, the number of traces that use it, and since when none does."""

    store: Store
    users: int = 0
    unused_since: float = 0.0


class SharedStores(ProcessState):
    """The stores that traces of this process use, or used a moment ago."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.by_address: dict[str, _SharedStore] = {}
        """The unused ones are in the order in which their last trace ended."""
        self.closer: threading.Thread | None = None
        """Closes stores that stay unused."""

    def in_child(self) -> None:
        """Forget the unused stores in a forked child: it has neither the thread nor the file locks of its parent."""
        self.lock = threading.Lock()
        self.closer = None
        for address, shared in list(self.by_address.items()):
            if not shared.users:
                leave_open(self.by_address.pop(address))


_stores = SharedStores()
os.register_at_fork(after_in_child=_stores.in_child)


def shared_address(address: str | Path) -> str:
    """The name under which the traces of a process share a store. Each file has one such name."""
    return str(records_file(address) if is_path(address) else address)


def acquire_store(address: str) -> Store:
    """The store at a `shared_address`, for a trace that begins. It is opened if no other trace of this process uses it.

    Call `release_store` when the trace ends. Raises RunError or ConfigError if the store cannot be opened.
    """
    with _stores.lock:
        shared = _stores.by_address.get(address)
        if shared is None or not shared.users:
            shared = _SharedStore(_open_or_resume(address))
            _stores.by_address[address] = shared
            _flush_at_signals()
        shared.users += 1
        return shared.store


def _open_or_resume(address: str) -> Store:
    """The store at an address: the one that is still open in this process without a trace, or a new one.

    The open store cannot be resumed if another process has changed its file.
    """
    unused = _stores.by_address.pop(address, None)
    if unused is None:
        return open_store(address)
    is_resumed = False
    try:
        is_resumed = isinstance(unused.store, SqlStore) and unused.store.resume()
    # Also after an error: nobody else has the store, so nobody else would close it.
    finally:
        if not is_resumed:
            unused.store.close()
    return unused.store if is_resumed else open_store(address)


def release_store(address: str) -> None:
    """End the use of a store by one trace. Returns when everything written to the store is durable.

    After the last trace, other processes may write. The store then stays open for a moment, for the next trace.
    """
    with _stores.lock:
        store = _stores.by_address[address].store
    store.flush()  # outside of the lock, as it may take long
    with _stores.lock:
        shared = _stores.by_address[address]
        shared.users -= 1
        if shared.users:
            return
        _leave_signals()
        del _stores.by_address[address]
        is_paused = isinstance(store, SqlStore) and store.pause()
        if not is_paused:  # it cannot let other processes write while it is open
            store.close()
            return

        # The paused store is the last one in the dictionary, where unused stores are in the order of their last use.
        shared.unused_since = time.monotonic()
        _stores.by_address[address] = shared
        unused_addresses = [name for name, other in _stores.by_address.items() if not other.users]
        if len(unused_addresses) > MOST_UNUSED:
            least_recently_used = _stores.by_address.pop(unused_addresses[0])
            least_recently_used.store.close()
        _start_closer()


def _flush_at_signals() -> None:
    """From now on, write records to disk before SIGTERM or SIGHUP ends an application that does not handle them. Only
    the main thread can handle a signal."""
    if threading.current_thread() is threading.main_thread():
        for number in _ENDS:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _flush_and_end)


def _leave_signals() -> None:
    """Restore the default handlers once no store is in use."""
    in_use = any(shared.users for shared in _stores.by_address.values())
    if not in_use and threading.current_thread() is threading.main_thread():
        for number in _ENDS:
            if signal.getsignal(number) is _flush_and_end:
                signal.signal(number, signal.SIG_DFL)


def _flush_and_end(number: int, frame: FrameType | None) -> None:
    """The handler of SIGTERM and SIGHUP: write all records to disk, then end the process by the same signal.

    It takes no lock, because the thread that it interrupts may hold it.
    """
    for shared in list(_stores.by_address.values()):
        if shared.users:
            with contextlib.suppress(Exception):  # the process ends anyway
                shared.store.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _start_closer() -> None:
    """Start the thread that closes unused stores, unless it runs."""
    if _stores.closer is None:
        _stores.closer = threading.Thread(target=_close_unused, name="cotune-unused-stores", daemon=True)
        _stores.closer.start()


def _close_unused() -> None:
    """The main function of the thread that closes stores which no trace has used for `UNUSED_SECONDS`. It ends when no
    unused store is left."""
    while True:
        time.sleep(UNUSED_SECONDS)
        with _stores.lock:
            for address, shared in list(_stores.by_address.items()):
                if shared.users or time.monotonic() - shared.unused_since < UNUSED_SECONDS:
                    continue
                del _stores.by_address[address]
                try:
                    shared.store.close()
                except Exception:  # this thread must continue, as other stores wait for it
                    log.exception("The store %s could not be closed.", shared.store.address)
            if all(shared.users for shared in _stores.by_address.values()):
                _stores.closer = None
                return
