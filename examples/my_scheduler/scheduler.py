"""A small scheduler of nobody in particular: its own allocator, its own admission, and the classic hole.

It admits a prompt if the whole of it fits what is free, cuts chunks down to a grid, and lets the next one in while
chunk budget is left. What it forgets is that a cut prompt still needs the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class Job:
    name: str
    tokens: int
    done: int = 0
    pages: int = 0


class Scheduler:
    """Sizes in tokens; slots are handed out in pages."""

    def __init__(self, slots: int, page: int, chunk: int, grid: int) -> None:
        self.page, self.chunk, self.grid = page, chunk, grid
        self.free_pages = slots // page
        self.queue: deque[Job] = deque()
        self.running: dict[str, Job] = {}

    def enqueue(self, name: str, tokens: int) -> None:
        self.queue.append(Job(name, tokens))

    def step(self) -> Iterator[tuple[str, int, int]]:
        """Go on with what is cut, admit what fits, and run the batch: each chunk is told when it has run."""
        budget, promised, batch = self.chunk, 0, []
        for job in [job for job in self.running.values() if job.done < job.tokens]:
            end = self._chunk_end(job, budget)
            batch.append((job, end))
            budget -= end - job.done
            promised += self._new_pages(job, end)
        cut = any(end < job.tokens for job, end in batch)
        while self.queue and budget >= self.page:
            job = self.queue[0]
            if self._new_pages(job, job.tokens) >= self.free_pages - promised:
                break
            end = self._chunk_end(job, budget)
            if end < job.tokens and cut:
                break
            cut = cut or end < job.tokens
            batch.append((self.queue.popleft(), end))
            budget -= end
            promised += self._new_pages(job, end)  # the hole: of a cut prompt, only this chunk is written down
        for job, end in batch:
            yield self._run(job, end)

    def _chunk_end(self, job: Job, budget: int) -> int:
        end = min(job.tokens, job.done + budget)
        aligned = end // self.grid * self.grid
        return end if end == job.tokens or aligned <= job.done else aligned

    def _new_pages(self, job: Job, end: int) -> int:
        return -(-end // self.page) - job.pages

    def _run(self, job: Job, end: int) -> tuple[str, int, int]:
        pages = self._new_pages(job, end)
        if pages > self.free_pages:
            raise MemoryError(f"{job.name} needs {pages} pages, {self.free_pages} are free")
        self.free_pages -= pages
        job.pages += pages
        start, job.done = job.done, end
        self.running[job.name] = job
        return job.name, start, end

    def finish(self, name: str) -> None:
        self.free_pages += self.running.pop(name).pages
