from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvledger.pool import OutOfPages, PagePool
from kvledger.radix import LeafQueue, PrefixTree
from kvledger.request import CachedPage
from tests.unit.builders import REPEATABLE

PAGE_SIZE = 16

Prefix = tuple[str, ...]


def prefixes_of(keys: Sequence[str]) -> list[Prefix]:
    return [tuple(keys[: end + 1]) for end in range(len(keys))]


def make_tree(pool_pages: int, host_pages: int | None = None) -> PrefixTree:
    return PrefixTree(PagePool(pool_pages, PAGE_SIZE), host_pages)


def put_on_device(tree: PrefixTree, keys: str) -> list[CachedPage]:
    """Allocate and insert below the root; the caller holds one lock on each page."""
    return tree.insert(tree.root, keys, tree.allocate(len(keys)))


def cache(tree: PrefixTree, keys: str) -> None:
    tree.unlock(put_on_device(tree, keys))


def contents(tree: PrefixTree) -> dict[Prefix, CachedPage]:
    """Every cached page by the whole prefix up to its end, walked from the root."""

    def below(cached: CachedPage, prefix: Prefix) -> Iterator[tuple[Prefix, CachedPage]]:
        for key, child in cached.children.items():
            assert (child.key, child.parent) == (key, cached)
            yield (*prefix, str(key)), child
            yield from below(child, (*prefix, str(key)))

    return dict(below(tree.root, ()))


def tier(tree: PrefixTree, keys: str) -> str:
    """d or h for each cached page of the path, - for one that is not cached."""
    found = contents(tree)
    kinds = (found.get(prefix) for prefix in prefixes_of(keys))
    return "".join("-" if cached is None else "h" if cached.page is None else "d" for cached in kinds)


# --- a naive model: a dict of prefixes, and every figure counted afresh


@dataclass
class NaivePage:
    page: int | None
    used: int
    locks: int = 0


@dataclass
class NaiveCache:
    pool_pages: int
    host_limit_pages: int | None
    pages: dict[Prefix, NaivePage] = field(default_factory=dict)
    private_pages: int = 0
    clock: int = 0
    evicted_pages: int = 0
    dropped_pages: int = 0
    shared_pages: int = 0

    def count(self, *, on_device: bool, locked: bool) -> int:
        return sum((p.page is not None) is on_device and bool(p.locks) is locked for p in self.pages.values())

    @property
    def evictable_pages(self) -> int:
        return self.count(on_device=True, locked=False)

    @property
    def protected_pages(self) -> int:
        return self.count(on_device=True, locked=True)

    @property
    def host_pages(self) -> int:
        return len(self.pages) - self.evictable_pages - self.protected_pages

    @property
    def free_pages(self) -> int:
        return self.pool_pages - self.private_pages - self.evictable_pages - self.protected_pages

    def run(self, keys: Sequence[str]) -> list[Prefix]:
        found = []
        for prefix in prefixes_of(keys):
            if prefix not in self.pages:
                break
            found.append(prefix)
        return found

    def device_run(self, keys: Sequence[str]) -> list[Prefix]:
        return [prefix for prefix in self.run(keys) if self.pages[prefix].page is not None]

    def lock(self, prefixes: Sequence[Prefix], change: int = 1) -> None:
        for prefix in prefixes:
            self.pages[prefix].locks += change

    def touch(self, prefixes: Sequence[Prefix]) -> None:
        self.clock += 1
        for prefix in prefixes:
            self.pages[prefix].used = self.clock

    def has_child(self, prefix: Prefix, *, on_device_only: bool) -> bool:
        return any(
            other[:-1] == prefix and (page.page is not None or not on_device_only) for other, page in self.pages.items()
        )

    def oldest_leaf(self, *, on_device: bool) -> Prefix:
        leaves = [
            prefix
            for prefix, page in self.pages.items()
            if (page.page is not None) is on_device
            and not page.locks
            and not self.has_child(prefix, on_device_only=on_device)
        ]
        return min(leaves, key=lambda prefix: self.pages[prefix].used)

    def make_free(self, pages: int) -> None:
        while self.free_pages < pages:
            self.pages[self.oldest_leaf(on_device=True)].page = None
            self.evicted_pages += 1
            self.trim_host()

    def trim_host(self) -> None:
        while self.host_limit_pages is not None and self.host_pages > self.host_limit_pages:
            del self.pages[self.oldest_leaf(on_device=False)]
            self.dropped_pages += 1

    def insert(self, prefixes: Sequence[Prefix], pages: Sequence[int]) -> None:
        """The pages are private to the caller; those that are cached already are freed."""
        for prefix, page in zip(prefixes, pages, strict=True):
            entry = self.pages.setdefault(prefix, NaivePage(None, 0))
            self.private_pages -= 1
            self.shared_pages += entry.page is not None
            entry.page = page if entry.page is None else entry.page
            entry.locks += 1
        self.touch(prefixes)


@dataclass
class Owner:
    """Someone who holds one lock on each page of a device path from the root down."""

    keys: Prefix
    path: list[CachedPage]


class TreeAgainstNaiveCache(RuleBasedStateMachine):
    """Every rule is valid in every state: what does not fit must be refused, with the right figures."""

    paths = st.text("ab", max_size=5)

    @initialize(pool_pages=st.integers(3, 9), host_pages=st.none() | st.integers(0, 4))
    def build(self, pool_pages: int, host_pages: int | None) -> None:
        self.tree = make_tree(pool_pages, host_pages)
        self.model = NaiveCache(pool_pages, host_pages)
        self.owners: list[Owner] = []
        self.held: list[int] = []

    def allocate(self, pages: int) -> list[int] | None:
        """Both sides allocate, or the tree refuses with the model's figures; `invariant`s see that nothing changed."""
        model = self.model
        if pages <= model.free_pages + model.evictable_pages:
            model.make_free(pages)
            taken = self.tree.allocate(pages)
            model.private_pages += pages
            assert len(taken) == pages
            return taken
        with pytest.raises(OutOfPages) as refused:
            self.tree.allocate(pages)
        error = refused.value
        figures = (error.wanted_tokens, error.free_tokens, error.evictable_tokens)
        assert figures == tuple(n * PAGE_SIZE for n in (pages, model.free_pages, model.evictable_pages))
        return None

    @rule(keys=paths)
    def refuse(self, keys: str) -> None:
        """A refused candidate locks its device part and unlocks it; nothing at all may differ after it."""
        path = [cached for cached in self.tree.match(keys) if cached.page is not None]
        self.tree.lock(path)
        self.tree.unlock(path)

    @rule(keys=paths)
    def admit(self, keys: str) -> None:
        """Lock the device part; if its host part fits, load that back. Its owner stays."""
        model = self.model
        found = self.tree.match(keys)
        on_device = model.device_run(keys)
        path, host_path = found[: len(on_device)], found[len(on_device) :]
        self.tree.lock(path)
        model.lock(on_device)
        on_host = model.run(keys)[len(on_device) :]
        if len(on_host) <= model.free_pages + model.evictable_pages:
            # pages that are being loaded back are locked before anything is evicted for them
            model.lock(on_host)
            model.make_free(len(on_host))
            self.tree.load_back(host_path)
            for prefix, cached in zip(on_host, host_path, strict=True):
                model.pages[prefix].page = cached.page
            model.touch(on_host)
            path, on_device = found, on_device + on_host
        self.tree.touch(path)
        model.touch(on_device)
        self.owners.append(Owner(tuple(keys[: len(path)]), path))

    @precondition(lambda self: self.owners)
    @rule(index=st.integers(0, 99), more=paths)
    def compute(self, index: int, more: str) -> None:
        """An owner computes further pages; some of them someone else may have cached meanwhile."""
        owner = self.owners[index % len(self.owners)]
        pages = self.allocate(len(more))
        if pages is None:
            return
        parent = owner.path[-1] if owner.path else self.tree.root
        inserted = self.tree.insert(parent, more, pages)
        new = [(*owner.keys, *prefix) for prefix in prefixes_of(more)]
        self.model.insert(new, pages)
        owner.keys, owner.path = (*owner.keys, *more), owner.path + inserted

    @precondition(lambda self: self.owners)
    @rule(index=st.integers(0, 99))
    def end(self, index: int) -> None:
        owner = self.owners.pop(index % len(self.owners))
        self.tree.unlock(owner.path)
        self.model.lock(prefixes_of(owner.keys), -1)

    @rule(keys=paths)
    def serve(self, keys: str) -> None:
        """Compute a whole prompt with no hit, and end at once: its pages are cached, and nobody locks them."""
        pages = self.allocate(len(keys))
        if pages is not None:
            self.tree.unlock(self.tree.insert(self.tree.root, keys, pages))
            self.model.insert(prefixes_of(keys), pages)
            self.model.lock(prefixes_of(keys), -1)

    @rule(keys=paths)
    def cache_on_host(self, keys: str) -> None:
        model = self.model
        self.tree.insert_on_host(keys)
        for prefix in prefixes_of(keys):
            model.pages.setdefault(prefix, NaivePage(None, 0))
        model.touch(prefixes_of(keys))
        model.trim_host()

    @rule(pages=st.integers(0, 9))
    def hold(self, pages: int) -> None:
        self.held += self.allocate(pages) or []

    @rule(pages=st.integers(1, 9))
    def release(self, pages: int) -> None:
        given_back, self.held = self.held[:pages], self.held[pages:]
        self.tree.pool.free(given_back)
        self.model.private_pages -= len(given_back)

    @invariant()
    def same_pages(self) -> None:
        found = contents(self.tree)
        assert {p: (c.page, c.lock_refs) for p, c in found.items()} == {
            p: (n.page, n.locks) for p, n in self.model.pages.items()
        }
        assert sorted(c.serial for c in self.tree.cached_pages()) == sorted(c.serial for c in found.values())

    @invariant()
    def counters_equal_recounts(self) -> None:
        tree, model = self.tree, self.model
        assert tree.evictable_size() == model.evictable_pages * PAGE_SIZE
        assert tree.protected_size() == model.protected_pages * PAGE_SIZE
        assert tree.host_pages == model.host_pages
        assert tree.pool.free_pages == model.free_pages
        assert (tree.evicted_pages, tree.dropped_pages, tree.shared_pages) == (
            model.evicted_pages,
            model.dropped_pages,
            model.shared_pages,
        )
        for cached in [tree.root, *tree.cached_pages()]:
            assert cached.device_children == sum(c.page is not None for c in cached.children.values())

    @invariant()
    def every_device_page_has_one_owner(self) -> None:
        pool = self.tree.pool
        used = [c.page for c in self.tree.cached_pages() if c.page is not None]
        assert sorted([*used, *self.held, *pool.released(), *pool.never_used()]) == list(range(pool.pool_pages))

    @invariant()
    def on_any_path_device_and_locked_pages_come_first(self) -> None:
        for cached in self.tree.cached_pages():
            parent = cached.parent
            assert parent is not None
            if parent is not self.tree.root:
                assert cached.page is None or parent.page is not None
                assert cached.lock_refs <= parent.lock_refs


TestTreeAgainstNaiveCache = TreeAgainstNaiveCache.TestCase
TestTreeAgainstNaiveCache.settings = settings(REPEATABLE, max_examples=120, stateful_step_count=40)


# --- what the model would only say as a difference, by name


def test_eviction_takes_the_least_recently_used_leaf_and_never_a_page_under_one() -> None:
    tree = make_tree(6)
    cache(tree, "abc")
    cache(tree, "xyz")
    tree.touch(tree.match("abc"))
    order = []
    for _ in range(6):
        before = tier(tree, "abc") + tier(tree, "xyz")
        tree.allocate(1)
        after = tier(tree, "abc") + tier(tree, "xyz")
        order += [key for key, was, now in zip("abcxyz", before, after, strict=True) if was != now]
    assert order == ["z", "y", "x", "c", "b", "a"]


def test_a_locked_page_is_never_evicted_and_its_unlocked_end_is() -> None:
    tree = make_tree(3)
    cache(tree, "abc")
    tree.lock(tree.match("ab"))
    assert (tree.evictable_size(), tree.protected_size()) == (PAGE_SIZE, 2 * PAGE_SIZE)
    tree.allocate(1)
    assert tier(tree, "abc") == "ddh"
    with pytest.raises(OutOfPages):
        tree.allocate(1)
    assert tier(tree, "abc") == "ddh"


def test_a_page_is_evictable_again_only_when_its_last_lock_goes() -> None:
    tree = make_tree(2)
    path = put_on_device(tree, "a")
    tree.lock(path)
    tree.unlock(path)
    assert tree.evictable_size() == 0
    tree.unlock(path)
    assert tree.evictable_size() == PAGE_SIZE
    assert len(tree.allocate(2)) == 2


def test_an_allocation_that_is_refused_says_free_and_evictable_and_evicts_nothing() -> None:
    tree = make_tree(4)
    cache(tree, "ab")
    put_on_device(tree, "x")
    with pytest.raises(OutOfPages) as refused:
        tree.allocate(4)
    error = refused.value
    assert (error.wanted_tokens, error.free_tokens, error.evictable_tokens) == (64, 16, 32)
    assert (tier(tree, "ab"), tree.evicted_pages, tree.pool.free_pages) == ("dd", 0, 1)


def test_free_pages_are_used_before_anything_is_evicted() -> None:
    tree = make_tree(4)
    cache(tree, "ab")
    tree.allocate(2)
    assert (tier(tree, "ab"), tree.evicted_pages) == ("dd", 0)
    tree.allocate(1)
    assert (tier(tree, "ab"), tree.evicted_pages) == ("dh", 1)


def test_a_page_that_is_cached_already_is_shared_and_the_copy_freed() -> None:
    tree = make_tree(6)
    first = put_on_device(tree, "ab")
    copies = tree.allocate(3)
    second = tree.insert(tree.root, "abc", copies)
    assert second[:2] == first
    assert [cached.lock_refs for cached in second] == [2, 2, 1]
    assert (tree.shared_pages, sorted(tree.pool.released())) == (2, sorted(copies[:2]))
    assert second[2].page == copies[2]


def test_inserting_pages_that_are_shared_makes_them_recent() -> None:
    tree = make_tree(8)
    cache(tree, "ab")
    cache(tree, "xy")
    cache(tree, "ab")
    tree.allocate(6)
    assert (tier(tree, "ab"), tier(tree, "xy")) == ("dd", "hh")


def test_pages_loaded_back_are_recent() -> None:
    tree = make_tree(4)
    tree.insert_on_host("ab")
    cache(tree, "xy")
    tree.load_back(tree.match("ab"))
    tree.unlock(tree.match("ab"))
    tree.allocate(2)
    assert (tier(tree, "ab"), tier(tree, "xy")) == ("dd", "hh")


def test_an_inserted_page_replaces_its_copy_on_the_host() -> None:
    tree = make_tree(4)
    tree.insert_on_host("abc")
    put_on_device(tree, "ab")
    assert (tier(tree, "abc"), tree.host_pages, tree.shared_pages) == ("ddh", 1, 0)


def test_load_back_moves_the_host_part_to_locked_device_pages() -> None:
    tree = make_tree(4)
    tree.insert_on_host("abc")
    tree.load_back(tree.match("abc"))
    assert (tier(tree, "abc"), tree.host_pages, tree.protected_size()) == ("ddd", 0, 3 * PAGE_SIZE)
    assert tree.pool.free_pages == 1


def test_what_is_being_loaded_back_is_not_dropped_by_the_evictions_it_needs() -> None:
    tree = make_tree(3, host_pages=3)
    tree.insert_on_host("abc")
    cache(tree, "xyz")
    tree.load_back(tree.match("abc"))
    assert (tier(tree, "abc"), tier(tree, "xyz"), tree.host_pages) == ("ddd", "---", 0)


def test_the_host_drops_the_least_recently_used_leaf_first() -> None:
    tree = make_tree(4, host_pages=4)
    tree.insert_on_host("ab")
    tree.insert_on_host("xy")
    tree.touch(tree.match("ab"))
    tree.insert_on_host("p")
    assert (tier(tree, "ab"), tier(tree, "xy"), tier(tree, "p")) == ("hh", "h-", "h")
    tree.insert_on_host("q")
    assert (tier(tree, "ab"), tier(tree, "xy")) == ("hh", "--")
    tree.insert_on_host("r")
    assert (tier(tree, "ab"), tree.host_pages, tree.dropped_pages) == ("h-", 4, 3)


def test_a_prompt_longer_than_the_host_keeps_its_beginning() -> None:
    tree = make_tree(4, host_pages=2)
    tree.insert_on_host("abcd")
    assert tier(tree, "abcd") == "hh--"


def test_without_a_host_tier_an_evicted_page_is_gone() -> None:
    tree = make_tree(2, host_pages=0)
    cache(tree, "ab")
    tree.insert_on_host("xyz")
    tree.allocate(1)
    assert (tier(tree, "ab"), tier(tree, "xyz")) == ("d-", "---")
    assert (tree.host_pages, len(list(tree.cached_pages()))) == (0, 1)


def test_a_match_touches_nothing() -> None:
    tree = make_tree(4)
    cache(tree, "ab")
    cache(tree, "xy")
    tree.match("ab")
    tree.allocate(2)
    assert (tier(tree, "ab"), tier(tree, "xy")) == ("hh", "dd")


def test_locking_and_unlocking_leaves_the_eviction_order_as_it_was() -> None:
    tree = make_tree(4)
    cache(tree, "ab")
    cache(tree, "xy")
    path = tree.match("ab")
    tree.lock(path)
    tree.unlock(path)
    tree.allocate(2)
    assert (tier(tree, "ab"), tier(tree, "xy")) == ("hh", "dd")


# --- the leaf queue


def test_the_queue_stays_within_bounds_whatever_is_touched() -> None:
    tree = make_tree(40)
    for key in "abcdefghijklmnopqrst":
        cache(tree, key)
    paths = [tree.match(key) for key in "abcdefghijklmnopqrst"]
    longest = 0
    for touch in range(100_000):
        tree.touch(paths[touch * 7 % 20])
        longest = max(longest, len(tree._device_leaves._heap))
    assert longest <= 2 * 20 + 64
    # 7 and 20 have no common divisor: the last twenty touches were one of each page, in this order
    last = ["abcdefghijklmnopqrst"[touch * 7 % 20] for touch in range(100_000 - 20, 100_000)]
    tree.allocate(20 + 5)
    assert [tier(tree, key) for key in last] == ["h"] * 5 + ["d"] * 15


def test_the_queue_stays_within_bounds_on_the_host_too() -> None:
    tree = make_tree(1)
    longest = 0
    for _ in range(10_000):
        for key in "abc":
            tree.insert_on_host(key)
        longest = max(longest, len(tree._host_leaves._heap))
    assert longest <= 2 * 3 + 64


def test_locking_and_unlocking_for_ever_does_not_grow_the_queue() -> None:
    tree = make_tree(2)
    cache(tree, "a")
    path = tree.match("a")
    longest = 0
    for _ in range(10_000):
        tree.lock(path)
        tree.unlock(path)
        longest = max(longest, len(tree._device_leaves._heap))
    assert longest <= 2 + 64
    assert len(tree.allocate(2)) == 2


def test_the_queue_pops_every_leaf_once_oldest_first() -> None:
    leaves = [CachedPage(f"leaf {number}", None, number) for number in range(300)]
    queue = LeafQueue(lambda page: not page.lock_refs)
    for number, leaf in enumerate(leaves):
        leaf.last_used = number * 7 % 300
        queue.offer(leaf)
        queue.offer(leaf)
    popped = []
    while (oldest := queue.pop()) is not None:
        oldest.lock_refs = 1
        popped.append(oldest.last_used)
    assert popped == list(range(300))


def test_dropping_what_is_stale_costs_a_few_looks_a_touch_however_many_leaves_there_are() -> None:
    looks = 0

    def is_leaf(_page: CachedPage) -> bool:
        nonlocal looks
        looks += 1
        return True

    queue = LeafQueue(is_leaf)
    leaves = [CachedPage(f"leaf {number}", None, number) for number in range(1000)]
    for touch in range(10_000):
        leaf = leaves[touch * 7 % 1000]
        leaf.last_used = touch
        queue.offer(leaf)
    assert looks <= 4 * 10_000


def test_an_entry_goes_stale_when_its_page_is_used_or_locked() -> None:
    used, locked, plain = (CachedPage(key, None, serial) for serial, key in enumerate("ulp"))
    queue = LeafQueue(lambda page: not page.lock_refs)
    for leaf in (used, locked, plain):
        queue.offer(leaf)
    used.last_used = 1
    queue.offer(used)
    locked.lock_refs = 1
    assert (queue.pop(), queue.pop(), queue.pop()) == (plain, used, None)


def test_a_load_back_that_finds_no_slots_leaves_everything_as_it_was() -> None:
    tree = make_tree(2)
    tree.insert_on_host("abc")
    with pytest.raises(OutOfPages):
        tree.load_back(tree.match("abc"))
    assert [cached.lock_refs for cached in tree.cached_pages()] == [0, 0, 0]
    assert (tree.host_pages, tree.protected_pages, tree.pool.free_pages) == (3, 0, 2)
