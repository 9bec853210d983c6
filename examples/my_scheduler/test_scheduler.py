"""The scheduler under test: this test is meant to fail, and to say why."""

from scheduler import Scheduler

from kvledger.targets.counted import CountedTarget
from kvledger.testing import state_machine


class Target(CountedTarget):
    def __init__(self, node, _rules, watcher):
        super().__init__(node, watcher)
        chunk = node.chunked_prefill_size or node.pool_tokens
        self.mine = Scheduler(node.pool_tokens, node.page_size, chunk, node.checkpoint_align)
        self.enqueue, self.step, self.finish = self.mine.enqueue, self.mine.step, self.mine.finish

    def free_tokens(self):
        return self.mine.free_pages * self.mine.page

    def allocated_tokens(self):
        return {name: job.pages * self.mine.page for name, job in self.mine.running.items()}


TestScheduler = state_machine(Target).TestCase
