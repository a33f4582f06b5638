"""The sender: a thread of the application's process that sends its spool to a collector in batches."""

from __future__ import annotations

import atexit
import contextlib
import http.client
import logging
import os
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from cotune.errors import ConfigError
from cotune.integrations.collect.batch import COLLECTOR_HEADER, MEDIA_TYPE, PATH, check_app, pack_batch
from cotune.integrations.collect.spool import Spool, abandoned_spools
from cotune.records.ids import address
from cotune.records.structs import Record
from cotune.records.wire import pack
from cotune.runtime.forks import survives_fork
from cotune.runtime.process_state import ProcessState
from cotune.storage.state_folder import state_folder

log = logging.getLogger("cotune.collect")

LINGER = 2.0
"""Seconds that a record waits for other records of its batch."""
BATCH_BYTES = 1 << 20
"""The most bytes of records in a batch before compression. A single larger part is sent alone."""
LARGEST = 15 << 20
"""The most bytes of records that are written together. Collectors accept no larger body."""
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 30.0
"""The first and the longest pause in seconds before a batch is sent again."""
REFUSED_PAUSE = 30.0
"""Seconds before a batch is sent again if the collector refuses its token."""
ADOPT = 60.0
"""The most seconds between two searches for spools of ended processes."""
TIMEOUT = 30.0
"""Seconds after which a request fails."""
EXIT = 5.0
"""Seconds for which the end of the process waits for unsent records."""
SPOOL_MB = 64
"""The size of a process's spool, unless COTUNE_SPOOL_MB sets it."""
_NEVER = (400, 413, 415, 422)
"""The status of answers after which a batch is not sent again, as it would never be accepted."""
_DENIED = (401, 403, 404)
"""The status of answers that only a change of the token or the address can end."""


class _Undelivered(Exception):
    """A batch must be sent again, after at least `pause` seconds, for the reason `cause`."""

    def __init__(self, cause: str, pause: float = 0.0) -> None:
        super().__init__(cause)
        self.cause = cause
        self.pause = pause


class Sender:
    """Sends the records of this process to the collector at `url`, in the name of the application `app`. `write` does
    not wait for the network and does not raise. Records that cannot be sent remain in the spool."""

    _spool: Spool | None
    _thread: threading.Thread

    def __init__(self, url: str, app: str, token: str | None = None) -> None:
        """Open the spool of this process. The first record starts the thread that sends it.

        Raises ConfigError if the address is not http or https, or if a header cannot contain the token.
        """
        self._scheme, self._host, self._port, self._path = _parts_of_url(url)
        self.url = url.rstrip("/")
        self.app = check_app(app)
        self._headers = {"content-type": MEDIA_TYPE, "content-encoding": "gzip"}
        if token:
            if not (token.isascii() and token.isprintable()):
                remedy = "Take out line breaks, and letters that are not ASCII."
                raise ConfigError("COTUNE_TOKEN", None, "cannot be sent in a header", remedy)
            self._headers["authorization"] = f"Bearer {token}"
        # Each collector has a folder of its own, named by a digest of its address.
        url_digest = address(self.url.encode())[:8]
        self.folder = spool_folder() / f"{app}-{url_digest}"
        self._bound = spool_bound()
        self._logged_disk_failure = ""
        """The last failure of the disk that was logged."""
        self.rejected = 0
        """The number of records that are too large or that the collector has refused."""
        self.sampled = 0
        """The number of calls that sampling rates have left out, until it is reported to the collector."""
        self._reset_process_state()
        self._open_spool()
        survives_fork(self)
        atexit.register(self.finish)

    def write(self, records: Sequence[Record]) -> None:
        """Put records into the spool. They are sent soon afterwards."""
        body, unpackable = pack(records)
        if unpackable:
            self._reject(unpackable, "cannot be packed")
        if len(body) > LARGEST:
            if not unpackable:
                self._reject(len(records), f"take more than {LARGEST >> 20} MiB")
            return
        spool = self._open_spool()
        spool.add(body, len(records))
        if spool.failure and self._logged_disk_failure != spool.failure:
            self._logged_disk_failure = spool.failure
            text = "The spool %s cannot be written (%s): records wait in memory. Free space there, or set COTUNE_SPOOL."
            log.warning(text, self.folder, spool.failure)
        if not self._news.is_set():
            self._news.set()
        if not self._started:
            self._start()

    def leave_out(self, calls: int) -> None:
        """Count calls that a sampling rate has left out."""
        with self._guard:
            self.sampled += calls

    def flush(self, seconds: float) -> bool:
        """Send all waiting records now. Returns whether all were sent within `seconds`."""
        self._urgent.set()
        self._news.set()
        spool = self._open_spool()
        with self._sent:
            return self._sent.wait_for(lambda: not spool.waiting, seconds)

    def finish(self) -> None:
        """Send all waiting records and stop. Records that cannot be sent in a few seconds wait for the next process."""
        atexit.unregister(self.finish)
        if self._spool is None:
            return
        if not self._started:  # nothing was written
            self._spool.close()
            self._spool = None
            return
        # The thread may wait for any of these. It sends the waiting records and ends.
        self._closing.set()
        self._urgent.set()
        self._news.set()
        self._thread.join(EXIT)
        if waiting := self._spool.waiting - self._spool.memory_bytes:
            text = "%d bytes of records wait in %s: the next process of %r that records there sends them."
            log.warning(text, waiting, self.folder, self.app)
        if in_memory := self._spool.memory_bytes:
            text = "%d bytes of records are lost: neither the disk (%s) nor the collector took them."
            log.error(text, in_memory, self._spool.failure)
        if not self._thread.is_alive():
            self._spool.close()
            self._spool = None  # later records get a new spool, which the next process finds

    def after_fork(self) -> None:
        """Prepare a forked child to make its own spool and thread with its first record."""
        if self._spool is not None:
            self._spool.after_fork()
        self._reset_process_state()

    def _reset_process_state(self) -> None:
        """Set the state of a process without a running thread: at the start, and after a fork, which copies no
        threads.
        """
        self._spool = None
        self._guard = threading.Lock()
        self._news = threading.Event()
        self._urgent = threading.Event()
        self._closing = threading.Event()
        self._sent = threading.Condition()
        self._started = False
        self._thread = threading.Thread(target=self._run, name="cotune-collect", daemon=True)
        self._connection: http.client.HTTPConnection | None = None
        self._logged_outage = ""
        """The logged cause of the failed deliveries; empty while the collector takes records."""
        self._logged_rejections: set[str] = set()
        self._next_pause = FIRST_PAUSE

    def _open_spool(self) -> Spool:
        """The spool of this process. It is opened at its first use, and again after a fork."""
        with self._guard:
            if self._spool is None:
                self._spool = Spool(self.folder, self._bound)
            return self._spool

    def _start(self) -> None:
        """Start the sending thread, unless it runs."""
        with self._guard:
            if not self._started:
                self._started = True
                self._thread.start()

    def _run(self) -> None:
        """Loop of the thread: send new records, and from time to time the records of processes that ended without
        sending.
        """
        spool = self._open_spool()
        last_search: float | None = None
        while not self._closing.is_set():
            if last_search is None or time.monotonic() - last_search >= ADOPT:
                self._send_abandoned()
                # The next search is up to half a period earlier, because processes must not all search at once.
                last_search = time.monotonic() - random.uniform(0, ADOPT / 2)
            has_new_records = self._news.wait(ADOPT / 4)
            if not has_new_records:
                continue  # see whether it is time to search
            # Wait for further records of the batch, unless `flush` or `finish` asks for all at once.
            self._urgent.wait(LINGER)
            # Cleared before the records are taken: a record that comes later is sent in the next round.
            self._news.clear()
            try:
                self._send_spool(spool)
                self._urgent.clear()
            except _Undelivered as failure:
                self._news.set()  # the records still wait
                self._wait_after_failure(failure)

        has_sent_all = self._send_before_exit(spool)
        if has_sent_all and last_search is None:
            # If all processes of an application are this short, none has searched yet.
            self._send_abandoned()

    def _send_before_exit(self, spool: Spool) -> bool:
        """Send the waiting records when the process ends. Returns whether all were sent.

        Records on the disk can wait for the next process. Records in memory would be lost, so for `EXIT` seconds they
        are sent again after a failure.
        """
        last_attempt = time.monotonic() + EXIT
        while True:
            try:
                self._send_spool(spool)
            except _Undelivered:
                if not spool.memory_bytes or time.monotonic() > last_attempt:
                    return False
                time.sleep(FIRST_PAUSE)
            else:
                return True

    def _wait_after_failure(self, failure: _Undelivered) -> None:
        """Wait after a failed delivery, longer after each failure, and log the first failure with this cause."""
        if self._logged_outage != failure.cause:
            self._logged_outage = failure.cause
            text = "The collector %s takes no records now (%s). They wait in %s and are sent later."
            log.warning(text, self.url, failure.cause, self.folder)
        # The pause is random, because processes must not all send again at once.
        seconds = max(failure.pause, self._next_pause * random.uniform(0.5, 1.0))
        self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)
        self._closing.wait(seconds)

    def _send_abandoned(self) -> None:
        """Send the spools of the application's ended processes, until the collector does not accept a batch."""
        for spool in abandoned_spools(self.folder, self._open_spool().name, self._bound):
            try:
                self._send_spool(spool)
            except _Undelivered:
                return  # the other spools wait for the next search
            finally:
                spool.close()

    def _send_spool(self, spool: Spool) -> None:
        """Send all records of a spool, batch by batch. Raises _Undelivered at the first batch that must wait."""
        while self._send_next_batch(spool):
            if self._logged_outage:
                log.warning("The collector %s takes records again.", self.url)
            self._logged_outage = ""
            self._next_pause = FIRST_PAUSE
            with self._sent:
                self._sent.notify_all()

    def _send_next_batch(self, spool: Spool) -> bool:
        """Send the next records of a spool, and the numbers of records that were left out before them. Returns False if
        the spool has nothing to send.

        Raises _Undelivered if the batch must wait. Its records then stay in the spool.
        """
        try:
            parts = spool.take(BATCH_BYTES)
            dropped = spool.dropped
            sampled = self.sampled
            if not parts and not dropped and not sampled:
                return False
            self._deliver(spool, parts, dropped, sampled)
            spool.acknowledge()
        except BaseException as error:
            spool.take_again()
            if isinstance(error, OSError):
                raise _Undelivered(f"the spool cannot be read: {error.strerror or error}") from None
            if isinstance(error, Exception) and not isinstance(error, _Undelivered):
                # No error may end the thread, or no record would be sent any more.
                log.exception("A batch could not be sent.")
                raise _Undelivered(f"{type(error).__name__}: {error}") from None
            raise

        # Both numbers may have grown meanwhile, so only the reported part is subtracted.
        spool.subtract_dropped(dropped)
        with self._guard:
            self.sampled -= sampled
        if dropped:
            log.warning("%d records were dropped: the spool %s was full, or damaged.", dropped, self.folder)
        return True

    def _deliver(self, spool: Spool, parts: Sequence[bytes], dropped: int, sampled: int) -> None:
        """Send a batch of records to the collector. `dropped` and `sampled` are the numbers of records left out before
        it.

        If the collector refuses the batch for good, it is divided, so that only the wrong records are lost. Raises
        `_Undelivered` if it may be accepted later.
        """
        status, text, pause = self._post(pack_batch(self.app, spool.name, parts, dropped, sampled))
        if status == 200:
            return
        if status in _NEVER and len(parts) > 1:
            half = len(parts) // 2
            self._deliver(spool, parts[:half], dropped, sampled)
            # The counts were sent with the first half.
            self._deliver(spool, parts[half:], dropped=0, sampled=0)
        elif status in _NEVER:
            records = sum(len(msgspec.msgpack.decode(part, type=list[msgspec.Raw])) for part in parts)
            self._reject(records, f"are refused by the collector: {text}")
        else:
            raise _Undelivered(f"HTTP {status}: {text}", REFUSED_PAUSE if status in _DENIED else pause)

    def _post(self, body: bytes) -> tuple[int, str, float]:
        """Send a body. Returns the status and text of the answer, and the seconds for which it asks to wait."""
        while True:
            is_new = self._connection is None
            if self._connection is None:
                kind = http.client.HTTPSConnection if self._scheme == "https" else http.client.HTTPConnection
                self._connection = kind(self._host, self._port, timeout=TIMEOUT)
            try:
                self._connection.request("POST", self._path + PATH, body, self._headers)
                answer = self._connection.getresponse()
                text = answer.read(10_000)
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()
                self._connection = None
                if is_new:
                    raise _Undelivered(str(error) or type(error).__name__) from None
                continue  # the server may have closed the old connection while it was idle: try a new one
            if COLLECTOR_HEADER not in answer.headers:
                # Another server at this address or a proxy has answered. Its 200 does not mean that records are stored,
                # and its 400 does not mean that they are wrong.
                pause = REFUSED_PAUSE if answer.status < 500 else 0.0
                raise _Undelivered(f"HTTP {answer.status} is not from a collector: {_message(text)}", pause)
            return answer.status, _message(text), _retry_after(answer.headers.get("retry-after", ""))

    def _reject(self, count: int, why: str) -> None:
        """Count records that are lost, and log each reason once."""
        self.rejected += count
        if why not in self._logged_rejections:
            self._logged_rejections.add(why)
            log.error("%d records of %r %s. They are lost.", count, self.app, why)


def spool_folder() -> Path:
    """The folder of all spools: COTUNE_SPOOL, or a folder of the user."""
    if named := os.environ.get("COTUNE_SPOOL"):
        return Path(named).absolute()
    return state_folder() / "spool"


def spool_bound() -> int:
    """The most bytes of the spool of one process. Raises ConfigError."""
    text = os.environ.get("COTUNE_SPOOL_MB") or str(SPOOL_MB)
    if not text.isdigit() or not int(text):
        raise ConfigError("COTUNE_SPOOL_MB", text, "must be a whole number of megabytes above 0")
    return int(text) << 20


class Senders(ProcessState):
    """The senders of this process, by address and application."""

    def __init__(self) -> None:
        self.by_address: dict[tuple[str, str], Sender] = {}
        self.renew_lock()

    def renew_lock(self) -> None:
        """Replace the lock in a forked child, as another thread of the parent may hold it."""
        self.lock = threading.Lock()


_senders = Senders()
os.register_at_fork(after_in_child=_senders.renew_lock)


def sender(url: str, app: str = "") -> Sender:
    """The sender of this process to a collector, for one application. It is made at its first use.

    Core finds this function by its entry point. The default of `app` is COTUNE_APP. Raises ConfigError.
    """
    app = app or os.environ.get("COTUNE_APP", "")
    with _senders.lock:
        if (url, app) not in _senders.by_address:
            _senders.by_address[url, app] = Sender(url, app, os.environ.get("COTUNE_TOKEN"))
        return _senders.by_address[url, app]


def _parts_of_url(url: str) -> tuple[str, str, int | None, str]:
    """Scheme, host, port and path of a collector's address. Raises ConfigError for any other address."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        # A port that is no number. An empty address fails the check below.
        parts = urlsplit("")
        port = None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise ConfigError("collector", url, "is not the address of a collector", "For example: https://collector:4319")
    return parts.scheme, parts.hostname, port, parts.path.rstrip("/")


def _retry_after(value: str) -> float:
    """The seconds for which an answer asks to wait; 0 if it has another form than a number."""
    if value.isascii() and value.isdigit() and len(value) <= 4:
        return min(float(value), 3600.0)
    return 0.0


def _message(text: bytes) -> str:
    """The message of an answer's error, or the beginning of its text."""
    with contextlib.suppress(msgspec.DecodeError, TypeError, KeyError, UnicodeDecodeError, RecursionError):
        return str(msgspec.json.decode(text)["error"]["message"])[:300]
    return text[:200].decode(errors="replace").strip()
