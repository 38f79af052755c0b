"""fdatasync on a separate thread: the writer waits for the disk only if it calls `wait`."""

from __future__ import annotations

import threading

from headrace.jobs.files import sync_data


class Syncer:
    """Syncs one file. `num_synced` is the argument of the last `request` that is complete."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._changed = threading.Condition()
        self._wanted = 0
        self._is_closed = False
        self.num_synced = 0
        self.failure: OSError | None = None
        # A daemon: a disk that hangs must not keep the process from exiting.
        self._thread = threading.Thread(target=self._run, name="headrace-sync", daemon=True)
        self._thread.start()

    def request(self, num_written: int) -> None:
        with self._changed:
            self._wanted = num_written
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until everything requested is on disk, or the sync has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self.num_synced >= self._wanted or self.failure is not None)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._wanted > self.num_synced)
                if self._is_closed:
                    return
                wanted = self._wanted
            try:
                sync_data(self._descriptor)
            except OSError as error:  # the kernel may have dropped the data: never sync this file again
                with self._changed:
                    self.failure = error
                    self._changed.notify_all()
                return
            with self._changed:
                self.num_synced = wanted
                self._changed.notify_all()
