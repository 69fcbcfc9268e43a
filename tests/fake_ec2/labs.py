"""Several fake accounts, in which cases are played side by side, for they mostly wait."""

from __future__ import annotations

import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from fake_ec2.cases import Case, Outcome, play
from fake_ec2.lab import Lab


class Labs:
    """So many accounts, and the cases that wait for one."""

    def __init__(self, directory: Path, count: int) -> None:
        self.every = []
        for number in range(count):
            (directory / f"lab-{number}").mkdir()
            self.every.append(Lab(directory / f"lab-{number}"))
        self.free: SimpleQueue[Lab] = SimpleQueue()
        for lab in self.every:
            self.free.put(lab)
        self.pool = ThreadPoolExecutor(count)
        self.futures: dict[str, Future[Outcome]] = {}

    def submit(self, name: str, case: Case) -> None:
        self.futures[name] = self.pool.submit(self._play, name, case)

    def _play(self, name: str, case: Case) -> Outcome:
        lab = self.free.get()
        try:
            outcome = play(lab, case)
            print(f"{name}: {outcome}", file=sys.stderr)
            return outcome
        finally:
            self.free.put(lab)

    def close(self) -> None:
        """End everything at once: cases that are still played fail, which nobody waits for."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        for lab in self.every:
            lab.close()
